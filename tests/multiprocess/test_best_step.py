"""A run that gets worse, is cut and goes on with other settings: which weights it leaves, and what all of it told."""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cases import cases
from support.ranks import meet, run_on_ranks
from support.runs import records_of
from support.texts import make_texts
from support.tiny import recipe_values, save_llama, unfinish
from typer.testing import CliRunner

from toolkit import Recipe, finetune
from toolkit.cli.app import app
from toolkit.pages.notebook_output import progress_output
from toolkit.pages.run_page import progress_of
from toolkit.run.shown.outcome import result_of
from toolkit.training.extension import Extension

TABLES = cases(__file__)

WARNED = TABLES["WARNED"]
"""Stage of a run -> what it warns of."""
LIMIT = "4 of 12 held-out rows are also in train"
STRATEGIES: dict[str, dict[str, Any]] = {"zero3": {}, "ema": {"ema": 0.5, "best_by": "higher mine"}}


class Disturbs(Extension):
    """Changes files of a run and of its base, on rank 0: in an evaluation, and before a step."""

    def __init__(self, folder: Path) -> None:
        self._metrics, self._base = folder / "zero3/metrics.jsonl", folder / "model/generation_config.json"
        self._acts = os.environ["RANK"] == "0"

    def at_evaluation(self, trainer: Any) -> dict[str, Any]:
        if trainer.global_step == 5 and self._acts:
            self._metrics.unlink()
            self._metrics.mkdir()
        return {}

    def before_step(self, step: int) -> None:
        if step == 7 and self._acts:
            self._metrics.rmdir()
            self._base.write_text(self._base.read_text() + " ")


class Mine(Extension):
    """A figure of its own, which is best at step 3."""

    def at_evaluation(self, trainer: Any) -> dict[str, Any]:
        return {"mine": 1 / (1 + abs(trainer.global_step - 3))}


def runs(folder: Path) -> None:
    for name, training in STRATEGIES.items():
        values = recipe_values(folder / "model", folder / "texts.jsonl", folder / name, folder / "cache", max_steps=4)
        values["data"] |= {"validation": str(folder / "held_out.jsonl")}
        values["training"] |= {"eval_every_steps": 1, **training}
        values["optimizer"] |= {"learning_rate": 1e-3}
        values["schedule"] = {"kind": "constant", "warmup_steps": 9}
        values["checkpoint"] = {"every_steps": 1, "keep_last": 1, "keep_best": True, "asynchronous": False}
        values["sharding"] = {"strategy": "zero3"}
        meet()
        finetune(Recipe.from_mapping(values), extensions=[Mine()])
        unfinish(folder / name)
        values["training"]["max_steps"] = 8
        values["optimizer"]["learning_rate"] = 3.0  # from here on it only gets worse
        values["optimizer"]["weight_decay"] = 0.5
        meet()
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            finetune(Recipe.from_mapping(values), extensions=[Mine(), *([Disturbs(folder)] if name == "zero3" else [])])
        if os.environ["RANK"] == "0":
            (folder / name / "terminal.txt").write_text(shown.getvalue())


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
    records = records_of(run)
    field, words, merit = ("loss", "held-out loss", -1) if name == "zero3" else ("mine", "mine", 1)
    values = {record["step"]: record[field] for record in records if record["split"] == "eval"}
    best = max((step for step in values if step), key=lambda step: merit * values[step])
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
    said = f"step {best} of 8, whose {words} is {values[best]:.4g}; the last is {values[8]:.4g}"
    shown = CliRunner().invoke(app, ["status", str(run)]).output
    limited = f"{said} (but {LIMIT})"
    texts = [shown, *((run / page).read_text() for page in ("terminal.txt", "export/README.md", "report.html"))]
    assert [limited in text for text in texts] == [True] * 4
    assert re.search(rf'class="lead">.*Exported: {re.escape(limited)}\.</p>', texts[3]), "without a click"
    assert f"\nExported: {limited}.\n" in texts[2]
    record = json.loads((run / "run.json").read_text())
    origin = json.loads((run / "export/training.json").read_text())
    of_step, by = {"step": best, "value": values[best]}, STRATEGIES[name].get("best_by", "loss")
    assert record["best"] == {
        **of_step,
        "by": by,
        "checkpoint": f"checkpoints/step_{best:08d}",
    }
    assert f"best: step {best}, by {by}\n" in CliRunner().invoke(app, ["checkpoints", str(run)]).stdout
    rows = json.loads(CliRunner().invoke(app, ["checkpoints", str(run), "--json"]).stdout)
    assert [row["limits"] for row in rows] == [[LIMIT]] * len(rows)
    assert f"{words} {values[8]:.4f} (but {LIMIT})" in progress_of(records, [LIMIT], by)[-1]
    assert (record["exported"], record["last"]) == (of_step, {"step": 8, "value": values[8]})
    told = ("starts", "limits", "outcome", "best", "last", "exported")
    assert {name: record[name] for name in told} == {name: origin[name] for name in told}


