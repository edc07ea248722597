"""The report: right headline numbers, every text escaped, gaps shown, nothing loaded from outside."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases
from support.html_page import HOSTILE, Page

from toolkit.pages.parts.side_by_side import SideBySide
from toolkit.pages.run_page import MAX_LISTED_STEPS, RunSummary, headline, render_report, write_report

TABLES = cases(__file__)

GIB = 2**30


def train_line(step: int, **changes: Any) -> dict[str, Any]:
    line = {
        "split": "train",
        "step": step,
        "epoch": step / 50,
        "samples": 8 * step,
        "tokens": 4096 * step,
        "target_tokens": 4000 * step,
        "loss": 2 + math.exp(-step / 20) + 0.01 * (step % 3),
        "grad_norm": 1 + 0.1 * (step % 5),
        "learning_rate": 1e-4 / step,
        "tokens_per_second": 9000.0 + step,
        "padded_tokens_per_second": 12000.0,
        "targets_per_second": 1800.0,
        "samples_per_second": 24.0,
        "step_seconds": 0.5,
        "peak_device_bytes": 3 * GIB + step * 2**20,
        "peak_host_bytes": GIB,
        "mfu": 0.4,
    }
    return line | changes


def eval_line(step: int, loss: float | None, **changes: Any) -> dict[str, Any]:
    perplexity = None if loss is None else math.exp(loss)
    return {"split": "eval", "step": step, "loss": loss, "target_tokens": 500, "perplexity": perplexity} | changes


def non_finite_line(step: int) -> dict[str, Any]:
    return train_line(step, loss=None, grad_norm=None, non_finite=True)


def train_lines(last_step: int) -> list[dict[str, Any]]:
    return [train_line(step) for step in range(1, last_step + 1)]


def summary(metrics: list[dict[str, Any]], **changes: Any) -> RunSummary:
    whole = RunSummary(
        title="quickstart",
        recipe_yaml="# small\nmodel:\n  name_or_path: tiny\n",
        metrics=metrics,
        data_report={
            "max_length": 512,
            "train": {
                "read": 1200,
                "kept": 1197,
                "num_dropped": 3,
                "dropped": {"not JSON": {"count": 3, "rows": ["a.jsonl:1", "a.jsonl:2", "a.jsonl:9"]}},
                "tokens": 98765,
                "target_share": 0.37,
                "samples": 200,
                "fill_rate": 0.985,
                "longest": {"row": "a.jsonl:88", "tokens": 511},
                "length_histogram": {"edges": [0, 271828, 314159], "counts": [161803, 141421]},
            },
            "validation": {"read": 77, "tokens": 555},
        },
        units=[("layers.*", "Block", "4", "123,456", "2.00 GiB")],
        facts={"strategy": "full_shard", "ranks": "2", "duration": "51 s"},
        versions={"torch": "2.13.0"},
        side_by_side=[SideBySide("To be,\n", "\n  or not < to be")],
    )
    return replace(whole, **{"outcome": headline(metrics), **changes})


def page_of(metrics: list[dict[str, Any]], **changes: Any) -> Page:
    return Page(render_report(summary(metrics, **changes)))


def curves_of(page: str) -> list[dict[str, Any]]:
    """What the page's script draws, chart by chart."""
    return [json.loads(value) for _, name, value in Page(page).attributes if name == "data-curves"]


# ---- headline ----


def test_memory_on_cpu_is_the_hosts() -> None:
    metrics = [train_line(step, peak_device_bytes=None, mfu=None) for step in range(1, 20)]
    page = page_of(metrics)
    assert "1.00 GiB\non the host" in page.text_of["tile-memory"]
    assert "MFU" not in page.text_of["tile-throughput"]
    assert "device" not in page.text_of["chart-memory"]
    assert "non-finite" not in page.text_of  # null by design is not a fault
    metrics[2] |= {"grad_norm": None, "non_finite": True}
    assert page_of(metrics).text_of["non-finite"].endswith("step 3: grad norm")


def test_a_step_trained_again_after_a_resume_counts_once() -> None:
    metrics = [train_line(1), train_line(2), train_line(3, tokens=1), train_line(2), train_line(3, tokens=777)]
    page = page_of(metrics)
    assert "777" in page.text_of["tile-tokens"]
    assert "3 steps" in page.text_of["tile-duration"]


# ---- runs of every shape ----


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [train_line(1)],
        [eval_line(0, 3.0)],
        [eval_line(0, 3.0), train_line(1), eval_line(1, 2.0)],
        train_lines(9),
        train_lines(100),
        [non_finite_line(step) for step in range(1, 30)],
        [train_line(1, loss=3e38), train_line(2, loss=0.0), train_line(3, loss=-1.0)],
        [{"split": "train", "step": 1, "loss": 2.0}],
    ],
    ids=["nothing", "one-step", "eval-only", "one-of-each", "short", "no-eval", "all-null", "extreme", "sparse"],
)
def test_every_shape_of_run_renders(metrics: list[dict[str, Any]]) -> None:
    text = render_report(summary(metrics, side_by_side=[]))
    page = Page(text)
    assert "side-by-side" not in page.text_of
    assert re.search(r"\b(nan|inf|None)\b", " ".join(page.text_of.values())) is None
    assert re.search(r"\b(nan|infinity)\b", text, re.IGNORECASE) is None  # no such coordinates in a chart either


