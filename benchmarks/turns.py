"""Variants that take turns: each has ranks of its own, which wait while the others work.

Machines drift, so what counts is the ratio of a variant's time to its counterpart's in the same round,
and of these the median.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def join(rank: int, ranks: int, meeting: str) -> None:
    """Makes this process a rank over gloo, of one thread, as a launcher and `Accelerator` would find it."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)


@contextlib.contextmanager
def telling_errors(pipe: Connection) -> Iterator[None]:
    """Sends what ends a rank's work to the process that waits for it."""
    try:
        yield
    except BaseException as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}")


def start(work: Callable[..., None], variant: str, ranks: int, folder: str, *args: Any) -> list[Connection]:
    """Starts `work(pipe, variant, rank, ranks, meeting, *args)` on every rank; our ends of the pipes once all are up.

    Raises RuntimeError with a rank's words where it sends something else than "ready".
    """
    context = torch.multiprocessing.get_context("spawn")
    name = "".join(letter if letter.isalnum() else "-" for letter in variant)
    meeting = Path(folder, f"{name}-{len(list(Path(folder).iterdir()))}").as_uri()
    ends = []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        context.Process(target=work, args=(theirs, variant, rank, ranks, meeting, *args), daemon=True).start()
        theirs.close()
        ends.append(ours)
    for end in ends:
        try:
            word = end.recv()
        except EOFError:
            word = "a rank died without a word"
        if word != "ready":
            stop(ends)
            raise RuntimeError(word)
    return ends


def turn(ends: Sequence[Connection]) -> list[Any]:
    """One turn; what each rank measured."""
    for end in ends:
        end.send("go")
    return [end.recv() for end in ends]


def stop(ends: Sequence[Connection]) -> None:
    for end in ends:
        try:
            end.send("stop")
        except OSError:
            continue  # this rank is gone already


def take(ends: Mapping[str, Sequence[Connection]], rounds: int) -> dict[str, list[list[Any]]]:
    """Turns of every variant, `rounds` of them after one to warm up: for each turn what each rank measured.

    Every other round goes the other way round, so that none always comes after the same one.
    """
    found: dict[str, list[list[Any]]] = {variant: [] for variant in ends}
    for number in range(rounds + 1):
        for variant in ends if number % 2 else reversed(ends):
            found[variant].append(turn(ends[variant]))
    return {variant: every[1:] for variant, every in found.items()}


def end(ends: Sequence[Connection]) -> None:
    """Stops the ranks, and waits until their memory is free."""
    stop(ends)
    for pipe in ends:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()


def seconds(taken: Mapping[str, list[list[Any]]]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """CPU time of all ranks together, and the slowest rank's clock, of each turn that `take` returns, by variant."""
    cpu = {name: [sum(rank["cpu"] for rank in turn) for turn in found] for name, found in taken.items()}
    wall = {name: [max(rank["wall"] for rank in turn) for turn in found] for name, found in taken.items()}
    return cpu, wall


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the ratios round by round, and the medians of both."""
    found = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return {
        "ratio": round(statistics.median(found), 4),
        "low": round(found[len(found) // 4], 4),
        "high": round(found[-1 - len(found) // 4], 4),
        "ours": round(statistics.median(ours), 4),
        "theirs": round(statistics.median(theirs), 4),
    }
