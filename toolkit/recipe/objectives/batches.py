"""The names, shapes and types of a micro-batch's tensors. Each objective has a list in its own file.

`data/samples/samples.py` makes these tensors and `planning/workload/workload.py` plans with empty ones; a test
compares the data with the lists.

Dimensions: B samples, T tokens of a sample, U tokens of a target, R rows (pairs, or judged completions) in all samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

KL_PREFIX = "kl_"
"""Key prefix of the mismatched (KL) completions in a KTO batch: prompts with completions of other rows."""


@dataclass(frozen=True)
class Field:
    """A tensor of a batch.

    Attributes:
        shape: its dimensions by letter, such as `BT`; a digit is a fixed size.
        dtype: the name of torch's dtype.
        optional: whether a batch may lack it.
    """

    shape: str
    dtype: Literal["int64", "float32", "bool"] = "int64"
    optional: bool = False

    def sizes(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape in numbers, given the size of each letter."""
        return tuple(int(dim) if dim.isdigit() else dims[dim] for dim in self.shape)


BatchSpec = Mapping[str, Field]

TEXT: BatchSpec = {
    "input_ids": Field("BT"),
    "labels": Field("BT"),  # aligned with input_ids; -100 for what is not learned
    "position_ids": Field("BT"),  # restart with each document of a sample
    "lengths": Field("B"),  # tokens without padding
}

TOLD_APART: BatchSpec = {
    **TEXT,
    "sources": Field("BT", optional=True),  # number of the named source that a token's row is of; -1 for none
}

COMPLETIONS: BatchSpec = {
    **TEXT,
    "segments": Field("BT"),  # the completion that a token is of, counted over the batch; -1 for padding
}

PAIRS: BatchSpec = {
    **COMPLETIONS,  # of pair p, segment 2 p is the chosen completion and 2 p + 1 the rejected one
    "reference": Field("R2", "float32"),  # log-probabilities of both completions by the reference; NaN: not known
}

PADDED_TEXT: BatchSpec = {
    "input_ids": Field("BT"),
    "attention_mask": Field("BT"),  # 0 for padding
    "token_type_ids": Field("BT", optional=True),  # 1 for the second text of a pair; left out if all are 0
    "lengths": Field("B"),
}
