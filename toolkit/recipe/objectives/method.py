"""A way of training an objective that `toolkit init` offers, with starting values from published recipes."""

from __future__ import annotations

import math
from dataclasses import dataclass

ANY_SIZE = math.inf


@dataclass(frozen=True)
class Rate:
    """A peak learning rate.

    Attributes:
        up_to: the most parameters of a model that it is for.
        source: the published recipe that it comes from.
    """

    up_to: float
    value: float
    source: str


@dataclass(frozen=True)
class Method:
    """A way to train: what is trained, on which rows, and at which rates.

    Attributes:
        about: describes it in a few words.
        rates: learning rates by size of the model, the smallest first.
        rows_per_step: rows of an optimizer step; not used by pretraining, whose samples are full.
        loss: `objective.loss` of preferences.
        adapter: whether LoRA adapters are trained instead of the model.
        quantized: whether the frozen model under them is held in 4 bits.
        smaller: the method that learns from the same rows in less memory.
        by_rows: its rank among the methods that the rows may choose if none is named, or None if it must be named.
        for_encoder_decoders: whether the rows may choose it for a model with an encoder and a decoder.
        layouts: the layouts that it learns from; empty: all of its objective's rows.
    """

    name: str
    about: str
    rates: tuple[Rate, ...]
    rows_per_step: int
    epochs: float
    loss: str | None = None
    adapter: bool = False
    quantized: bool = False
    smaller: str | None = None
    by_rows: int | None = None
    for_encoder_decoders: bool = False
    layouts: tuple[str, ...] = ()

    def takes(self, layout: str) -> bool:
        """Returns whether it learns from this layout of its objective's rows."""
        return not self.layouts or layout in self.layouts

    def rate(self, num_parameters: int) -> Rate:
        """Returns the learning rate for a model of this size."""
        return next(rate for rate in self.rates if num_parameters <= rate.up_to)