def test_each_start_and_what_it_changed_is_told(folder: Path) -> None:
    starts = json.loads((folder / "zero3/run.json").read_text())["starts"]
    assert [(start["step"], start["ranks"]) for start in starts] == [(0, 2), (4, 2)]
    changed = {key: (old, new) for key, old, new in starts[1]["changed"]}
    assert changed == {
        "optimizer.learning_rate": ("0.001", "3.0"),
        "optimizer.weight_decay": (changed["optimizer.weight_decay"][0], "0.5"),
        "training.max_steps": ("4", "8"),
    }
    told = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changed.items())
    texts = told_by(folder / "zero3")
    for name in ("status", "card", "report"):
        assert f"from step 4 on 2 ranks with {told}" in texts[name], name
    tile = texts["report"].partition('id="tile-duration"')[2].partition("</div>")[0]
    assert "from step 4" in tile, "without a click"


def told_by(run: Path) -> dict[str, str]:
    """All that tells of a run that is done."""
    files = {"terminal": "terminal.txt", "record": "run.json", "report": "report.html", "card": "export/README.md"}
    texts = {name: (run / file).read_text() for name, file in {**files, "origin": "export/training.json"}.items()}
    texts["status"] = CliRunner().invoke(app, ["status", str(run)]).output
    return {name: html.unescape(text) for name, text in texts.items()}


@pytest.mark.parametrize("stage", WARNED)
def test_a_warning_of_each_stage_arrives_everywhere(stage: str, folder: Path) -> None:
    found = {name: WARNED[stage] in text for name, text in told_by(folder / "zero3").items()}
    assert found == dict.fromkeys(found, True)


def test_what_limits_a_figure_is_next_to_it(folder: Path) -> None:
    """In its tiles and tables: tests/unit/pages/test_story.py."""
    run, rows = folder / "zero3", folder / "asked.jsonl"
    rows.write_text('{"prompt": "the", "completion": "king"}')
    texts, asked = told_by(run), ["generate", str(run), "--eval", str(rows), "--max-new-tokens", "1"]
    values = {record["step"]: record["loss"] for record in records_of(run) if record["split"] == "eval"}
    for step in range(5, 9):
        assert f"step {step}/8  held-out loss {values[step]:.4f} (but {LIMIT})" in texts["terminal"]
    for line in (["checkpoints", str(run)], asked, [*asked, "--checkpoint", "last"]):
        assert LIMIT in CliRunner().invoke(app, line).output, line
    shown = [
        result_of(run, records_of(run), None),
        progress_output(records_of(run), 8, None, None, told_of=partial(progress_of, limits=[LIMIT])),
    ]
    assert [f"(but {LIMIT})" in str(one) for one in shown] == [True] * 2
    outcome = json.loads(texts["record"])["outcome"]
    for name, shown in (("terminal", outcome), ("status", outcome), ("report", outcome.replace("->", "→"))):
        assert re.search(rf"{re.escape(shown)}( in \d+ s in 2 starts)? \(but {LIMIT}\)", texts[name]), name
    assert f"On held-out data (but {LIMIT}):" in texts["card"]
