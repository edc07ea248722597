"""`toolkit compare`: the table of runs beside each other, against figures written out here."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.html_page import Page
from typer.testing import CliRunner, Result

from toolkit.checkpoint.manifest import COMPLETE, Manifest, file_entry
from toolkit.cli.app import app
from toolkit.errors import BadInputError
from toolkit.pages.parts.number_text import MISSING
from toolkit.pages.run_page import RunSummary, write_report
from toolkit.pages.status import Status
from toolkit.supervise.rank_status import FOLDER, RankStatus, to_text

RECIPE = """description: {name}
model: {{name_or_path: org/small, revision: null}}
data: {{train: [/rows/{rows}/train.jsonl], max_length: 128}}
objective: {{kind: causal_lm}}
adapter: {{kind: {adapter}, r: 8}}
optimizer: {{learning_rate: {rate}}}
training: {{output_dir: outputs/{name}, max_steps: 20}}
"""


def train_line(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "split": "train",
        "step": step,
        "tokens": 1000 * step,
        "loss": 4.0 - 0.1 * step,
        "learning_rate": 1e-3,
        "step_seconds": 0.5,
        "tokens_per_second": 2000.0,
        "peak_device_bytes": None,
        "peak_host_bytes": 3 * 2**20,
        **changes,
    }


def eval_line(step: int, loss: float | None, **changes: Any) -> dict[str, Any]:
    return {"split": "eval", "step": step, "loss": loss, **changes}


LINES = [
    eval_line(0, 4.5, accuracy=0.25),
    *(train_line(step) for step in range(1, 11)),
    eval_line(5, 3.25, accuracy=0.75),
    eval_line(10, 3.5, accuracy=0.5),
]
"""Ten steps of loss 3.9 to 3.0, the best of three evaluations in the middle."""


def make(folder: Path, lines: list[dict[str, Any]] | None = LINES, finished: bool = True, **recipe: str) -> Path:
    folder.mkdir()
    values = {"name": folder.name, "rows": "one", "adapter": "none", "rate": "0.001", **recipe}
    (folder / "recipe.yaml").write_text(RECIPE.format(**values))
    if lines is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (folder / "finished.json").write_text('{"export": null}')
    return folder


def compared(*runs: Path | str, options: tuple[str, ...] = ()) -> Result:
    result = CliRunner().invoke(app, ["compare", *map(str, runs), *options])
    assert result.exception is None or isinstance(result.exception, BadInputError), result.exception
    return result


def table(result: Result) -> dict[str, list[str]]:
    """The cells of each row, by its heading; of the tables in turn."""
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in result.stdout.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


def test_what_came_of_each_and_what_differs(tmp_path: Path) -> None:
    other = [train_line(step, loss=1.0, step_seconds=2.0, peak_device_bytes=2**30) for step in range(1, 4)]
    first = make(tmp_path / "first")
    second = make(tmp_path / "second", other, adapter="lora", rate="0.002", rows="two")
    (second / "export").mkdir()
    told = {"ranks": 2, "device": "cuda", "strategy": "zero3", "precision": "bf16", "versions": {"torch": "2.13.0"}}
    (second / "export/training.json").write_text(json.dumps(told))
    rows = table(compared(first, second))
    assert rows["model"] == ["org/small", "org/small"]
    assert rows["method"] == ["causal_lm, full", "causal_lm, lora of rank 8"]
    assert rows["state"] == ["finished", "finished"]
    assert rows["steps"] == ["10 of 20", "3 of 20"]
    assert rows["tokens"] == ["10.0 k", "3,000"]
    assert rows["training loss"] == ["3.0000", "1.0000"], "the last tenth of ten steps is one of them"
    assert rows["held-out loss, best"] == ["3.2500 at step 5", MISSING]
    assert rows["held-out loss, last"] == ["3.5000", MISSING]
    assert rows["accuracy, best"] == ["75.0 % at step 5", MISSING], "of this figure the highest is the best"
    assert rows["accuracy, last"] == ["50.0 %", MISSING]
    assert rows["seconds per step"] == ["0.5", "2"]
    assert rows["time of the steps"] == ["5 s", "6 s"]
    assert rows["memory peak"] == ["3.00 MiB (host)", "1.00 GiB (device)"]
    differing = [line.split()[0] for line in compared(first, second).stdout.partition("recipes")[2].splitlines()[2:]]
    assert differing == ["data.train", "adapter.kind", "optimizer.learning_rate"], "and neither name nor folder"
    assert rows["data.train"] == ["one/train.jsonl", "two/train.jsonl"]
    assert rows["optimizer.learning_rate"] == ["0.001", "0.002"]
    assert "machines" not in compared(first, second).stdout, "of the first nothing is known"


def test_one_folder_stands_for_the_runs_in_it(tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    for name in ("b", "a"):
        make(tmp_path / "outputs" / name)
    (tmp_path / "outputs/notes").mkdir()
    assert compared(tmp_path / "outputs").output.split()[:2] == ["a", "b"]
    for alone in (tmp_path / "outputs/a", tmp_path / "outputs/notes"):
        assert "one run has nothing to be compared with" in str(compared(alone).exception)


def test_the_page_has_answers_to_the_prompts_that_runs_share(tmp_path: Path) -> None:
    for name, samples in (
        ("first", [("Who?", "me", "nobody"), ("What?", "that", "this")]),
        ("second", [("Who?", "me", None), ("How?", "so", "thus")]),
        ("third", None),
    ):
        make(tmp_path / name)
        written = [
            {"prompt": prompt, "expected": expected, "before": f"{name} before", "after": after}
            for prompt, expected, after in samples or []
        ]
        (tmp_path / name / "samples.json").write_text("{" if samples is None else json.dumps(written))
    done = compared(
        *(tmp_path / name for name in ("first", "second", "third")), options=("--to", str(tmp_path / "page.html"))
    )
    assert done.exit_code == 0, done.exception
    found = Page((tmp_path / "page.html").read_text()).text_of["answers"]
    words = "Held-out prompts the last answers Who? firstnobody secondsecond before In the datame"
    assert "".join(found.split()) == words.replace(" ", ""), "of the shared prompt alone, and its answer in the data"


def test_versions_and_ranks_that_differ(tmp_path: Path) -> None:
    runs = [make(tmp_path / name) for name in ("first", "second")]
    for run, ranks, version in zip(runs, (1, 2), ("2.13.0", "2.14.1"), strict=True):
        (run / "export").mkdir()
        told = {"ranks": ranks, "device": "cpu", "strategy": "ddp", "precision": "no", "versions": {"torch": version}}
        (run / "export/training.json").write_text(json.dumps(told))
    result = compared(*runs)
    assert "The recipes do not differ." in result.stdout
    rows = table(result)
    assert (rows["ranks"], rows["torch"]) == (["1", "2"], ["2.13.0", "2.14.1"])
    assert "strategy" not in rows


def test_as_json(tmp_path: Path) -> None:
    runs = [make(tmp_path / "first"), make(tmp_path / "second", rate="0.002")]
    found = json.loads(compared(*runs, options=("--json",)).stdout)
    assert found["differences"] == {"optimizer.learning_rate": [0.001, 0.002]}
    first = found["runs"][0]
    assert first["held_out"] == {
        "loss": {"last": 3.5, "best": 3.25, "step": 5},
        "accuracy": {"last": 0.5, "best": 0.75, "step": 5},
    }
    assert (first["step"], first["num_steps"], first["seconds"], first["peak_bytes"]) == (10, 20, 5.0, 3 * 2**20)


def test_a_step_that_was_trained_again_counts_once(tmp_path: Path) -> None:
    again = [*LINES, train_line(10, loss=9.0, step_seconds=1.5)]
    rows = table(compared(make(tmp_path / "first", again), make(tmp_path / "second")))
    assert rows["training loss"] == ["9.0000", "3.0000"]
    assert rows["time of the steps"] == ["6 s", "5 s"]


def test_runs_that_are_not_finished_say_how_they_stand(tmp_path: Path) -> None:
    live, gone, failed, begun = (
        make(tmp_path / "live", LINES, finished=False),
        make(tmp_path / "gone", LINES, finished=False),
        make(tmp_path / "failed", LINES, finished=False),
        make(tmp_path / "begun", None, finished=False),
    )
    ended = "OSError: <no> room."
    for run, state, problem in ((live, "running", ""), (gone, "running", ""), (failed, "failed", ended)):
        status = Status(state, 10, 2000, None, time.time(), 30, problem)
        write_report(run / "report.html", RunSummary("run", "", LINES, {}, [], {}, {}, None, status=status))
    (live / FOLDER).mkdir()
    beat = to_text([RankStatus(0, "one", 1, "S", "forward", 11, 5, 0.1, 0.1)], 1, time.time())
    (live / FOLDER / "host_00000.json").write_text(beat)
    with (live / "metrics.jsonl").open("a") as file:
        file.write('{"split": "train", "st')  # being written
    result = compared(live, gone, failed, begun)
    rows = table(result)
    assert rows["state"] == ["running", "killed", "failed", "unfinished"]
    assert rows["steps"] == ["10 of 2,000", "10 of 2,000", "10 of 2,000", "0 of 20"]
    warnings = result.stderr.splitlines()
    assert warnings == [
        "warning: failed: failed: OSError: <no> room.",
        "warning: begun: there is no metrics.jsonl, so that nothing is known of its steps",
    ]


def test_what_is_damaged_is_left_out_and_said(tmp_path: Path) -> None:
    whole, cut = make(tmp_path / "whole"), make(tmp_path / "cut")
    bad = ["{", "[]", '{"split": "train"}', '{"split": "train", "step": 1e3}', '{"split": "eval", "step": ' + "9" * 400]
    lines = [json.dumps(line) for line in LINES]
    (cut / "metrics.jsonl").write_text("\n".join([*lines[:5], *bad, *lines[5:]]) + "\n")
    (cut / "recipe.yaml").write_bytes(b"\xff model: [")
    result = compared(whole, cut)
    assert table(result)["held-out loss, best"] == ["3.2500 at step 5"] * 2
    assert table(result)["model"] == ["org/small", MISSING]
    assert result.stderr.splitlines() == [
        "warning: cut: recipe.yaml is damaged: it is not readable as YAML",
        "warning: cut: metrics.jsonl is damaged: 5 lines, first line 6, cannot be read and are left out",
    ]
    # Values of any kind where a number should be.
    strange = [train_line(1, loss="x", tokens=[1], step_seconds=None), eval_line(1, None, accuracy={})]
    odd = make(tmp_path / "odd", strange)
    assert table(compared(whole, odd))["held-out loss, last"] == ["3.5000", MISSING]
    for content in (b"", b"\0\xff\n", b"\n\n"):
        (odd / "metrics.jsonl").write_bytes(content)
        result = compared(whole, odd)
        assert result.exit_code == 0
        assert "odd: metrics.jsonl is" in result.stderr
    (odd / "metrics.jsonl").unlink()
    (odd / "metrics.jsonl").mkdir()
    assert "odd: metrics.jsonl cannot be read" in compared(whole, odd).stderr


def test_a_store_of_checkpoints_has_what_its_last_one_knows(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    store = tmp_path / "store"
    folder = store / "checkpoints/step_00000005"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES if line["step"] <= 5))
    (folder / "rank_00000.json").write_text("{}")
    files = {path.name: file_entry(path) for path in folder.iterdir()}
    recipe = {"model": {"name_or_path": "org/small"}, "optimizer": {"learning_rate": 0.005}}
    manifest = Manifest(5, 40, 1, "zero2", "no", recipe, "x", {}, None, 3.25, "", {"torch": "2.13.0"}, files=files)
    (folder / "manifest.json").write_text(manifest.to_json())
    (folder / COMPLETE).write_text(hashlib.sha256(manifest.to_json().encode()).hexdigest())
    result = compared(run, f"file://{store}/")
    rows = table(result)
    assert rows["steps"] == ["10 of 20", "5"]
    assert rows["state"] == ["finished", "unfinished"]
    assert rows["held-out loss, last"] == ["3.5000", "3.2500"]
    assert rows["optimizer.learning_rate"] == ["0.001", "0.005"]
    assert "step 5" in result.stderr
    assert "store:" in result.stderr
    # A run that was copied whole is read as one here.
    copied = table(compared(tmp_path / "run", f"file://{make(tmp_path / 'other', rate='0.003')}"))
    assert copied["state"] == ["finished", "finished"]


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ((), "name two or more"),
        (("run",), "named twice"),
        (("nowhere",), "nowhere': no such folder"),
        (("empty",), "empty' is not a run"),
        (("run/recipe.yaml",), "recipe.yaml': no such folder"),
        (("file://{place}/nowhere",), "nowhere': no such folder"),
    ],
)
def test_what_is_no_run_is_named(others: tuple[str, ...], named: str, tmp_path: Path) -> None:
    make(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    places = [name.format(place=tmp_path) if "://" in name else str(tmp_path / name) for name in others]
    result = compared(tmp_path / "run", *places)
    assert isinstance(result.exception, BadInputError), result.output
    assert result.exception.exit_code == 2
    assert named in str(result.exception)


def test_names_are_as_short_as_tells_them_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    runs = [make(tmp_path / name) for name in ("a/run", "b/run")]
    assert compared(*runs).stdout.splitlines()[0].split() == ["a/run", "b/run"]
