"""A run that gets worse, is cut and goes on with other settings: which weights it leaves, and what all of it told."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.ranks import meet, run_on_ranks
from support.texts import make_texts
from support.tiny import recipe_values, save_llama, unfinish
from typer.testing import CliRunner

from toolkit.cli.app import app

STRATEGIES = {"zero3": {}, "ema": {"ema": 0.5}}


def runs(folder: Path) -> None:
    from toolkit import Recipe, finetune

    for name, training in STRATEGIES.items():
        meet()
        values = recipe_values(folder / "model", folder / "texts.jsonl", folder / name, folder / "cache", max_steps=4)
        values["data"] |= {"validation": str(folder / "held_out.jsonl")}
        values["training"] |= {"eval_every_steps": 1, **training}
        values["optimizer"] |= {"learning_rate": 1e-3}
        values["schedule"] = {"kind": "constant"}
        values["checkpoint"] = {"every_steps": 1, "keep_last": 1, "keep_best": True, "asynchronous": False}
        values["sharding"] = {"strategy": "zero3"}
        finetune(Recipe.from_mapping(values))
        unfinish(folder / name)
        values["training"]["max_steps"] = 8
        values["optimizer"]["learning_rate"] = 3.0  # from here on it only gets worse
        values["optimizer"]["weight_decay"] = 0.5
        meet()
        finetune(Recipe.from_mapping(values))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("story")
    texts = make_texts(40, seed=1)
    save_llama(folder / "model", texts, tied=False)
    rows = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "texts.jsonl").write_text("".join(rows[:32]))
    (folder / "held_out.jsonl").write_text("".join(rows[28:]))
    run_on_ranks(runs, 2, folder)
    return folder


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_best_weights_are_exported_and_told_everywhere(name: str, folder: Path, tmp_path: Path) -> None:
    run = folder / name
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in records if record["split"] == "eval"}
    best = min((step for step in losses if step), key=losses.__getitem__)
    assert best < 8, "it got worse"
    outcome = CliRunner().invoke(app, ["export", str(run), "--to", str(tmp_path / "best"), "--checkpoint", "best"])
    assert f"step {best} in" in outcome.output, outcome.output
    written = load_file(run / "export/model.safetensors")
    again = load_file(tmp_path / "best/model.safetensors")
    assert all(torch.equal(written[tensor], again[tensor]) for tensor in written)
    asked = [[str(run), "--checkpoint", "best"], [str(run), "--checkpoint", str(best)], [str(tmp_path / "best")]]
    how = ["--prompt", "the", "--temperature", "0"]
    (answer,) = {CliRunner().invoke(app, ["generate", *one, *how]).stdout for one in asked}
    assert answer, "one answer of all three"
    assert not list(run.glob(".checkpoint*")), "nothing is left"
    said = f"step {best} of 8, whose held-out loss is {losses[best]:.4g}; the last is {losses[8]:.4g}"
    shown = CliRunner().invoke(app, ["status", str(run)]).output
    texts = [shown, (run / "export/README.md").read_text(), (run / "report.html").read_text()]
    assert [said in text for text in texts] == [True] * 3
    assert re.search(rf'class="lead">.*Exported: {re.escape(said)}\.</p>', texts[2]), "without a click"
    assert json.loads((run / "export/training.json").read_text())["exported"] == said


def test_each_start_and_what_it_changed_is_told(folder: Path) -> None:
    starts = json.loads((folder / "zero3/run.json").read_text())["starts"]
    assert [(start["step"], start["ranks"]) for start in starts] == [(0, 2), (4, 2)]
    changed = {key: (old, new) for key, old, new in starts[1]["changed"]}
    assert changed == {
        "optimizer.learning_rate": ("0.001", "3.0"),
        "optimizer.weight_decay": (changed["optimizer.weight_decay"][0], "0.5"),
        "training.max_steps": ("4", "8"),
    }
    for page in ("export/README.md", "report.html"):
        text = re.sub("&gt;", ">", (folder / "zero3" / page).read_text())
        assert "from step 4 on 2 ranks with optimizer.learning_rate 0.001 -> 3.0, " in text
    assert "from step 4" in text.partition('id="tile-duration"')[2].partition("</div>")[0], "of the report"


def test_a_limit_and_a_warning_of_the_rows_travel_with_the_figures(folder: Path) -> None:
    limit = "4 of 12 held-out rows are also in train"
    shown: list[Any] = [CliRunner().invoke(app, ["status", str(folder / "zero3")]).output]
    shown += [(folder / "zero3" / page).read_text() for page in ("export/README.md", "report.html")]
    assert [limit in text for text in shown] == [True] * 3
    assert ["also in train: the held-out loss is too low" in text for text in shown] == [True] * 3
    shutil.rmtree(folder / "zero3/export")
