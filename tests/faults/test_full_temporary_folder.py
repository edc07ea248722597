"""A folder for temporary files (TMPDIR) without room: runs, exports and commands do without it, or say so."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.disturbances import small_disk
from support.launches import clean_environment
from support.ranks import LIMIT_SECONDS
from support.texts import make_texts
from support.tiny import recipe_values, save_llama

FINETUNE = str(Path(__file__).parents[2] / "recipes/finetune.py")
TOOLKIT = ["-m", "toolkit.cli.app"]


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(2**20)):
            pass


@pytest.mark.parametrize(
    ("ranks", "launcher"), [pytest.param(1, [FINETUNE], marks=pytest.mark.grid), (2, [*TOOLKIT, "train"])]
)
def test_a_run_its_export_and_its_text(ranks: int, launcher: list[str], tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in make_texts(60)))
    save_llama(tmp_path / "model", make_texts(60), tied=True)
    run = tmp_path / "run"
    values = recipe_values(tmp_path / "model", tmp_path / "texts.jsonl", run, tmp_path / "cache", max_steps=2)
    values |= {"checkpoint": {"every_steps": 1}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    with small_disk(tmp_path / "temporary") as mounted:
        if not mounted:
            pytest.skip("this system lets nobody mount a file system")
        fill(tmp_path / "temporary")
        environment = clean_environment(TMPDIR=str(tmp_path / "temporary"))
        for words in (
            [*launcher, str(tmp_path / "recipe.yaml"), *(["--cpu", str(ranks)] if ranks > 1 else [])],
            [*TOOLKIT, "export", str(run), "--checkpoint", "1", "--to", str(tmp_path / "first")],
            [*TOOLKIT, "generate", str(run), "--prompt", "the moon", "--max-new-tokens", "2", "--device", "cpu"],
        ):
            done = subprocess.run(
                [sys.executable, *words],
                env=environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
            )
            assert done.returncode == 0, done.stderr[-3000:]
            assert "Traceback" not in done.stderr
        assert sorted(path.name for path in (tmp_path / "temporary").iterdir()) == ["ballast"]
    assert (run / "finished.json").exists()
    assert (tmp_path / "first/model.safetensors").exists()
