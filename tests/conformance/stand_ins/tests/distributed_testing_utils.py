"""Stands in for a module of transformers' tests that its source package lacks: starts ranks over gloo.

It joins the package's other test modules, which are in a folder of the same name and without `__init__.py`.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch

_context = multiprocessing.get_context("forkserver")
_SECONDS = 600.0


def _get_distributed_backend() -> str:
    return "gloo"


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int) -> None:
    torch.set_num_threads(1)


def _start_rank_processes(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """Calls `function(rank, *args)` in a process of each rank, forked from one that has imported the suite."""
    _context.set_forkserver_preload(["in_place", *os.environ["CONFORMANCE_PRELOAD"].split()])
    ranks = [_context.Process(target=function, args=(rank, *args)) for rank in range(nprocs)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(_SECONDS)
        rank.kill()
        rank.join()
    failed = [f"rank {number} ended with {rank.exitcode}" for number, rank in enumerate(ranks) if rank.exitcode]
    if failed:
        raise RuntimeError(", ".join(failed))
