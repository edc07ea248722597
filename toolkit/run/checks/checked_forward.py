"""A forward of a check before the first step: its logits, and what its errors mean."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from accelerate.utils import send_to_device
from torch import nn

from toolkit.data.samples.samples import Batch
from toolkit.errors import BadInputError, ToolkitError, in_words, is_lost_peer
from toolkit.model.adapters.adapters import base_of
from toolkit.model.structure.model_parts import needs_more_than_text, sees
from toolkit.objectives.objective import Objective
from toolkit.sharding.fsdp2.fsdp import class_name, run_while_sharded


def logits_of(model: nn.Module, objective: Objective, batch: Batch, device: torch.device) -> torch.Tensor:
    """Returns the logits of a batch, (B, T, V) or (B, C), in the type of compute.

    Raises:
        BadInputError: if the model runs a block without calling it, so that FSDP2 does not gather its weights.
    """
    try:
        return objective.logits(model, send_to_device(batch, device))
    except Exception as error:
        block = run_while_sharded(error) if is_the_models(error) else None
        if block is None:
            raise
        raise BadInputError(
            f"sharding.strategy: {class_name(block)} is run by its forward and not by a call, so that no hook of FSDP2 "
            "gathers its weights; set sharding.strategy=ddp"
        ) from error


@contextlib.contextmanager
def on_text_alone(inner: nn.Module, has_images: bool = False) -> Iterator[None]:
    """Turns an error of a forward on text rows into: this model needs more than text.

    Surrounds nothing but such a forward, without parts, packed samples and quantised layers, so that an error is the
    model's. Models that read text alone, and rows with images, raise what they raise.

    Args:
        inner: the model without its wrappers.
        has_images: whether rows may have images.

    Raises:
        BadInputError: in place of what the forward raised.
    """
    try:
        yield
    except Exception as error:
        if not sees(base_of(inner)) or has_images or not is_the_models(error):
            raise
        model_of_recipe = f"model.name_or_path: {class_name(base_of(inner))}"
        raise needs_more_than_text(model_of_recipe, f" ({in_words(error)})") from error


def is_the_models(error: Exception) -> bool:
    """Returns whether an error may come from a model's code: not one of ours, of memory, of a device, or of a peer."""
    others = (ToolkitError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
    return not isinstance(error, others) and "allocate memory" not in str(error) and not is_lost_peer(error)
