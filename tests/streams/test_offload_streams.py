"""No run with offload has a race between streams or threads; and each wait, hold and event of it is needed.

Runs of plain FSDP2, and of the toolkit without offload, are the control. `MUTATIONS` takes the waits, holds and events
of the offload engine away in turn, each in a run in which that is found.
"""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from streams.mutations import Mutation, mutated
from streams.runs import Run, races_of
from support.cases import cases
from support.offload_loops import Case
from support.ranks import alone, run_on_ranks

import toolkit.sharding.offload
from toolkit.sharding.fsdp2.fsdp import autograd_sums_gradients

EXECUTORS = {
    "cpu_torch": Run(),
    "cpu_fused": Run(executor="cpu_fused"),
    "device_stream": Run(executor="device_stream"),
    "resident": Run(device_state_gib=1.0),
    "some resident": Run(device_state_gib=0.0006),
}

UNCLIPPED = Case(max_norm=None)
BY_BLOCK = Case(accumulation=3, checkpointing=True)

EXPERTS = Case(tied=False, precision="no")

KEPT = "kept in float32"

WAYS = {
    "plain": Run(),
    "untied": Run(Case(tied=False)),
    "accumulation": Run(Case(accumulation=3)),
    "during backward": Run(UNCLIPPED, during_backward=True),
    "zero1": Run(Case(strategy="zero1", accumulation=2)),
    "zero2": Run(Case(strategy="zero2", accumulation=2)),
    "hybrid": Run(Case(strategy="hybrid", accumulation=2), num_ranks=4),
    "one rank": Run(Case(accumulation=2), num_ranks=1),
    "prefetch": Run(Case(prefetch=True, tied=False)),
    "checkpointing": Run(Case(checkpointing=True)),
    "checkpointing with prefetch": Run(Case(checkpointing=True, prefetch=True)),
    "offloaded inputs": Run(offload_inputs=True),
    "lora": Run(Case(lora=True)),
    "frozen": Run(Case(freeze="mlp")),
    "unused parameters": Run(Case(unused=True, accumulation=2)),
    "unused units": Run(Case(partly=True, accumulation=2, tied=False)),
    # torch 2.15 reduces several types itself, and refuses this case with offload.
    **({} if autograd_sums_gradients() else {KEPT: Run(Case(kept=True, tied=False))}),
    "two forwards": Run(Case(forwards=2, tied=False)),
    "float32": Run(Case(precision="no")),
    "evaluation": Run(also="evaluate"),
    "evaluation before the step": Run(UNCLIPPED, also="look"),
    "checkpoint": Run(also="save"),
    "optimizer's state": Run(also="read the optimizer"),
    "loaded model": Run(also="load the model"),
    "loaded optimizer": Run(also="load the optimizer"),
    "dropped gradients": Run(num_layers=1, also="discard"),
    "unshard": Run(num_ranks=1, also="unshard"),
    "by block": Run(BY_BLOCK, by_block=True),
    "by block, unclipped": Run(replace(BY_BLOCK, max_norm=None), during_backward=True, by_block=True, also="save"),
    "by block, prefetch": Run(replace(BY_BLOCK, prefetch=True, tied=False), by_block=True),
    "by block, offloaded inputs": Run(replace(BY_BLOCK, lora=True), by_block=True, offload_inputs=True),
    "by block, hybrid": Run(replace(BY_BLOCK, strategy="hybrid"), by_block=True, num_ranks=4),
    "slow worker": Run(delay=0.005),
    "inside nodes": Run(Case(accumulation=2, checkpointing=True), num_ranks=4, node=2),
    "averages": Run(also="average"),
    "experts": Run(EXPERTS, experts=2),
    "experts by block": Run(replace(EXPERTS, accumulation=3, checkpointing=True), experts=2, by_block=True),
    "shared rows": Run(Case(accumulation=2, checkpointing=True), sequence=2),
    "shared rows by block": Run(BY_BLOCK, sequence=2, by_block=True),
    "quantised base": Run(Case(lora=True, accumulation=2), quantised=True),
    "quantised base by block": Run(replace(BY_BLOCK, lora=True), quantised=True, by_block=True),
}

