"""What a run of each objective leaves behind on two ranks: evaluations, references, checkpoints, exports, reports.

tests/multiprocess/test_all_pairs.py compares each step with a plain loop.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import cases
from support.plain_objectives import CLASSES, HELD_OUT, OBJECTIVES, PAIRS, ROWS, save_models
from support.ranks import meet, run_on_ranks
from support.runs import outcome
from support.tiny import recipe_values, with_sections
from transformers import AutoModelForCausalLM, pipeline

from toolkit.objectives.losses.preference_losses import LOSSES
from toolkit.recipe.objectives.registry import SPECS

TABLES = cases(__file__)
RUNS: dict[str, tuple[str, dict[str, Any]]] = TABLES["RUNS"]
"""Name -> the objective, and what its recipe has beside it."""
JUDGED: dict[str, str] = TABLES["JUDGED"]
"""Objective -> the figure that judges its evaluations (`training.best_by`)."""


def runs(models: Path, folder: Path) -> dict[str, Any]:
    """The records of each run, or its error; and what is known of the reference after one step and after two."""
    found: dict[str, Any] = {}
    known: list[Path] = []
    for name, (kind, sections) in RUNS.items():
        if name == "another teacher":
            change_teacher(models / "teacher")
        rows, _, _, settings = OBJECTIVES[kind]
        values = recipe_values(models / f"dense-{kind}", models / f"{rows}.jsonl", folder / name, folder / "cache")
        values["data"] |= {"max_length": 96, "validation": str(models / f"{rows}-held-out.jsonl")}
        values["objective"] = {"kind": kind, **({} if kind in ("preference", "kto", "reward") else settings)}
        if kind == "distillation":
            values["objective"]["teacher"] = str(models / "teacher")
        values["optimizer"] = {"learning_rate": 3e-3, "weight_decay": 0.0}
        values["schedule"] = {"kind": "constant"}
        values["training"] |= {"max_steps": 4, "seed": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
        values["training"] |= {"best_by": JUDGED[kind], "patience": 9, "eval_every_steps": 4}
        values = with_sections(values, sections)
        if values["data"]["validation"] is None:
            del values["training"]["patience"], values["training"]["eval_every_steps"]
        if "resume" in values.get("checkpoint", {}):
            values["checkpoint"]["resume"] = str(folder / values["checkpoint"]["resume"])
        result = outcome(values)
        found[name] = result[0] if isinstance(result, tuple) else result.metrics
        references = [*(folder / "cache").glob("reference-*/*.npy")]
        if name in ("one step", "two steps"):
            found[f"known after {name}"] = np.load(next(path for path in references if path not in known))
        if name != "one step":  # whose reference the second run goes on with
            known = references
    return found


def change_teacher(folder: Path) -> None:
    """Its weights; the recipe, which names the folder, stays the same."""
    meet()
    if os.environ["RANK"] == "0":
        teacher = AutoModelForCausalLM.from_pretrained(folder)
        torch.nn.init.normal_(teacher.lm_head.weight)
        teacher.save_pretrained(folder)
    torch.distributed.barrier()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objective-runs")


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    models = tmp_path_factory.mktemp("models")  # of which one is changed
    save_models(models)
    return run_on_ranks(runs, 2, models, folder)[0]


def evaluated(records: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Before the first step and after the last one."""
    first, last = (record for record in records if record["split"] == "eval")
    return first, last


def test_a_figure_of_each_objective_judges_its_evaluations(found: dict[str, Any], folder: Path) -> None:
    for name in ("dpo", "reward", "kto", "tags", "classes", "student", "translated"):
        by = JUDGED[RUNS[name][0]]
        field, better = by.split()[-1], min if by in ("lower kl", "divergence", "perplexity") else max
        values = {record["step"]: record[field] for record in evaluated(found[name])}
        told = json.loads((folder / name / "run.json").read_text())
        best = better(values, key=values.__getitem__)
        assert {key: told["best"][key] for key in ("step", "by", "value")} == {
            "step": best,
            "by": by,
            "value": pytest.approx(values[best]),
        }, name
        assert (told["last"]["step"], told["last"]["value"]) == (4, pytest.approx(values[4])), name


def steps_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["split"] == "train"]


