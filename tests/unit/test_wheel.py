"""The wheel has what the package reads at run time, its page leads somewhere, and README's first lines work with it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from email import message_from_string
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from hatchling.builders.wheel import WheelBuilder
from support.launches import clean_environment

from toolkit import paths

ROOT = Path(__file__).parents[2]


def test_the_wheel_has_every_file_of_the_package_and_the_recipes() -> None:
    listed = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "toolkit").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert "toolkit/pages/templates/run.html.jinja" in package
    assert package - listed == set()
    forced = WheelBuilder(str(ROOT)).config.get_force_include()
    assert set(forced.values()) >= {"toolkit/_recipes", "toolkit/_accelerate_configs", "toolkit/_docs"}


@pytest.mark.slow
def test_the_first_lines_of_the_readme_work_with_the_wheel_in_an_empty_folder(tmp_path: Path) -> None:
    from readme_renderer.markdown import render  # of a package for releases alone

    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as content:
        (name,) = (name for name in content.namelist() if name.endswith("/METADATA"))
        page = message_from_string(content.read(name).decode()).get_payload()
    shown = render(page)
    links = re.findall(r'(?:href|src)="(?!#|https?://)([^"]*)"', shown)
    assert links == []
    assert len(re.findall("toolkit help [a-z]", shown)) > 25, "where the README has links"

    place, environment = tmp_path / "empty", tmp_path / "venv"
    place.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (site / "of_tests.pth").write_text(sysconfig.get_path("purelib"))  # the libraries, but no editable installation
    subprocess.run([environment / "bin/pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    home = {
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }

    def told(*words: str) -> str:
        done = subprocess.run(words, cwd=place, env=clean_environment(**home), text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    block = (ROOT / "README.md").read_text(encoding="utf-8").partition("```bash\n")[2].partition("```")[0]
    first, second = block.splitlines()
    assert first.endswith(" && pip install -e . && toolkit train quickstart --cpu 2")
    assert "accelerate launch" in told(*first.split(" && ")[-1].split(), "training.max_steps=2")
    copy, score = second.split(" && ")
    told(*copy.split())
    said = told(*score.split(), "--max-new-tokens=8")
    assert "of 100" in said
    assert told("toolkit", "help", "rows").startswith("# Rows")


def test_an_extra_is_installed_from_the_checkout_or_by_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert paths.install_command("qlora") == "pip install -e '.[qlora]'"
    monkeypatch.chdir(tmp_path)
    assert shlex.split(paths.install_command("s3")) == ["pip", "install", "-e", f"{ROOT}[s3]"]
    named = ["torch>=2.13", "s3fs>=2025.5; extra == 's3'", 'gcsfs>=2025.5 ; extra == "gs"']
    monkeypatch.setattr(metadata, "requires", {"finetune-toolkit": named}.get)
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "site-packages/toolkit/paths.py"))
    assert paths.install_command("s3") == "pip install 's3fs>=2025.5'"


def test_nothing_asks_for_the_toolkit_on_an_index() -> None:
    files = [*(ROOT / "toolkit").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = [path for path in files if "finetune-toolkit[" in path.read_text(encoding="utf-8")]
    assert named == []
