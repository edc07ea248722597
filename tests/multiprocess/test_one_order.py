"""All ranks call the collectives of a step in one order, however slow one of them is. NCCL hangs where they don't.

A rank notes every collective of every thread. Two ranks that share communicators have to have called the same on these,
in the same order: across communicators too, as those of one device share its network.
"""

from __future__ import annotations

import functools
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.backend import close
from support.offload_loops import Case, learning_rate, loss_of, prepare, train
from support.ranks import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.sharding import OffloadSettings
from toolkit.sharding.blocks.by_block import ByBlock

RANKS = 4

Call = tuple[tuple[int, ...], str, tuple[int, ...]]
"""The communicator's ranks, the operator, and the shape of its first tensor."""


@dataclass(frozen=True)
class Run:
    case: Case
    executor: str | None = None
    by_block: bool = False


RUNS = {
    f"{strategy}, {executor or 'no offload'}, {'by block' if by_block else 'by micro-batch'}": Run(
        Case(accumulation=3, checkpointing=True, tied=False, strategy=strategy, prefetch=not by_block),
        executor,
        by_block,
    )
    for strategy in ("zero1", "zero3", "hybrid")
    for executor in (None, "cpu_torch")
    for by_block in (False, True)
    if not (by_block and strategy == "zero1")
}


class Noted(TorchDispatchMode):
    """Notes this thread's collectives; `late` ones begin after a moment."""

    def __init__(self, calls: list[Call], late: random.Random | None) -> None:
        super().__init__()
        self._calls, self._late = calls, late

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional") and "wait" not in function._schema.name:
            if self._late is not None:
                time.sleep(self._late.random() * 0.01)
            name = function._schema.name
            self._calls.append((_members(args, kwargs), name, tuple(_first_tensor((args, kwargs)).shape)))
        return function(*args, **(kwargs or {}))


def _members(args: Any, kwargs: Any) -> tuple[int, ...]:
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
        if isinstance(value, str) and value not in ("sum", "avg", "max", "min"):
            return tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(value)))
    raise AssertionError("a collective without a group")


def _first_tensor(values: Any) -> torch.Tensor:
    return next(leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))


@contextmanager
def noted(is_late: bool) -> Iterator[list[Call]]:
    """The collectives of all threads that run in here."""
    calls: list[Call] = []
    late = random.Random(7) if is_late else None
    run = threading.Thread.run

    def watched(thread: threading.Thread) -> None:
        with Noted(calls, late):
            run(thread)

    with mock.patch.object(threading.Thread, "run", watched), Noted(calls, late):
        yield calls


def calls_of(run: Run, slow: int) -> list[Call]:
    """What this rank calls in a run; `slow` is late at each."""
    offload: Any = "none" if run.executor is None else OffloadSettings(run.executor)  # type: ignore[arg-type]
    accelerator, model, optimizer = prepare(run.case, offload)
    with noted(dist.get_rank() == slow) as calls:
        if not run.by_block:
            train(run.case, accelerator, model, optimizer, range(2))
        else:
            runner = ByBlock(model, accelerator.state.fsdp_plugin.unit_plan)
            for step in range(2):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(run.case, step)
                forwards = [functools.partial(loss_of, model, run.case, step, micro) for micro in range(3)]
                accelerator.gradient_state._set_sync_gradients(True)
                runner.run(forwards, accelerator.backward)
                accelerator.clip_grad_norm_(model.parameters(), 0.8)
                optimizer.step()
                optimizer.zero_grad()
        close(accelerator)
    return calls


def all_calls() -> dict[str, list[Call]]:
    # Two hosts, as far as the replicas of hybrid with offload go.
    os.environ.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    return {name: calls_of(run, number % RANKS) for number, (name, run) in enumerate(RUNS.items())}


def disagreements(of_ranks: list[list[Call]]) -> list[str]:
    """Where two ranks differ on the communicators that they share."""
    found = []
    for first, second in combinations(range(len(of_ranks)), 2):
        shared = [[call for call in of_ranks[rank] if {first, second} <= {*call[0]}] for rank in (first, second)]
        for number, (one, other) in enumerate(zip(*shared, strict=False)):
            if one != other:
                found.append(f"ranks {first} and {second}, shared call {number}: {one} and {other}")
                break
        if len(shared[0]) != len(shared[1]):
            found.append(f"ranks {first} and {second}: {len(shared[0])} and {len(shared[1])} shared calls")
    return found


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, list[Call]]]:
    return run_on_ranks(all_calls, RANKS)


@pytest.mark.grid
@pytest.mark.parametrize("name", RUNS)
def test_ranks_call_collectives_in_one_order(of_ranks: list[dict[str, list[Call]]], name: str) -> None:
    assert len(of_ranks[0][name]) > 20
    if "hybrid" in name:
        assert {len(call[0]) for call in of_ranks[0][name]} >= {2}
    assert disagreements([calls[name] for calls in of_ranks]) == []


def test_another_order_is_found() -> None:
    a: Call = ((0, 1), "c10d::allreduce_", (3,))
    b: Call = ((0, 1, 2, 3), "c10d::_allgather_base_", (8,))
    other: Call = ((2, 3), "c10d::allreduce_", (3,))
    assert disagreements([[a, b], [a, b], [other, b], [other, b]]) == []
    assert disagreements([[a, b], [b, a], [b], [b]]) != []
    assert disagreements([[a, b], [a, b], [b], []]) != []
