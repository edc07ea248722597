"""The strategies as data: what is sharded, and when gradients are reduced.

ZeRO (arXiv 1910.02054) shards optimizer state (stage 1), then gradients (2), then parameters (3).
On FSDP2 the three differ inside the accumulation window; between optimizer steps all of them hold
parameters, gradients and optimizer state sharded.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.errors import BadInputError


@dataclass(frozen=True)
class Strategy:
    """One word of the strategy table.

    Attributes:
        name: the word itself.
        sharded: False for `ddp`, which leaves the model whole to torch's DistributedDataParallel.
        reduce_each_micro_batch: reduce-scatter after every micro-batch (ZeRO-2 and 3) or once per
            optimizer step (ZeRO-1).
        reshard_each_micro_batch: free the gathered parameters after each unit's forward and backward
            (ZeRO-3) or keep them over the accumulation window (ZeRO-1 and 2).
        replicated: the mesh is replicate x shard; gradients are all-reduced over the replicas.
    """

    name: str
    sharded: bool
    reduce_each_micro_batch: bool
    reshard_each_micro_batch: bool
    replicated: bool
    summary: str


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("ddp", False, False, False, True, "nothing is sharded; torch's DistributedDataParallel"),
        Strategy("zero3", True, True, True, False, "parameters, gradients and optimizer state are sharded"),
    )
}

ALIASES = {"full_shard": "zero3", "no_shard": "ddp"}
"""Stock FSDP words, so that an existing Accelerate config keeps its meaning."""

DEFAULT_STRATEGY = "zero3"


def parse_strategy(text: str, origin: str) -> Strategy:
    """The strategy of a word, in any case.

    Args:
        text: a strategy's word or a stock FSDP alias.
        origin: the place that holds the word, for the error.

    Raises:
        BadInputError: with the known words.
    """
    word = text.strip().lower()
    word = ALIASES.get(word, word)
    if word not in STRATEGIES:
        raise BadInputError(f"{origin}: unknown strategy {text!r}; allowed: {', '.join(STRATEGIES)}")
    return STRATEGIES[word]
