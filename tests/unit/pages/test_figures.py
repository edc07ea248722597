"""What a report and a card show of each objective's evaluations."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cases import cases
from test_card import of_run
from test_golden_pages import FIGURES, OF_SAMPLES

from toolkit.errors import BadInputError
from toolkit.pages.card import recipe_for_readers, render_card
from toolkit.pages.run_page import RunSummary, render_report
from toolkit.recipe.figures import steering
from toolkit.recipe.objectives.registry import SPECS
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import TrainingSection
from toolkit.training.extensions.best import BestEvaluation
from toolkit.training.metrics import Metrics

TABLES = cases(__file__)


def lines(figures: dict[str, Any]) -> list[dict[str, Any]]:
    train = [
        {"split": "train", "step": step, "loss": 1 / step, "planned_peak_bytes": 2**30, "peak_host_bytes": 2**31}
        for step in range(1, 5)
    ]
    return [*train, *({"split": "eval", "step": step, "loss": 1.0, **figures} for step in (0, 4))]


def page(metrics: list[dict[str, Any]]) -> str:
    return render_report(RunSummary("run", "", metrics, {}, [], {}, {}))


@pytest.mark.parametrize("device", [True, False])
def test_the_plan_stands_beside_what_it_is_of(device: bool) -> None:
    metrics = [{**line, "peak_device_bytes": 2**29 if device else None} for line in lines({})]
    assert ("device, planned" in page(metrics)) == device
    assert ("host, planned" in page(metrics)) != device


@pytest.mark.parametrize("figures", [{}, {"accuracy": 0.7}])
def test_no_chart_leaves_a_hole_beside_it(figures: dict[str, Any]) -> None:
    heads = page(lines(figures)).split('<section class="card" id="chart-')[1:]
    sizes = [re.findall(r'<div class="chart (\w+)">', head)[0] for head in heads]
    assert sizes[0] == "wide", "the loss"
    assert sizes.count("any") % 2 == 0
    assert len(sizes) == 2 + bool(figures)


def rates(**fields: float) -> list[dict[str, Any]]:
    return [{**line, **fields} if line["split"] == "train" else line for line in lines({})]


def test_the_rate_without_padding_is_on_top_of_the_one_with() -> None:
    shown = page(rates(tokens_per_second=100.0, padded_tokens_per_second=110.0))
    head = shown.partition('id="chart-throughput"')[2].partition("<svg")[0]
    assert re.findall(r"</i>([\w ]+)</li>", head) == ["with padding", "without padding"]


def test_rows_and_pairs_are_told_in_place_of_samples() -> None:
    shown = page(rates(tokens=500, rows=20, samples=9, rows_per_second=8.0, samples_per_second=3.0))
    assert ">20 rows<" in shown.replace("</summary>", ">")
    assert ">8 rows/s<" in shown.replace("</summary>", ">")
    shown = page(rates(tokens=500, target_tokens=300, samples=9, targets_per_second=8.0, samples_per_second=3.0))
    assert "300 with loss, 9 samples" in shown
    assert "8 targets/s; 3 samples/s" in shown


def test_numbers_stay_in_one_line_and_names_of_rows_break_before_the_number() -> None:
    versions = {"Loss": "-0.693", "Size": "1.00 MiB", "Share": "< 0.1 %", "at": "a b:12)"}
    shown = render_report(RunSummary("run", "", [], {}, [], {}, versions)).partition('id="versions"')[2]
    assert re.findall(r'class="number">(.*?)</td>', shown) == ["-0.693", "1.00 MiB", "&lt; 0.1 %"]
    assert "a b:<wbr>12)" in shown


STEERS = TABLES["STEERS"]
"""Objective -> the figure that judges its evaluations, and what the console says of it."""


@pytest.mark.parametrize("objective", SPECS)
def test_the_figure_that_judges_is_on_the_console_and_an_unknown_one_lists_them(
    objective: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best_by, told = STEERS[objective]
    own, is_main = {"perplexity": 7.389, "mine": 1234.4}, SimpleNamespace(is_main_process=True)
    record = {"step": 4, "loss": 2.0, **own, **FIGURES.get(objective, OF_SAMPLES)}
    with Metrics(is_main, tmp_path / "m", 9, 10, best_by=best_by) as metrics:  # type: ignore[arg-type]
        metrics.evaluation(record)
    assert f"  {told}" in capsys.readouterr().err
    asked = BestEvaluation(TrainingSection(output_dir="run", max_steps=9, best_by="higher unheard"), None)  # type: ignore[arg-type]
    is_fresh = objective == "grpo"  # a run that samples itself has figures of training: its first step is waited for
    learns = SimpleNamespace(training_record=dict)
    trainer: Any = SimpleNamespace(windows=SimpleNamespace(fresh=is_fresh), objective=learns)
    if is_fresh:
        asked.after_evaluation(trainer, {"step": 0})
    step: Any = SimpleNamespace(figures=[], metrics=record)
    with pytest.raises(BadInputError, match=rf"no figure 'unheard'.*; they have: .*\b{steering(best_by).field}\b"):
        asked.after_step(trainer, step) if is_fresh else asked.after_evaluation(trainer, record)


PREFERENCE = {"accuracy": 0.75, "margin": 1.25}
CLASSES = {"samples": 10, "accuracy": 0.7, "f1_macro": 0.6875, "confusion": [[4, 1], [2, 3]]}


def test_curves_of_training_stand_behind_those_of_evaluations() -> None:
    metrics = [{**line, "accuracy": 0.5} if line["split"] == "train" else line for line in lines(PREFERENCE)]
    assert "accuracy in training" in page(metrics)
    assert "accuracy in training" not in page(lines(PREFERENCE))


def test_the_recipe_for_readers_has_neither_nulls_nor_places() -> None:
    places = {"data.train": "/home/somebody/private/rows.jsonl", "training.output_dir": "/home/somebody/outputs/mine"}
    config = {"model_type": "llama", "rope_scaling": None}
    recipe = Recipe.load("quickstart", {"description": "of somebody else", "model.config": config, **places})
    text = recipe_for_readers(recipe)
    assert "somebody/" not in text
    assert text.count("null") == 1, "the model's own"
    assert "rope_scaling: null" in text
    assert "  train:\n  - rows.jsonl\n" in text
    assert "output_dir: mine" in text
    card = render_card(recipe, of_run(lines(CLASSES)))
    assert "of somebody else" in card
    shipped = Recipe.load("quickstart")
    assert shipped.description not in render_card(shipped, of_run([])), "a copy is of another model and other data"
    assert "confusion" not in card
    assert "| 70.0 % | 68.8 % |" in card
