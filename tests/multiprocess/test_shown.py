"""What a run shows while it goes on, and when it ends before its time, on two ranks."""

from __future__ import annotations

import html
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import cases
from support.cuts import cut_in_step
from support.ranks import run_on_ranks
from support.runs import finetuned, records_of
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama, with_sections
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from toolkit.cli.app import app
from toolkit.errors import StoppedError
from toolkit.pages.run_page import render_report
from toolkit.run.shown import live_report as live

TABLES = cases(__file__)

SAMPLED: dict[str, dict[str, Any]] = TABLES["SAMPLED"]
"""Runs that continue held-out prompts."""


def runs(folder: Path) -> dict[str, Any]:
    live.FIRST_SECONDS, live.EVERY_SECONDS, live.COST_SHARE = 0.0, 1e-9, 1e9
    pages: list[str] = []
    found: dict[str, Any] = {"pages": pages}
    write_report = live.write_report

    def writing(path: Path, summary: Any) -> None:
        pages.append(render_report(summary))
        write_report(path, summary)

    live.write_report = writing

    def run(name: str, **sections: Any) -> None:
        values = recipe_values(folder / "model", folder / "texts.jsonl", folder / name, folder / "cache", max_steps=4)
        values["data"] |= {"validation": str(folder / "texts.jsonl"), "max_validation_samples": 8}
        values["export"] = {"enabled": False}
        result = finetuned(with_sections(values, sections))
        found[f"losses-{name}"] = [record["loss"] for record in result.metrics]

    run("whole")
    found["num_pages"] = len(pages)
    with pytest.raises(StoppedError):
        run("stopped", checkpoint={"time_limit_minutes": 1e-4})
    found["report-stopped"] = (folder / "stopped/report.html").read_text()
    live.EVERY_SECONDS, live.COST_SHARE = 1e9, 0.01
    with cut_in_step(3, ValueError("<the disk> is on fire")):
        run("failed")
    found["report-failed"] = (folder / "failed/report.html").read_text()
    run("failed")  # the same command, from its beginning
    evaluated = {"max_steps": 9, "eval_every_steps": 2}
    slow = {"optimizer": {"learning_rate": 1e-30}, "data": {"validation": str(folder / "texts.jsonl")}}
    run("patient", training={**evaluated, "patience": 2}, **slow)
    run("impatient", training={**evaluated, "max_steps": 4}, schedule={"kind": "constant"}, **slow)
    asked = {"train": str(folder / "asked.jsonl"), "validation": str(folder / "asked.jsonl"), "max_length": 64}
    for kind, sections in SAMPLED.items():
        sections = {
            **sections,
            "optimizer": {"learning_rate": 0.03},
            "data": asked,
            "training": {"eval_every_steps": 1, **sections.get("training", {})},
        }
        run(f"unsampled-{kind}", **sections)
        saves = {"checkpoint": {"every_steps": 1, "keep_last": 9}} if kind == "zero3" else {}
        run(f"sampled-{kind}", **sections, **saves, logging={"held_out_samples": 2}, export={"enabled": True})
    sections = {**SAMPLED["zero3"], "optimizer": {"learning_rate": 0.03}, "data": asked}
    sections |= {"training": {"eval_every_steps": 1}, "logging": {"held_out_samples": 2}}
    sections |= {"checkpoint": {"every_steps": 2, "keep_last": 9}}
    with cut_in_step(4):
        run("sampled-again", **sections)
    run("sampled-again", **sections)
    pairs = {"train": str(folder / "pairs.jsonl"), "validation": str(folder / "pairs.jsonl"), "max_length": 64}
    objective = {"kind": "preference"}
    run("compared", data=pairs, objective=objective, logging={"held_out_samples": 1}, training={"max_steps": 1})
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shown")
    save_llama(folder / "model", make_texts(60), tied=True)
    asked = [{"prompt": text, "completion": " and the king"} for text in ("by the river", "a fox")]
    write_rows(folder / "asked.jsonl", asked * 8)
    pairs = [{"prompt": "the moon", "chosen": " was high", "rejected": f" {n}"} for n in range(8)]
    write_rows(folder / "pairs.jsonl", pairs)
    write_rows(folder / "texts.jsonl", ({"text": text} for text in make_texts(60)))
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    first, second = run_on_ranks(runs, 2, folder)
    assert second["pages"] == [], "one rank writes"
    return first


def test_the_report_lives_while_the_run_does(found: dict[str, Any], folder: Path) -> None:
    pages = found["pages"][: found["num_pages"]]
    assert len(pages) == 4 + 2, "after each record: steps and evaluations"
    steps = [int(re.findall(r"Running: step (\d) of 4", page)[0]) for page in pages]
    assert steps == [0, 1, 2, 3, 4, 4]
    assert "left." not in pages[0].partition("<strong>Running")[2].partition("</strong>")[0]
    for page in pages[1:]:
        assert re.search(r"Running: step \d of 4, [\d.e-]+ s left\.", page)
        assert re.search(r'"run-state" content="[^"]*running[^"]*"><meta http-equiv="refresh" content="1">', page)
    assert 'id="chart-loss"' in pages[2]
    last = (folder / "whole/report.html").read_text()
    assert "run-state" not in last
    assert 'http-equiv="refresh"' not in last


