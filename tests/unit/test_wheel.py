"""The wheel has what the package reads at run time, and extras are installed by commands that work without an index."""

from __future__ import annotations

import shlex
from importlib import metadata
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

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
    assert set(forced.values()) >= {"toolkit/_recipes", "toolkit/_accelerate_configs"}


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
