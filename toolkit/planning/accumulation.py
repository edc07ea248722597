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


def obstacle_by_block(planner: Planner, setup: Setup) -> str:
    """Why micro-batches of a setup cannot run by block, or gain nothing by it; empty if they may."""
    if setup.accumulation == 1:
        return "a step has one micro-batch"
    if not setup.strategy.reshard_each_micro_batch:
        return f"{setup.strategy.name} gathers parameters once a step at most"
    if planner.recipe.objective.spec.encoder_decoder:
        return "an encoder-decoder does not run by block"
    if planner.workload.mixed_precision == "fp16":
        return "fp16 is not possible by block"
    return ""


def _obstacle(planner: Planner, setup: Setup) -> str:
    """The same for who did not ask for it."""
    if found := obstacle_by_block(planner, setup):
        return found
    # By block it is over the whole step: what is learned must not depend on the machine.
    if build_balance(planner.recipe.objective, planner.workload.model).losses.balance:
        return "the balance loss of experts would be over the whole step"
    return ""
