"""What `toolkit init` writes trains on the ranks that it was written for, and the run's folder answers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from support.ranks import run_on_ranks
from support.runs import losses_of
from support.texts import make_texts, write_rows
from support.tiny import save_llama
from typer.testing import CliRunner

from toolkit.cli.app import app


def train(recipe: Path, folder: Path) -> list[float]:
    import os

    from toolkit import Recipe, finetune

    os.chdir(folder)  # where the user stands: the output folder is relative to it
    return losses_of(finetune(Recipe.load(recipe)).metrics)


def test_the_written_recipe_trains_and_the_last_command_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = make_texts(40)
    save_llama(tmp_path / "model", texts, tied=True)
    turns = [[("user", text[:9]), ("assistant", text[9:30])] for text in texts]
    rows = [{"messages": [{"role": role, "content": words} for role, words in turn]} for turn in turns]
    write_rows(tmp_path / "chat.jsonl", rows)
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    made = CliRunner().invoke(
        app, ["init", "model", "chat.jsonl", "training.max_steps=2", cache, "--cpu", "2", "--json"]
    )
    assert made.exit_code == 0, (made.output, made.exception)
    losses = run_on_ranks(train, 2, tmp_path / "chat.yaml", tmp_path)[0]
    assert len(losses) == 2
    _, *generate = shlex.split(json.loads(made.stdout)["commands"][-1])
    answered = CliRunner().invoke(app, [*generate, "--max-new-tokens", "2"])
    assert answered.exit_code == 0, (answered.output, answered.exception)
