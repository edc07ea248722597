"""One comparison of two forwards before the first step: two arrangements of a run must give the same numbers.

A check is the two arrangements and a sentence for the case that they differ, or that the second cannot run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from accelerate.utils import send_to_device
from torch import nn

from toolkit import ranks
from toolkit.checkpoint.export import relative_difference
from toolkit.data.samples.samples import Batch
from toolkit.errors import BadInputError, ToolkitError, in_words, is_lost_peer
from toolkit.model.adapters.adapters import base_of
from toolkit.model.structure.model_parts import needs_more_than_text, sees
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.objectives.objective import Objective
from toolkit.sharding.fsdp2.fsdp import class_name

SAME = {False: 1e-5, True: 1e-2}
"""The largest difference, as a share of the largest number, by whether compute is in 16 bits, where kernels and shapes
are the same. It is zero unless experts share a matrix product."""

ROUNDED = {False: 1e-4, True: 5e-2}
"""The same where shapes differ, and rounding with them."""


@dataclass(frozen=True)
class Outcome:
    """What a comparison found on any rank.

    Attributes:
        difference: the largest difference, as a share of the largest number; NaN is kept, as the first step reports it.
        name: what differs most.
        error: why the second arrangement cannot run, or "".
    """

    difference: float
    name: str
    error: str

    def problem(self, tolerance: float, other: str) -> str:
        """Returns what is wrong, or "" if the difference is within the tolerance."""
        if self.error or not self.difference > tolerance:
            return self.error
        return f"{self.name} differ by {self.difference:.1e} of the largest from those of {other}"


Numbers = Mapping[str, torch.Tensor]


def compared(model: nn.Module, expected: Callable[[], Numbers], found: Callable[[], Numbers]) -> Outcome:
    """Runs two arrangements of the same rows, without dropout, and compares their numbers by name. Collective.

    Values by token, (B, T, ...), of `found` may be padded. Errors of `expected` pass, and those of memory or a peer.
    """
    with without_dropout(model):
        whole = expected()
        differences, error = dict.fromkeys(whole, 0.0), ""
        try:
            for name, value in found().items():
                same = whole[name]
                differences[name] = relative_difference(value[:, : same.shape[1]], same) if same.numel() else 0.0
        except Exception as problem:  # the code of a model may do anything with what it gets
            if not isinstance(problem, BadInputError) and not is_the_models(problem):
                raise
            error = in_words(problem)
    outcomes = ranks.gather_objects((differences, error))
    worst = {name: max(of_rank[name] for of_rank, _ in outcomes) for name in whole}
    name = max(worst, key=lambda name: worst[name])
    return Outcome(worst[name], name, next((error for _, error in outcomes if error), ""))


def logits_of(model: nn.Module, objective: Objective, batch: Batch, device: torch.device) -> torch.Tensor:
    """Returns the logits of a batch, (B, T, V) or (B, C), in the type of compute.

    Raises:
        BadInputError: if the model runs a block without calling it, so that FSDP2 does not gather its weights.
    """
    try:
        return objective.logits(model, send_to_device(batch, device))
    except Exception as error:
        block = getattr(error, "ran_sharded", None) if is_the_models(error) else None
        if block is None:
            raise
        raise BadInputError(
            f"sharding.strategy: {class_name(block)} is run by its forward and not by a call, so that no hook of FSDP2 "
            "gathers its weights; set sharding.strategy=ddp"
        ) from error


@contextlib.contextmanager
def refused(text: str, kind: Callable[[str], BadInputError] = BadInputError) -> Iterator[None]:
    """Turns an error of a model's code inside the block into one of `kind`, made of the text with it as `{error}`.

    Raises:
        BadInputError: in place of what was raised.
    """
    try:
        yield
    except Exception as error:  # the code of a model may do anything with what it gets
        if not is_the_models(error):
            raise
        raise kind(text.replace("{error}", in_words(error))) from error


@contextlib.contextmanager
def on_text_alone(model: nn.Module, has_images: bool = False) -> Iterator[None]:
    """Turns an error of a forward on text rows into: this model needs more than text.

    Surrounds nothing but such a forward, without parts, packed samples and quantised layers, so that an error is the
    model's. Models that read text alone, and rows with images, raise what they raise.

    Args:
        model: the model without its wrappers.
        has_images: whether rows may have images.

    Raises:
        BadInputError: in place of what the forward raised.
    """
    try:
        yield
    except Exception as error:
        if not sees(base_of(model)) or has_images or not is_the_models(error):
            raise
        model_of_recipe = f"model.name_or_path: {class_name(base_of(model))}"
        raise needs_more_than_text(model_of_recipe, f" ({in_words(error)})") from error


def is_the_models(error: Exception) -> bool:
    """Returns whether an error may come from a model's code: not one of ours, of memory, of a device, or of a peer."""
    others = (ToolkitError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
    return not isinstance(error, others) and "allocate memory" not in str(error) and not is_lost_peer(error)