def test_a_long_run_stays_small_and_keeps_its_spike() -> None:
    metrics = [train_line(step) for step in range(1, 5001)]
    metrics[2345]["grad_norm"] = 5e6
    text = render_report(summary(metrics))
    assert len(text) < 300_000
    drawn = {told["title"]: told for told in curves_of(text)}
    assert max(value or 0 for curve in drawn["Gradient norm"]["curves"] for value in curve["values"]) == 5e6
    assert (drawn["Gradient norm"]["log"], drawn["Loss"]["log"]) == (True, False)


# ---- gaps ----


def test_the_note_names_the_first_steps_and_counts_the_rest() -> None:
    note = page_of([non_finite_line(step) for step in range(1, MAX_LISTED_STEPS + 8)]).text_of["non-finite"]
    assert f"step {MAX_LISTED_STEPS}:" in note
    assert f"step {MAX_LISTED_STEPS + 1}:" not in note
    assert "and 7 more" in note


# ---- tables and texts ----


@pytest.mark.parametrize("report", TABLES["REPORTS"])
def test_a_data_report_may_lack_any_key(report: dict[str, Any]) -> None:
    text = render_report(summary([], data_report=report))
    assert "data_report.html" in text
    assert "None" not in Page(text).text_of["data"]


def test_the_title_says_model_and_data_and_the_time_is_in_utc() -> None:
    text = render_report(summary([], title="Llama on plays.txt", folder="quickstart", written=1_700_000_000.7))
    assert "<title>Llama on plays.txt · quickstart</title>" in text
    assert "Fine-tuning report · quickstart · 2023-11-14 22:13:20 UTC" in text


def test_many_evaluations_are_thinned_to_a_short_table_with_both_ends() -> None:
    page = page_of([eval_line(step, 3.0 - step / 1000) for step in range(1001)])
    cells = page.text_of["evaluations"]
    assert cells.startswith("Evaluations\nStepLossPerplexity03.000")
    assert cells.endswith("1,0002.0007.39\n")
    assert cells.count("\n") < 5
    assert page.elements["tr"] < 60


def with_text_everywhere(text: str) -> RunSummary:
    return summary(
        [*train_lines(12), eval_line(12, 1.0)],
        title=text,
        recipe_yaml=f"{text}\n# {text}\nkey: {text}\n",
        data_report={"train": {"dropped": {text: {"count": 1, "rows": [text]}}, "longest": {"row": text, "tokens": 3}}},
        units=[[text] * 5],
        facts={text: text, "duration": text},
        versions={text: text},
        side_by_side=[SideBySide(text, text)],
    )


def test_every_text_is_escaped() -> None:
    hostile = render_report(with_text_everywhere(HOSTILE))
    benign = render_report(with_text_everywhere("benign"))
    assert HOSTILE not in hostile
    # Each place of the benign text is one of the hostile text, and none of them made an element or an attribute.
    page, expected = Page(hostile), Page(benign)
    assert page.elements == expected.elements
    assert page.attributes == expected.attributes
    assert page.elements["script"] == 1, "that of the curves"
    assert "".join(page.text_of.values()).count(HOSTILE) == "".join(expected.text_of.values()).count("benign")
    assert page.text_of["side-by-side"].rstrip().endswith(HOSTILE)


# ---- writing ----


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, run = tmp_path / "report.html", summary(train_lines(3))
    path.write_text("old")
    mode = path.stat().st_mode

    def fail(source: Path, target: Path) -> None:
        assert Path(source).parent == tmp_path, "a rename is atomic inside one file system only"
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            write_report(path, run)
    assert path.read_text() == "old"
    write_report(path, run)
    assert path.read_text(encoding="utf-8") == render_report(run)
    assert path.stat().st_mode == mode, "as readable as any other"
    assert [item.name for item in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("text", ["half a pair \ud83d", "nul \0 byte", "עברית", "😀"])
def test_any_generated_text_can_be_written(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.html"
    write_report(path, summary([], side_by_side=[SideBySide("", text)]))
    content = path.read_bytes()
    assert b"\0" not in content
    assert "side-by-side" in Page(content.decode("utf-8")).text_of


def test_text_cannot_steer_a_terminal_or_turn_the_direction_of_what_follows() -> None:
    text = render_report(summary([], side_by_side=[SideBySide("a\u202eb\x1b[2J", "c\0<\n")]))
    assert ">a\ufffdb\u241b[2J<" in text
    assert ">c\ufffd&lt;\n<" in text
