"""Runs a function on N ranks over gloo, as a launcher would, and brings their results back.

Ranks are forked from a server process that has imported torch and transformers once: that import
costs seconds, a fork costs milliseconds. The server has run no parallel code before, so its children
start with clean thread pools.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

PRELOADED = [
    "toolkit.run.run",
    "toolkit.training.trainer",
    # What most runs import later on, where it is first used.
    "datasets.packaged_modules.generator.generator",
    "peft.tuners.lora.torchao",
    "torchao.optim",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
]
LIMIT_SECONDS = 2400.0
"""After which what a test waits for has failed: ten times what the longest takes on a quiet machine."""

_context = multiprocessing.get_context("forkserver")


def run_on_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, seconds: float = LIMIT_SECONDS) -> list[Any]:
    """`function(*args)` on every rank; the results in rank order.

    Args:
        function: a module-level function; its result must be picklable. The process group is made
            over a shared file before it is called; after a run that took it down, it calls `meet`.
            If the function is marked `alone`, it makes the group itself.
        seconds: time limit for all ranks together.

    Raises:
        AssertionError: with every failed rank's traceback, or naming the ranks that did not finish.
    """
    with TemporaryDirectory() as folder:
        pipes, processes = _start(function, num_ranks, folder, args)
        try:
            outcomes = _collect(pipes, processes, function.__qualname__, seconds)
        finally:
            _end(processes)
    failed = [f"--- rank {rank} ---\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    assert not failed, "\n".join(failed)
    return [result for _, result in outcomes]


@contextmanager
def started(function: Callable[..., Any], num_ranks: int, *args: Any) -> Iterator[list[Any]]:
    """The processes of `function(*args)` on every rank, for tests that do harm to them; ended at last."""
    with TemporaryDirectory() as folder:
        pipes, processes = _start(function, num_ranks, folder, args)
        try:
            yield processes
        finally:
            _end(processes)
            for pipe in pipes:
                pipe.close()


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function of `run_on_ranks` that makes the process group itself."""
    function.is_alone = True  # type: ignore[attr-defined]
    return function


def _start(
    function: Callable[..., Any], num_ranks: int, folder: str, args: Any, here: range | None = None
) -> tuple[list[Connection], list[Any]]:
    """Starts the ranks of this host; without `here` these are all."""
    _context.set_forkserver_preload(PRELOADED)
    pipes, processes = [], []
    for rank in here or range(num_ranks):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(target=_rank, args=(sender, rank, num_ranks, folder, function, args), daemon=False)
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    return pipes, processes


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.join(timeout=5)
        if process.is_alive():
            process.kill()
            process.join()


def meet() -> None:
    """Makes the process group of this rank's run, if the last run has taken it down.

    Over gloo, or the backends that `TEST_BACKEND` names.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    _meetings.append(len(_meetings))
    dist.init_process_group(
        os.environ.get("TEST_BACKEND", "gloo"),
        init_method=Path(os.environ["TEST_MEETING_FOLDER"], f"meeting-{len(_meetings)}").as_uri(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=600),  # ten times what the slowest rank compiles for
    )
    # A rank that ends its run at once would take its side down while others still connect.
    dist.barrier()


_meetings: list[int] = []


def _collect(pipes: list[Connection], processes: list[Any], name: str, seconds: float) -> list[tuple[bool, Any]]:
    """What each rank sent; of one that sent nothing, what was waited for and what it was doing."""
    outcomes: list[tuple[bool, Any]] = [(False, "")] * len(pipes)
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    begun = time.monotonic()
    deadline = begun + seconds
    while waiting and time.monotonic() < deadline:
        for ready in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            rank = waiting.pop(ready)  # type: ignore[arg-type]
            try:
                outcomes[rank] = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                outcomes[rank] = (False, "died without a word")
            if not outcomes[rank][0]:
                # The others may wait for the failed one forever; a launcher would end them now.
                deadline = min(deadline, time.monotonic() + 20)
    for rank in waiting.values():
        waited = time.monotonic() - begun
        outcomes[rank] = (False, f"{name} did not finish in {waited:.0f} s: {_doing(processes[rank].pid)}")
    return outcomes


def _doing(pid: int) -> str:
    """What tells a process that hangs from one that a busy machine has given little time."""
    try:
        process = psutil.Process(pid)
        return f"its process is {process.status()} after {process.cpu_times().user:.0f} s of CPU"
    except psutil.NoSuchProcess:
        return "its process is gone"


def _rank(sender: Connection, rank: int, num_ranks: int, folder: str, function: Callable[..., Any], args: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
        ACCELERATE_USE_CPU="true",
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        TEST_MEETING_FOLDER=folder,
    )
    gc.freeze()  # what the server has made is no garbage, and is not searched for it
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if not getattr(function, "is_alone", False):
            meet()
        result = function(*args)
        sender.send_bytes(pickle.dumps((True, result)))  # plain pickle: tensors travel as copies
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
