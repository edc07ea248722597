"""The `toolkit` command and the launch script's own errors, as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launches import clean_environment

ROOT = Path(__file__).parents[3]
TOOLKIT = str(Path(sys.executable).with_name("toolkit"))


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = clean_environment(COLUMNS="200", **environment)
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=300, env=env)


def test_version() -> None:
    assert run(TOOLKIT, "--version").stdout.startswith("toolkit 0.")


def test_recipes_are_listed() -> None:
    table = run(TOOLKIT, "recipes")
    assert table.returncode == 0
    assert "quickstart" in table.stdout
    rows = json.loads(run(TOOLKIT, "recipes", "--json").stdout)
    assert {row["name"] for row in rows} == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert all(row["description"] for row in rows)


def test_a_copied_recipe_keeps_its_comments_and_finds_its_files(tmp_path: Path) -> None:
    copied = run(TOOLKIT, "recipes", "copy", "quickstart", str(tmp_path / "mine.yaml"))
    assert copied.returncode == 0, copied.stderr
    assert run(TOOLKIT, "validate", str(tmp_path / "mine.yaml")).returncode == 0
    text = (tmp_path / "mine.yaml").read_text()
    assert str(ROOT / "recipes/data/plays.jsonl") in text
    again = run(TOOLKIT, "recipes", "copy", "quickstart", str(tmp_path / "mine.yaml"))
    assert again.returncode == 2
    assert "exists" in again.stderr
    assert run(TOOLKIT, "recipes", "copy", "quikstart", str(tmp_path / "x.yaml")).returncode == 2


def test_validate_shows_values_and_origins() -> None:
    shown = run(TOOLKIT, "validate", "quickstart", "training.max_steps=7", "--json")
    values = json.loads(shown.stdout)
    assert values["training.max_steps"] == {"value": 7, "from": "override"}
    assert values["optimizer.eps"] == {"value": 1e-8, "from": "default"}
    assert values["model.config.model_type"]["from"].endswith("quickstart.yaml")
    assert "training.max_steps" in run(TOOLKIT, "validate", "quickstart").stdout


def test_validate_tells_all_errors_and_exits_with_2() -> None:
    bad = run(TOOLKIT, "validate", "quickstart", "training.max_step=7", "model.dtype=fp8")
    assert bad.returncode == 2
    assert "2 problems" in bad.stderr
    assert "did you mean 'max_steps'" in bad.stderr
    assert "Traceback" not in bad.stderr


def test_the_script_lists_the_recipes_and_their_errors() -> None:
    script = str(ROOT / "recipes/finetune.py")
    told = run(sys.executable, script, "--help")
    assert told.returncode == 0
    assert "quickstart" in told.stdout
    for arguments, message in (
        (["--recipe", "nothing"], "there is no recipe of that name"),
        (["training.max_step=3"], "did you mean 'max_steps'"),
        (["nonsense"], "expected key.sub=value"),
    ):
        failed = run(sys.executable, script, *arguments)
        assert failed.returncode == 2, failed
        assert message in failed.stderr
        assert "Traceback" not in failed.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_first_rank_prints_an_error(rank: str) -> None:
    code = (
        "import sys; from toolkit.cli import console, finetune; console.PATIENCE_SECONDS = 0.1; "
        "sys.exit(finetune.finetune_command(['--recipe', 'nothing']))"
    )
    failed = run(sys.executable, "-c", code, RANK=rank, WORLD_SIZE="2")
    assert failed.returncode == 2
    assert bool(failed.stderr) == (rank == "0")
