"""Resolves `sharding.accumulate: auto`: by block if that is possible, fits and sends less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from toolkit.objectives.losses.balance import build_balance
from toolkit.paths import GIB
from toolkit.planning.planner import Planner, PlanRow
from toolkit.planning.setup import Setup
from toolkit.sharding.blocks.checkpointing import Checkpointing


def settle(planner: Planner, setup: Setup, fits: Callable[[PlanRow], bool]) -> tuple[Setup, str]:
    """Returns the setup that `auto` runs, and the reason.

    Args:
        setup: the setup by micro-batch.
        fits: tells whether a device has room for a row.
    """
    if problem := _obstacle(planner, setup):
        return setup, problem
    every_block = Checkpointing(1, planner.recipe.sharding.offload_checkpoints)
    block = planner.row(replace(setup, by_block=True, checkpointing=every_block))
    if not fits(block):
        peak = f"{block.peak.total / GIB:.2g} GiB"
        return setup, f"with the inputs of all blocks of {setup.accumulation} micro-batches a rank would hold {peak}"
    before, after = planner.row(setup).traffic.sent, block.traffic.sent
    if after >= before:
        return setup, "by block a rank would send as much"
    return block.setup, f"a rank sends {after / GIB:.2g} GiB a step instead of {before / GIB:.2g} GiB"


def _obstacle(planner: Planner, setup: Setup) -> str:
    """Returns why a setup cannot run by block, or should not unless the user asks; empty if it may."""
    if found := planner.refusals(replace(setup, by_block=True, checkpointing=Checkpointing(1))):
        return found[0].problem
    # By block the balance loss covers the whole step: what is learned must not depend on the machine.
    if build_balance(planner.recipe.objective, planner.workload.model).coefficient:
        return "the balance loss of experts would be over the whole step"
    return ""
