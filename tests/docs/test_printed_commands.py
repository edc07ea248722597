"""Every command that README and docs print: run where it can be, else checked down to its files and keys."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from docs_commands import ROOT, Printed, check, commands, printed
from typer.testing import CliRunner

from toolkit.cli.app import app

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PRINTED = [command for page in PAGES for command in printed(page)]
ON_PAGES = [list(group) for _, group in itertools.groupby(PRINTED, lambda command: command.page)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's folder as a reader has it: a recipe of one's own, some conversations, no finished run."""
    for name in ("accelerate_configs", "recipes", "docs", "benchmarks", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "chats").mkdir()
    turns = [{"role": "user", "content": "Who goes there?"}, {"role": "assistant", "content": "A friend."}]
    (tmp_path / "chats/one.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def own_recipe(name: str = "mine.yaml") -> None:
    assert CliRunner().invoke(app, ["recipes", "copy", "quickstart", name]).exit_code == 0


@pytest.mark.parametrize("page", ON_PAGES, ids=lambda page: page[0].page)
def test_what_is_printed_exists(page: list[Printed], place: Path) -> None:
    own_recipe()
    wrong = []
    for command in page:
        try:
            check(command.words)
        except (Exception, SystemExit) as error:
            wrong.append(f"{' '.join(command.words)}: {type(error).__name__} {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "page", [page for page in ON_PAGES if any(c.runs for c in page)], ids=lambda page: page[0].page
)
def test_what_runs_here_runs(page: list[Printed], place: Path) -> None:
    for program, *arguments in (command.words for command in page if command.runs):
        assert program == "toolkit", "launches have tests of their own: tests/recipes, tests/traces"
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, (arguments, done.output, done.exception)


def test_commands_are_found() -> None:
    programs = {command.words[0] for command in PRINTED}
    assert {"toolkit", "accelerate", "torchrun", "pip"} <= programs
    assert any(command.runs for command in PRINTED)
    for page in PAGES:  # none slips through another way of writing a block
        text = page.read_text(encoding="utf-8")
        lines = re.findall(r"^(?:    )?(?:toolkit|accelerate launch|torchrun) .*", text, re.MULTILINE)
        assert len(lines) <= sum(command.page == str(page.relative_to(ROOT)) for command in PRINTED), page


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("toolkit plan --shard-sizes 2", "No such option"),
        ("toolkit planned", "No such command"),
        ("toolkit validate quikstart", "quikstart"),
        ("toolkit validate quickstart training.max_step=7", "training.max_step"),
        ("accelerate launch --config_file accelerate_configs/cpu_3.yaml recipes/finetune.py", "cpu_3.yaml"),
        ("accelerate launch --config_fil accelerate_configs/cpu_2.yaml recipes/finetune.py", "config_fil"),
        ("accelerate launch recipes/finetune.py --recipe sft model.name=x", "model.name"),
        ("torchrun --nodes 2 recipes/finetune.py", "--nodes"),
        ("srun bash -c 'accelerate launch recipes/tune.py'", "recipes/tune.py"),
        ('pip install -e ".[tests]"', "tests"),
        ("python tests/nothing.py", "tests/nothing.py"),
    ],
)
def test_what_does_not_exist_is_found(line: str, told: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (words,) = commands(line)
    with pytest.raises((Exception, SystemExit)) as found:
        check(words)
    assert told in str(found.value) + capfd.readouterr().err
