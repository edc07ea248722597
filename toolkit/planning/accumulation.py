"""What `sharding.accumulate: auto` comes to: by block where that is possible, fits and is faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from toolkit.objectives.balance import build_balance
from toolkit.paths import GIB
from toolkit.planning.planner import AS_FAST, Planner, PlanRow
from toolkit.planning.setup import Setup
from toolkit.sharding.checkpointing import Checkpointing


def settle(planner: Planner, setup: Setup, fits: Callable[[PlanRow], bool]) -> tuple[Setup, str]:
    """The setup as it will run under `auto`, and why.

    Args:
        setup: by micro-batch.
        fits: whether a device has room for a row.
    """
    if problem := _obstacle(planner, setup):
        return setup, problem
    every_block = Checkpointing(1, planner.recipe.sharding.offload_checkpoints)
    block = planner.row(replace(setup, by_block=True, checkpointing=every_block))
    if not fits(block):
        peak = f"{block.peak.total / GIB:.2g} GiB"
        return setup, f"with the inputs of all blocks of {setup.accumulation} micro-batches a rank would hold {peak}"
    before, after = planner.row(setup).time.mid, block.time.mid
    times = f"{after:.2g} s a step instead of {before:.2g} s on {planner.hardware.name}"
    # Estimates: what is no faster by more than a hundredth stays as it is.
    return (block.setup, times) if after * AS_FAST < before else (setup, f"by block it would be {times}")


def _obstacle(planner: Planner, setup: Setup) -> str:
    """Why micro-batches of a setup cannot run by block, or should not unless it is asked for; empty if they may."""
    if found := planner.refusals(replace(setup, by_block=True, checkpointing=Checkpointing(1))):
        return found[0].problem
    # By block it is over the whole step: what is learned must not depend on the machine.
    if build_balance(planner.recipe.objective, planner.workload.model).losses.balance:
        return "the balance loss of experts would be over the whole step"
    return ""
