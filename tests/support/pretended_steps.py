"""Ranks with a pretended device each, and what a run's steps do to it: the host's waits, the memory left behind."""

from __future__ import annotations

import multiprocessing
import resource
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from support import ranks

NCCL = {"TEST_BACKEND": "cpu:gloo,cuda:nccl"}
WITHOUT_DEVICES = {"PRETENDED_LIBRARIES": ""}


def started_anew(function: Callable[..., Any], num_ranks: int, *args: Any, **environment: str) -> Any:
    """`run_on_ranks` with a device for each rank: what is forked from a process that knows CUDA cannot use them.

    Args:
        environment: of the ranks, such as `NCCL` or `WITHOUT_DEVICES`.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PRETENDED_DEVICES": str(num_ranks), **environment}.items():
            patch.setenv(name, value)
        patch.setattr(ranks, "_context", multiprocessing.get_context("spawn"))
        patch.setattr(multiprocessing.context.SpawnContext, "set_forkserver_preload", lambda *_: None)
        return ranks.run_on_ranks(function, num_ranks, *args)


@dataclass(frozen=True)
class Watched:
    """One optimizer step.

    Attributes:
        waits: where the threads that compute it waited for the device, as "module.function".
        waits_beside: where other threads did, which the step does not wait for.
        peak_before: the most allocated bytes of the device between the step before and this one.
        peak: the most during the step.
        allocated: after it.
        reserved: bytes that the caching allocator holds then.
        pinned: bytes of pinned memory of the host.
        resident: bytes of the process, with the pretended device's pages that were touched.
    """

    waits: tuple[str, ...]
    waits_beside: tuple[str, ...]
    peak_before: int
    peak: int
    allocated: int
    reserved: int
    pinned: int
    resident: int


@contextmanager
def watched() -> Iterator[list[Watched]]:
    """The steps of the run in here, by `Trainer.train_step`."""
    import pretended_device

    from toolkit.training.trainer import Trainer

    steps: list[Watched] = []
    waits: list[tuple[bool, str]] = []
    train_step = Trainer.train_step

    def step(trainer: Trainer, window: Any) -> Any:
        waits.clear()
        before = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = train_step(trainer, window)
        steps.append(_seen(waits, before))
        torch.cuda.reset_peak_memory_stats()
        return found

    pretended_device.call_on_wait(lambda *_: waits.append((_is_beside(), _place())))
    torch.cuda.reset_peak_memory_stats()
    try:
        with mock.patch.object(Trainer, "train_step", step):
            yield steps
    finally:
        pretended_device.call_on_wait(None)


def _seen(waits: list[tuple[bool, str]], peak_before: int) -> Watched:
    return Watched(
        tuple(sorted(place for is_beside, place in waits if not is_beside)),
        tuple(sorted(place for is_beside, place in waits if is_beside)),
        peak_before,
        torch.cuda.max_memory_allocated(),
        torch.cuda.memory_allocated(),
        torch.cuda.memory_reserved(),
        torch.cuda.host_memory_stats()["allocated_bytes.current"],
        int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
    )


def _is_beside() -> bool:
    """Whether this is a thread of the offload's worker or of files; autograd's are not Python's own."""
    thread = threading.current_thread()
    is_of_step = isinstance(thread, threading._DummyThread) or thread.name == "micro-batch"
    return thread is not threading.main_thread() and not is_of_step


def _place() -> str:
    """The innermost line of Python, but for this file, the pretended device and torch's own names of a wait."""
    aside = ("/tests/cuda/site/", "/torch/cuda/", __file__)
    frames = reversed(traceback.extract_stack())
    frame = next(each for each in frames if not any(part in each.filename for part in aside))
    return f"{Path(frame.filename).stem}.{frame.name}"
