"""Activation checkpointing of the blocks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from toolkit.errors import BadInputError
from toolkit.sharding.fsdp2.fsdp import class_name
from toolkit.sharding.parallel.sequence_parallel import for_second_forward
from toolkit.sharding.plan.unit_plan import UnitPlan


@dataclass(frozen=True)
class Checkpointing:
    """Settings of activation checkpointing of the blocks (Chen et al., arXiv 1604.06174).

    Attributes:
        every: checkpoints every n-th block; 1 checkpoints all of them.
        offload: whether to keep the checkpointed inputs in host memory.
    """

    every: int
    offload: bool = False


def checkpoint_blocks(model: nn.Module, plan: UnitPlan, checkpointing: Checkpointing) -> None:
    """Makes blocks keep only their inputs and recompute their forward in backward, with the same random numbers.

    The forward itself is wrapped, below FSDP2's hooks. So the unit's parameters are gathered once for the second
    forward and the backward, and no parameter changes its name.
    """
    paths = [path for unit in plan.blocks for path in unit.modules]
    for path in paths[:: checkpointing.every]:
        block = model.get_submodule(path)
        block.forward = _checkpointed_forward(block, checkpointing.offload)
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.use_cache = False  # the second forward would append to the cache again


def _require_no_cache(block: nn.Module, given: Iterable[Any]) -> None:
    """Raises BadInputError if the model fills a cache although it is off: the second forward would append to it."""
    if any(hasattr(value, "get_seq_length") for value in given):
        raise BadInputError(
            f"activation checkpointing: {class_name(block)} fills a cache although use_cache is off, and its second "
            "forward would append to it again; set sharding.activation_checkpointing to null"
        )


def _checkpointed_forward(block: nn.Module, offload: bool) -> Callable[..., Any]:
    forward = block.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        _require_no_cache(block, (*args, *kwargs.values()))
        pin = torch.cuda.is_available()
        with torch.autograd.graph.save_on_cpu(pin_memory=pin) if offload else contextlib.nullcontext():
            # Reentrant checkpoints give no gradients if no input needs one, as after frozen embeddings. Accelerate
            # 1.15 does not preserve the random state: with dropout 0.5 gradients were off by 0.0265 of 0.181.
            how = functools.partial(checkpoint, use_reentrant=False, context_fn=for_second_forward)
            return how(forward, *args, preserve_rng_state=True, **kwargs)

    return run