def test_a_run_that_ended_before_its_time_says_so(found: dict[str, Any], folder: Path) -> None:
    stopped, failed = found["report-stopped"], found["report-failed"]
    assert '<meta name="run-state" content="{&#34;state&#34;: &#34;stopped&#34;' in stopped
    assert "checkpoint.time_limit_minutes (0.0001) is over" in stopped
    assert "<strong>Failed after step 2 of 4.</strong> <span>ValueError: &lt;the disk&gt; is on fire" in failed
    assert "refresh" not in stopped + failed
    assert "run-state" not in (folder / "failed/report.html").read_text(), "the same command has finished it"
    assert not list((folder / "failed").glob(".*")), os.listdir(folder / "failed")


def test_a_run_whose_held_out_loss_falls_no_more_ends_well_and_early(found: dict[str, Any], folder: Path) -> None:
    """At a learning rate of nothing it never falls: the evaluations at steps 2 and 4 are two without a lower one."""
    records = records_of(folder / "patient")
    assert [record["step"] for record in records if record["split"] == "eval"] == [0, 2, 4]
    assert max(record["step"] for record in records) == 4
    assert found["losses-patient"] == found["losses-impatient"], "and until then it is the same run"
    page = (folder / "patient/report.html").read_text()
    assert "run-state" not in page, "it is done"
    assert "no lower held-out loss in 2 evaluations (training.patience); the lowest is" in page
    assert [path.name for path in (folder / "patient/checkpoints").iterdir()] == ["step_00000004"]


@torch.no_grad()
def greedy(folder: Path, prompt: str) -> str:
    """The most likely tokens, one after the other, up to the first special one."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).float()
    ids = tokenizer(prompt)["input_ids"]
    asked = len(ids)
    for _ in range(40):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in tokenizer.all_special_ids:
            ids.pop()
            break
    return tokenizer.decode(ids[asked:])  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", SAMPLED)
def test_held_out_prompts_are_continued_before_and_after(kind: str, found: dict[str, Any], folder: Path) -> None:
    assert found[f"losses-sampled-{kind}"] == found[f"losses-unsampled-{kind}"], "as if nothing had been sampled"
    samples = json.loads((folder / f"sampled-{kind}/samples.json").read_text())
    assert [sample["expected"] for sample in samples] == [" and the king"] * 2
    for sample in samples:
        assert sample["before"] == greedy(folder / "model", sample["prompt"])
        assert [step for step, _ in sample["between"]] == [1, 2, 3]
        assert sample["after"] == greedy(folder / f"sampled-{kind}/export", sample["prompt"])
    page = (folder / f"sampled-{kind}/report.html").read_text()
    titles = ["Before training", *(f"After step {step}<" for step in (1, 2, 3)), "After training", "In the data"]
    places = [page.index(title) for title in titles]
    assert places == sorted(places)
    assert html.escape(samples[0]["prompt"]) in page


def test_what_is_written_at_an_evaluation_is_what_the_checkpoint_writes(folder: Path) -> None:
    """Every strategy writes the same, but the one with averages, which are evaluated."""
    samples = json.loads((folder / "sampled-zero3/samples.json").read_text())
    for step in (1, 2, 3):
        model = folder / f"after-{step}"
        arguments = ["export", str(folder / "sampled-zero3"), "--checkpoint", str(step), "--to", str(model)]
        assert CliRunner().invoke(app, arguments).exit_code == 0
        for sample in samples:
            assert dict(sample["between"])[step] == greedy(model, sample["prompt"])
    assert len({text for sample in samples for _, text in sample["between"]}) > 2, "which training changes"
    for kind in ("zero2", "offload"):
        assert json.loads((folder / f"sampled-{kind}/samples.json").read_text()) == samples


def test_a_resumed_run_goes_on_with_its_samples(folder: Path) -> None:
    """It failed behind the evaluation after step 3, and goes on after step 2."""
    whole, again = (json.loads((folder / f"sampled-{name}/samples.json").read_text()) for name in ("zero3", "again"))
    assert again == whole


def test_pairs_are_continued_behind_their_prompt(folder: Path) -> None:
    [pair] = json.loads((folder / "compared/samples.json").read_text())
    assert (pair["prompt"], pair["expected"]) == ("the moon", " was high")
    assert pair["before"] == greedy(folder / "model", "the moon")
    assert not (folder / "unsampled-zero3/samples.json").exists()
