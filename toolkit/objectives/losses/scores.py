"""The scores that a linear head `score` gives each token, and the last tokens of texts, which other ranks may hold."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from toolkit.data.samples.samples import Batch
from toolkit.model.adapters.adapters import base_of
from toolkit.objectives.losses.replaced import own_forward, replaced
from toolkit.sharding.parallel.sequence_parallel import summed_over_group


def scores_of_tokens(model: nn.Module, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Runs `forward` with a model that returns the scores of every token, (B, T, C), and returns its result."""
    base = base_of(model.module if isinstance(model, DistributedDataParallel) else model)
    original = own_forward(base)
    found: list[torch.Tensor] = []
    thread = threading.get_ident()

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> SequenceClassifierOutputWithPast:
        original(*args, **kwargs)  # its result has the score of each row's last token only
        return SequenceClassifierOutputWithPast(logits=found.pop())

    def keep(_module: Any, _args: Any, scores: torch.Tensor) -> None:
        if threading.get_ident() == thread:  # other micro-batches that run by block call this too
            found.append(scores)

    # Registered last, so that it sees what the hooks of FSDP2 have seen.
    hook = base.score.register_forward_hook(keep)
    try:
        with replaced(base, run):
            return forward()
    finally:
        hook.remove()


def places_of(rows: torch.Tensor, tokens: torch.Tensor, batch: Batch) -> Batch:
    """Finds tokens of whole rows among this rank's tokens, on the host.

    Args:
        rows: numbers of rows in the micro-batch, (D,).
        tokens: numbers of tokens in these rows, (D,).

    Returns:
        `ends`, numbers of the tokens in the micro-batch, int64, and `here`, whether this rank holds them, each (D,).
    """
    length = batch["input_ids"].shape[1]
    own = tokens - length * int(batch.get("part", 0))
    here = (own >= 0) & (own < length)
    return {"ends": (rows * length + own).masked_fill(~here, 0), "here": here}


def any_places(count: int, batch: Batch) -> Batch:
    """Returns stand-ins for `places_of` in a trace without values, each (count,)."""
    device = batch["input_ids"].device
    ends = torch.zeros(count, dtype=torch.long, device=device)
    return {"ends": ends, "here": torch.ones_like(ends, dtype=torch.bool)}


def at_places(scores: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Returns the scores of the tokens that `places_of` found, (D, C), float32, on every rank that shares their rows.

    Args:
        scores: of every token, (B, T, C).
    """
    # Filled, not multiplied by 0, which would let a NaN through.
    found = scores.flatten(0, 1).index_select(0, batch["ends"]).float().masked_fill(~batch["here"][:, None], 0.0)
    return summed_over_group(found) if "whole_positions" in batch else found
