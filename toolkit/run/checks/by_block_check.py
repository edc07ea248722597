"""Checks before the first step that micro-batches that run by block do not change each other in this model."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.run.checks.comparison import SAME, Numbers, compared
from toolkit.run.stages.part import RunPart
from toolkit.run.stages.stages import BuiltRun
from toolkit.sharding.blocks.by_block import ByBlock
from toolkit.sharding.fsdp2.fsdp import class_name

TOKENS = 16
"""Tokens of each micro-batch of the check."""

NAMES = ("logits of the first micro-batch", "logits of the second micro-batch")


class Accumulated(RunPart):
    """The order in which the micro-batches of a step run (`sharding.accumulate`)."""

    def check(self, run: BuiltRun) -> None:
        """Makes what runs them by block, if the recipe asks for it. Collective.

        Raises:
            BadInputError: if the model cannot run so.
        """
        if not run.planned.by_block:
            return
        sharded, unit_plan = run.sharded, self.opened.plugin.unit_plan
        assert unit_plan is not None  # strategies that have none are refused
        sharded.by_block = by_block = ByBlock(run.model, unit_plan)
        check_forwards(run.model, by_block, self.opened.device, self.opened.in_16_bits)
        self.facts["accumulate"] = "by block: a step gathers each unit twice and reduces it once"


def check_forwards(model: nn.Module, by_block: ByBlock, device: torch.device, in_16_bits: bool) -> None:
    """Compares the logits of two micro-batches that go through the blocks together with those of each alone.

    A value that a model passes from block to block in an attribute or a global would be the other micro-batch's. Every
    rank calls this.

    Raises:
        BadInputError: if they differ, or the model cannot run so.
    """
    # The embeddings have rows even if the configuration has no vocabulary size.
    rows = int(base_of(model).get_input_embeddings().weight.shape[0])
    ids = torch.arange(2 * TOKENS, device=device).view(2, 1, TOKENS) * 7 % rows
    forwards = [functools.partial(_logits, model, of_batch) for of_batch in ids]

    @torch.no_grad()
    def each_alone() -> Numbers:
        return dict(zip(NAMES, (forward() for forward in forwards), strict=True))

    def together() -> Numbers:
        return dict(zip(NAMES, by_block.evaluate(forwards), strict=True))

    outcome = compared(model, each_alone, together)
    if problem := outcome.problem(SAME[in_16_bits], "a forward by itself"):
        raise BadInputError(
            f"sharding.accumulate: by_block cannot run {class_name(base_of(model))}: its blocks pass state other "
            f"than by arguments and outputs ({problem}). Set sharding.accumulate=by_micro_batch"
        )


def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits: Any = model(input_ids=ids, use_cache=False).logits  # as training does: a cache can lack what blocks keep
    return logits.float()  # type: ignore[no-any-return]
