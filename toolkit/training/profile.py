"""Where the time of some steps went: a trace of torch's profiler, and shares that sum to the wall time.

Each instant counts for one kind of work: compute if any runs; else communication if any is under way, which is then
exposed; else waiting for data; else the host (the optimizer if it runs on the host, offload, Python). On a GPU compute
and communication are kernels. On the CPU they are torch's operators outside the update, and gloo's collectives from
start to end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from toolkit.training.extension import Extension
from toolkit.training.step import Step

if TYPE_CHECKING:
    from toolkit.training.loop_state import LoopState

PROFILED, DATA, UPDATE = "toolkit.profiled", "toolkit.data", "toolkit.update"
"""Labels of the trainer's parts of a step."""

KINDS = ("compute", "communication", "data", "host")
"""Kinds of work; if several are under way at once, the first of them takes the time."""

FOLDER = "profile"

Interval = tuple[float, float]


@dataclass(frozen=True)
class Event:
    """An event of the trace, on the host or on the device; times in microseconds."""

    name: str
    start: float
    end: float
    on_device: bool = False


def label(name: str) -> contextlib.AbstractContextManager[Any]:
    """Names a part of the trace. It costs microseconds if nothing is profiled."""
    return torch.profiler.record_function(name)


def attributed(events: Iterable[Event]) -> dict[str, float]:
    """Returns the seconds of each of `KINDS` during the event `PROFILED`; they sum to its duration."""
    events = list(events)
    whole = _intervals_named(events, PROFILED)
    on_device = any(event.on_device for event in events)
    considered = [event for event in events if event.on_device == on_device]
    compute = _union((e.start, e.end) for e in considered if _is_compute(e))
    if not on_device:  # the device computes updates, too
        compute = _subtract(compute, _intervals_named(events, UPDATE))
    communication = _union((e.start, e.end) for e in considered if _is_communication(e))
    seconds, rest = {}, whole
    for kind, intervals in (
        ("compute", compute),
        ("communication", communication),
        ("data", _intervals_named(events, DATA)),
    ):
        left = _subtract(rest, intervals)
        seconds[kind] = (_total_length(rest) - _total_length(left)) / 1e6
        rest = left
    return {**seconds, "host": _total_length(rest) / 1e6}


def _is_communication(event: Event) -> bool:
    if event.on_device:
        return "nccl" in event.name.lower()
    return event.name.startswith(("gloo:", "c10d::", "_c10d_functional::"))


def _is_compute(event: Event) -> bool:
    if event.on_device:
        return not _is_communication(event) and not event.name.startswith(("Memcpy", "Memset"))
    return event.name.startswith("aten::")


def _intervals_named(events: Iterable[Event], name: str) -> list[Interval]:
    return _union((event.start, event.end) for event in events if event.name == name and not event.on_device)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union as intervals in order, which do not touch."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _subtract(intervals: list[Interval], taken: list[Interval]) -> list[Interval]:
    """Returns the parts of `intervals` outside `taken`; both are results of `_union`."""
    left: list[Interval] = []
    position = 0
    for start, end in intervals:
        while position < len(taken) and taken[position][1] <= start:
            position += 1
        at, number = start, position
        while number < len(taken) and taken[number][0] < end:
            if taken[number][0] > at:
                left.append((at, taken[number][0]))
            at = max(at, taken[number][1])
            number += 1
        if at < end:
            left.append((at, end))
    return left


def _total_length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


class StepProfile(Extension):
    """Profiles the steps from `first` to `last`, on every rank.

    Args:
        run: the output folder; rank r's chrome trace becomes profile/rank_r.json in it.

    Attributes:
        seconds: seconds of each of `KINDS` in a step, the mean over steps and ranks; None before the last step.
    """

    def __init__(self, accelerator: Accelerator, first: int, last: int, run: Path) -> None:
        self.seconds: dict[str, float] | None = None
        self._accelerator = accelerator
        self._first = first
        self._last = last
        self._folder = run / FOLDER
        self._profiler: torch.profiler.profile | None = None
        self._region = label(PROFILED)

    def before_step(self, step: int) -> None:
        if step == self._first:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
            self._region.__enter__()

    def between_steps(self, trainer: LoopState, step: Step) -> None:
        """Writes the trace and finds the shares after the last profiled step, which is collective."""
        if trainer.global_step != self._last or self._profiler is None:
            return
        if self._accelerator.device.type == "cuda":
            # Kernels of the last step may still be queued, and would be missing.
            torch.cuda.synchronize()
        self.close()
        assert self._profiler is not None
        self._folder.mkdir(exist_ok=True)
        trace = self._folder / f"rank_{self._accelerator.process_index}.json"
        self._profiler.export_chrome_trace(str(trace))
        found = attributed(_events_of(self._profiler))
        mine = torch.tensor([found[kind] for kind in KINDS], dtype=torch.float64, device=self._accelerator.device)
        mean = self._accelerator.reduce(mine / (self._last - self._first + 1), "mean").tolist()
        self.seconds = dict(zip(KINDS, mean, strict=True))
        self._profiler = None

    def close(self) -> None:
        """Ends profiling, if it is under way."""
        if self._profiler is not None:
            self._region.__exit__(None, None, None)
            self._profiler.stop()


def _events_of(profiler: torch.profiler.profile) -> list[Event]:
    """Returns the events of a trace, without the device's copies of labels.

    torch reports a label a second time as an event of the device, over all kernels that began inside it. FSDP2 labels
    its gathers; with these events counted as compute, no communication would be exposed.
    """
    found = [
        (event, event.device_type.name != "CPU")
        for event in profiler.events() or ()  # type: ignore[no-untyped-call]
    ]
    return [
        Event(event.name, event.time_range.start, event.time_range.end, on_device)
        for event, on_device in found
        if not (on_device and event.is_user_annotation)
    ]
