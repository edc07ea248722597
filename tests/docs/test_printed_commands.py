"""Every command that README and docs print: run where it can be, else checked down to its files and keys."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
from support.cases import cases
from support.docs_commands import ROOT, Printed, check, commands, printed
from support.ranks import run_on_ranks
from support.texts import make_texts, write_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from toolkit.cli.app import app

TABLES = cases(__file__)

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PRINTED = [command for page in PAGES for command in printed(page)]
ON_PAGES = [list(group) for _, group in itertools.groupby(PRINTED, lambda command: command.page)]


def train_a_little(folder: Path) -> None:
    """Leaves `model` and the finished run `outputs/notes`, with checkpoints after steps 2 and 4; and that run again.

    And a folder `llama.cpp` with a converter and a quantiser that do nothing.
    """
    from toolkit import Recipe, finetune

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    recipe = Recipe.load(
        "quickstart",
        {
            "model.config": {"model_type": "llama", "max_position_embeddings": 512, **sizes},
            "model.train_tokenizer_vocab_size": 320,
            "data.train": str(folder / "chat.jsonl"),
            "data.cache_dir": str(folder / "cache"),
            "training.output_dir": str(folder / "outputs/notes"),
            "training.max_steps": 4,
            "checkpoint.every_steps": 2,
        },
    )
    finetune(recipe)
    shutil.copytree(folder / "outputs/notes/export", folder / "model")
    for name in ("second", "quickstart", "grpo"):
        shutil.copytree(folder / "outputs/notes", folder / "outputs" / name)
    labels: dict[str, Any] = {"id2label": {0: "bill", 1: "bug"}, "label2id": {"bill": 0, "bug": 1}, "pad_token_id": 0}
    classifier = AutoModelForSequenceClassification.from_pretrained(folder / "model", **labels)
    for part in (classifier, AutoTokenizer.from_pretrained(folder / "model")):
        part.save_pretrained(folder / "outputs/tickets/export")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model"), config)
    adapted.save_pretrained(folder / "outputs/lora/export")
    (folder / "llama.cpp").mkdir()
    (folder / "llama.cpp/convert_hf_to_gguf.py").write_text(
        "import pathlib, sys\npathlib.Path(sys.argv[sys.argv.index('--outfile') + 1]).touch()\n"
    )
    quantiser = folder / "llama.cpp/build/bin/llama-quantize"
    quantiser.parent.mkdir(parents=True)
    quantiser.write_text('#!/bin/sh\ntouch "$2"\n')
    quantiser.chmod(0o755)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has after the first pages: conversations, a model and a finished run."""
    folder = tmp_path_factory.mktemp("reader")
    turns = [[("user", text[:9]), ("assistant", text[9:30])] for text in make_texts(40)]
    rows = [{"messages": [{"role": role, "content": words} for role, words in turn]} for turn in turns]
    write_rows(folder / "chat.jsonl", rows)
    (folder / "law.txt").write_text(" ".join(make_texts(40)) + "\n")
    (folder / "prompts.txt").write_text("Who goes there?\n")
    (folder / "questions.jsonl").write_text('{"prompt": "Who goes there?", "answer": "A friend."}\n')
    (folder / "calls.jsonl").write_text(json.dumps({"prompt": "Who goes there?", "answer": '{"name": "call"}'}) + "\n")
    for name in ("tickets.csv", "new.csv"):
        tickets = [f"{text[:20].strip()!r},{label}" for text in make_texts(30) for label in ("bill", "bug")]
        (folder / name).write_text("\n".join(["text,label", *tickets]) + "\n")
    run_on_ranks(train_a_little, 1, folder)
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's folder as a reader has it."""
    for name in ("accelerate_configs", "recipes", "docs", "benchmarks", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("toolkit.cluster.checks.OWN_DISKS", ())  # pytest's folders are in /tmp
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def own_recipes(page: list[Printed]) -> None:
    """Writes the recipes that a reader of the page has: mine.yaml, and what the page's own commands make."""
    made = [command.words[-1] for command in page if command.words[1:3] == ("recipes", "copy")]
    Path("outputs/notes/export").mkdir(parents=True, exist_ok=True)
    for name in {"mine.yaml", "outputs/notes/export/recipe.yaml", *made}:
        if Path(name).exists():
            continue
        assert CliRunner().invoke(app, ["recipes", "copy", "quickstart", name]).exit_code == 0


@pytest.mark.first
@pytest.mark.parametrize("page", ON_PAGES, ids=lambda page: page[0].page)
def test_what_is_printed_exists(page: list[Printed], place: Path) -> None:
    own_recipes(page)
    wrong = []
    for command in page:
        try:
            check(command.words)
        except (Exception, SystemExit) as error:
            wrong.append(f"{' '.join(command.words)}: {type(error).__name__} {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "page", [page for page in ON_PAGES if any(c.arguments for c in page)], ids=lambda page: page[0].page
)
def test_what_starts_no_ranks_runs(page: list[Printed], place: Path, trained: Path) -> None:
    shutil.copytree(trained, place, dirs_exist_ok=True)
    if not any({"copy", "--to"} & set(command.words) for command in page):
        own_recipes([])
    for arguments in (command.arguments for command in page if command.arguments):
        done = CliRunner().invoke(app, arguments, input="Who goes there?\n/quit\n")
        assert done.exit_code == 0, (arguments, done.output, done.exception)


@pytest.mark.first
def test_commands_are_found() -> None:
    programs = {command.words[0] for command in PRINTED}
    assert {"toolkit", "accelerate", "torchrun", "pip"} <= programs
    assert sum(command.arguments is not None for command in PRINTED) > 20
    for page in PAGES:  # none slips through another way of writing a block
        text = page.read_text(encoding="utf-8")
        lines = re.findall(r"^(?:    )?(?:toolkit|accelerate launch|torchrun) .*", text, re.MULTILINE)
        assert len(lines) <= sum(command.page == str(page.relative_to(ROOT)) for command in PRINTED), page


@pytest.mark.first
@pytest.mark.parametrize(("line", "told"), TABLES["WRONG"])
def test_what_does_not_exist_is_found(line: str, told: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (words,) = commands(line)
    with pytest.raises((Exception, SystemExit)) as found:
        check(words)
    assert told in str(found.value) + capfd.readouterr().err