def test_preferences_are_learned_by_each_loss_from_packed_rows(found: dict[str, Any], folder: Path) -> None:
    for loss in ("dpo", "ipo", "simpo", "orpo"):
        first, last = evaluated(found[loss])
        assert first["pairs"] == last["pairs"] == HELD_OUT, "each pair once"
        assert last["loss"] < first["loss"], loss
        assert last["margin"] > first["margin"], loss
        assert ("kl" in last) == (loss in ("dpo", "ipo"))
    first, last = evaluated(found["dpo"])
    assert (first["loss"], first["kl"]) == pytest.approx((math.log(2), 0.0), abs=1e-5), "it is its own reference"
    for record in found["dpo"]:
        assert record["chosen_reward"] - record["rejected_reward"] == pytest.approx(record["margin"], abs=1e-6)
    step = steps_of(found["two steps"])[-1]
    assert (step["pairs"], step["pairs_per_second"] > 0, "target_tokens" in step) == (16, True, False)
    report = json.loads((folder / "dpo/data_report.json").read_text())["train"]
    assert report["samples"] < len(PAIRS), "pairs share samples"
    assert {name: tuple(loss.defaults) for name, loss in LOSSES.items()} == SPECS["preference"].losses


def test_the_reference_is_asked_for_the_rows_that_a_run_comes_to(found: dict[str, Any]) -> None:
    first, second = (found[f"known after {steps}"] for steps in ("one step", "two steps"))
    reached = ~np.isnan(first).any(axis=1)
    assert (reached.sum(), (~np.isnan(second)).all(axis=1).sum()) == (8, 16)
    assert (first[reached] == second[reached]).all(), "and those that are known stay"


def test_rewards_are_learned_and_are_those_of_a_pipeline(found: dict[str, Any], folder: Path) -> None:
    """Packed in full, and with merged adapters."""
    for name in ("reward", "reward, merged"):
        first, last = evaluated(found[name])
        assert first["pairs"] == last["pairs"] == HELD_OUT
        assert last["loss"] < first["loss"], name
        assert last["margin"] > first["margin"], name
        scores = pipeline("text-classification", model=str(folder / name / "export"), device="cpu")
        ended = [
            [pair["prompt"] + pair[side] + scores.tokenizer.eos_token for pair in PAIRS[:HELD_OUT]]
            for side in ("chosen", "rejected")
        ]
        chosen, rejected = ([scores(text)[0] for text in texts] for texts in ended)
        margins = [one["score"] - other["score"] for one, other in zip(chosen, rejected, strict=True)]
        assert sum(margins) / HELD_OUT == pytest.approx(last["margin"], rel=1e-3), name
        assert chosen[0]["label"] == "reward"
    assert json.loads((folder / "reward/data_report.json").read_text())["train"]["samples"] < len(PAIRS)


def test_judged_rows_are_learned_from_packed_rows(found: dict[str, Any], folder: Path) -> None:
    for name in ("kto", "kto, merged"):
        first, last = evaluated(found[name])
        assert (first["rows"], first["loss"], first["kl"]) == pytest.approx((HELD_OUT, 0.5, 0.0), abs=1e-5)
        assert last["loss"] < first["loss"], name
        assert last["chosen_reward"] > last["rejected_reward"], name
    report = json.loads((folder / "kto/data_report.json").read_text())["train"]
    assert report["samples"] < len(ROWS["judged"]), "rows share samples"
    assert report["labels"] == {"true": 10, "false": 10}


def test_tags_and_classes_are_those_of_pipelines(found: dict[str, Any], folder: Path) -> None:
    text = " ".join(ROWS["tagged"][0]["tokens"])
    for name in ("tags", "tags, merged"):
        tag = pipeline("token-classification", model=str(folder / name / "export"), device="cpu")
        assert tag.model.config.id2label == dict(enumerate(CLASSES))
        assert {item["entity"] for item in tag(text, ignore_labels=[])} <= {*CLASSES}
    assert "pipeline_tag: token-classification" in (folder / "tags/export/README.md").read_text()
    classify = pipeline("text-classification", model=str(folder / "classes/export"), device="cpu")
    assert classify("the king sang")[0]["label"] in CLASSES
    assert classify.model.config.id2label == dict(enumerate(CLASSES))


def test_a_student_goes_on_exactly_and_with_its_own_teacher_alone(found: dict[str, Any], folder: Path) -> None:
    assert "objective.teacher" in found["another teacher"]
    figures = ("loss", "divergence", "cross_entropy", "grad_norm")
    rest, whole = ([[record[name] for name in figures] for record in steps_of(found[run])] for run in ("rest", "whole"))
    assert rest == whole, "to the last bit"
    for name in ("student in bf16", "student in bf16 by DDP"):
        assert steps_of(found[name])[0]["loss"] == pytest.approx(whole[0][0], rel=1e-2), name
    before, after = evaluated(found["student"])
    assert after["divergence"] < before["divergence"]
    export = folder / "student/export"
    student = AutoModelForCausalLM.from_pretrained(export)
    assert len(student.model.layers) == 2, "the student alone"
    card = (export / "README.md").read_text()
    assert "teacher, LlamaForCausalLM" in card
    assert str(folder) not in card
