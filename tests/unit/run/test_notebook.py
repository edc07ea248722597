"""A run in a notebook: one output, which ends as the result, and the errors of forked ranks."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.errors import BadInputError
from toolkit.pages.notebook_output import Output
from toolkit.pages.parts.story import Story
from toolkit.run.shown import notebook
from toolkit.run.shown.notebook import NotebookOutput, notebook_output
from toolkit.run.shown.outcome import result_of
from toolkit.run.stages import accelerator
from toolkit.terminal import Terminal

EVALS = [{"split": "eval", "step": 0, "loss": 4.0}, {"split": "eval", "step": 3, "loss": 2.5}]
TRAIN = [{"split": "train", "step": step, "loss": 4.0 - step, "tokens": 100 * step} for step in (1, 2, 3)]


class Displays:
    """Stands for IPython.display in a kernel: each output, with what was shown in its place."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.outputs: list[list[Output]] = []
        patch.setattr(notebook, "in_notebook", lambda: True)
        patch.setattr(notebook, "_display", self.display)

    def display(self, output: Output) -> Any:
        self.outputs.append([output])
        return SimpleNamespace(update=lambda output, raw: self.outputs[-1].append(output))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(notebook.time, "monotonic", lambda: now[0])
    return now


def test_a_run_has_one_output_that_ends_as_its_result(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    displays = Displays(monkeypatch)
    output = notebook_output(3)
    assert output is not None
    console = Terminal()
    with output.holding(console):
        console.print("  strategy: zero3 <b>")
        console.warn("few rows")
    assert capsys.readouterr() == ("", ""), "it is in the output"
    for number in range(3):
        clock[0] += 1
        output.record([EVALS[0], *TRAIN[: number + 1]], 65.0)
    Story(outcome="held-out loss 4.0000 -> 2.5000 (-37.5%)").write(tmp_path)
    output.finish(result_of(tmp_path, [*EVALS, *TRAIN], tmp_path / "export"))
    [shown] = displays.outputs
    assert [each["text/plain"].splitlines()[0] for each in shown] == [
        "step 0 of 3",
        "step 0 of 3",
        "step 1 of 3, 1:05 left, loss 3.0000, held-out loss 4.0000",
        "step 2 of 3, 1:05 left, loss 2.0000, held-out loss 4.0000",
        "step 3 of 3, 1:05 left, loss 1.0000, held-out loss 4.0000",
        "In 3 steps on 300 tokens: held-out loss 4.0000 → 2.5000 (-37.5%).",
    ]
    assert shown[-1]["text/plain"].splitlines()[1:] == [
        f"report: {tmp_path / 'report.html'}",
        f"model: {tmp_path / 'export'}",
    ]
    for each in shown[1:]:
        assert "<div>warning: few rows</div>" in each["text/html"], "seen without a click"
        assert "strategy: zero3 &lt;b&gt;" in each["text/html"].partition("<details>")[2]
    assert [each["text/html"].count("<svg") for each in shown] == [0, 0, 1, 1, 1, 1]


def test_bars_and_curves_cost_a_bounded_share_of_the_run(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar at most twice a second; a curve that takes 0.3 s at most every 15 s more, 2 % of the time."""
    drawn: list[float] = []

    def draw(records: Any) -> None:
        drawn.append(clock[0])
        clock[0] += 0.3

    monkeypatch.setattr(notebook, "curve_of", draw)
    shown: list[Output] = []
    output = NotebookOutput(shown.append, 1000)
    for _ in range(300):
        clock[0] += 0.1
        output.record([], None)
    assert 30 < len(shown) <= 61
    assert len(drawn) == 2
    assert drawn[1] - drawn[0] >= 0.3 / 0.02


@pytest.mark.parametrize("case", ["no notebook", "forked by somebody else"])
def test_elsewhere_there_is_no_output(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    displays = Displays(monkeypatch)
    if case == "no notebook":
        monkeypatch.setattr(notebook, "in_notebook", lambda: False)
    else:
        monkeypatch.setattr(notebook.multiprocessing, "parent_process", lambda: object())
    assert notebook_output(3) is None
    assert displays.outputs == []


@pytest.mark.parametrize("count", [0, 1])
def test_one_process_needs_no_launcher(count: int) -> None:
    with pytest.raises(BadInputError, match=re.escape(f"num_processes: {count}, but")):
        notebook.finetune_on(SimpleNamespace(), count)  # type: ignore[arg-type]


def test_a_build_for_cuda_without_a_gpu_may_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls the fork of a process that has asked for the number of GPUs a bad one, also where that is 0."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    accelerator._require_usable_fork()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BadInputError, match="forked from one that has used CUDA"):
        accelerator._require_usable_fork()


def test_ranks_of_a_cell_draw_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter's kernels have it
    assert Terminal().is_terminal
    monkeypatch.setattr(notebook, "in_notebook", lambda: True)
    for name, value in notebook._environment().items():
        monkeypatch.setenv(name, value)
    assert not Terminal().is_terminal