CONTROLS = {
    "plain FSDP2": Run(Case(tied=False), "plain"),
    "plain FSDP2, accumulation": Run(Case(accumulation=2), "plain"),
    "plain FSDP2, prefetch": Run(Case(prefetch=True, checkpointing=True), "plain"),
    "plain FSDP2, evaluation": Run(Case(evaluate=True), "plain"),
    "no offload": Run(Case(accumulation=2), None),
    "no offload, zero2": Run(Case(strategy="zero2", accumulation=2), None, also="look"),
    "no offload, hybrid": Run(Case(strategy="hybrid", accumulation=2), None, num_ranks=4),
    "no offload, offloaded inputs": Run(executor=None, offload_inputs=True, also="save"),
    "no offload, by block": Run(BY_BLOCK, None, by_block=True),
    "no offload, inside nodes": Run(Case(accumulation=2, checkpointing=True), None, num_ranks=4, node=2),
    "no offload, experts by block": Run(replace(EXPERTS, accumulation=3), None, experts=2, by_block=True),
    "no offload, shared rows by block": Run(BY_BLOCK, None, sequence=2, by_block=True),
    "no offload, quantised base": Run(Case(lora=True), None, quantised=True),
    "no offload, by block, prefetch": Run(replace(BY_BLOCK, prefetch=True), None, by_block=True, offload_inputs=True),
}

ALL = {
    f"{way}, {name}": replace(run, executor=by.executor, device_state_gib=by.device_state_gib)
    for way, run in WAYS.items()
    for name, by in EXECUTORS.items()
}

DEALT = [f"{way}, {list(EXECUTORS)[i % len(EXECUTORS)]}" for i, way in enumerate(WAYS)]
"""Each way with one executor; the others are slow."""

DEVICE_STREAM = EXECUTORS["device_stream"]
BY_NAME = {
    **ALL,
    **EXECUTORS,
    **WAYS,
    **CONTROLS,
    "device_stream, saved": replace(DEVICE_STREAM, also="save"),
    "checkpoint, no offload": replace(WAYS["checkpoint"], executor=None),
    "late": replace(Run(), delay=0.3),
}

MUTATIONS = [(BY_NAME[run], Mutation(*change)) for run, *change in cases(__file__)["MUTATIONS"]]


ORDERS_NOTHING = {
    "wait_for_landing(self._in_flight.popleft())": "bounds how many gradients wait on the device",
    "getattr(torch, device.type).synchronize()": "of the probe, for the clock",
    "started.wait()": "for the worker's number of threads",
}
"""Waits whose removal lets nothing race, and what they are for."""

WAIT = re.compile(
    r"\.(wait_event|wait_stream|synchronize|wait|wait_for_unshard|flush|_wait_for_weights|sent)\(\w*|published\.clear\(|^\s*wait_for_landing\("
    r"|\.leaving = (?!None)|\.close\(\)$|reduce_again_after\("
)


@alone
def found_in(runs: dict[str, tuple[Run, Mutation | None]]) -> dict[str, list[str]]:
    """The races of each run, in words."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    found = {}
    for name, (run, mutation) in runs.items():
        try:
            with mutated(mutation) if mutation is not None else nullcontext():
                races = races_of(run, mutation is not None)
                # Which of a mutation's races are met, and in which order, is up to the threads. On a busy machine a run
                # has met none once, of some hundred.
                if mutation is not None and not races:
                    races = races_of(run, True)
            found[name] = [f"{count} x {race}" for race, count in races.items()]
        except Exception as error:
            error.add_note(name)
            raise
    return found


def together(runs: dict[str, tuple[Run, Mutation | None]]) -> dict[str, list[str]]:
    (found,) = run_on_ranks(found_in, 1, runs)
    return found


CLEAN = {name: (run, None) for name, run in (CONTROLS | {name: ALL[name] for name in DEALT}).items()}
if KEPT in WAYS:
    # Shards that are not cast before the memory of their gather is there, which is when it waits for new weights.
    MUTATIONS.append(
        (
            WAYS[KEPT],
            Mutation(
                "fsdp_replaced._init_beside_rounded",
                "parameter.orig_dtype = ",
                "parameter.param_dtype, parameter.orig_dtype = parameter.orig_dtype, ",
            ),
        )
    )

CHANGED = {f"{mutation} ({run})": (run, mutation) for run, mutation in MUTATIONS}


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return together(CLEAN | CHANGED)


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_races(found: dict[str, list[str]], name: str) -> None:
    assert found[name] == []


@pytest.mark.parametrize("name", CHANGED)
def test_every_wait_hold_and_event_is_needed(found: dict[str, list[str]], name: str) -> None:
    assert found[name] != []


@pytest.mark.grid
def test_nothing_races_whichever_executor_steps() -> None:
    found = together({name: (run, None) for name, run in ALL.items()})
    assert {name: races for name, races in found.items() if races} == {}


@pytest.mark.first
def test_every_wait_in_the_source_has_a_mutation() -> None:
    """Or is known to order nothing."""
    taken = [mutation.old for _, mutation in MUTATIONS] + list(ORDERS_NOTHING)
    folder = Path(toolkit.sharding.offload.__file__).parent
    lines = [
        line.strip() for path in folder.glob("*.py") for line in path.read_text().splitlines() if WAIT.search(line)
    ]
    assert len(lines) > 15
    assert [line for line in lines if not any(part in line or line in part for part in taken)] == []
