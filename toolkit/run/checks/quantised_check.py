"""Checks before the first step that a quantised model computes the same as with dequantised weights."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

from toolkit import ranks
from toolkit.checkpoint.export import relative_difference
from toolkit.data.samples.samples import Samples
from toolkit.errors import BadInputError, first_line
from toolkit.model.adapters.adapters import base_of
from toolkit.model.quantised.quantised import quantised_layers, weights_as_numbers
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.objectives.objective import Objective
from toolkit.run.checks.checked_forward import logits_of, on_text_alone
from toolkit.sharding.fsdp2.fsdp import class_name

CHECKED_TOKENS = 512
"""Tokens of the first row that are compared."""

TOLERANCE = 1e-5
"""Largest difference of logits, as a share of the largest. Kernels and shapes are the same, so it is 0 if no code
reads the bytes of a layer."""


@torch.no_grad()
def check_quantised(
    accelerator: Accelerator, dtype: str, model: nn.Module, objective: Objective, samples: Samples
) -> None:
    """Compares logits of a row with those of a model whose layers have dequantised weights. All ranks call it.

    The code of a model may read a layer's weight instead of calling the layer: its type, or its values. In a
    quantised layer it would find bytes.

    Raises:
        BadInputError: if logits differ, or the quantised model fails and the other one does not.
    """
    inner = accelerator.unwrap_model(model)
    few = samples.few(CHECKED_TOKENS) if any(quantised_layers(inner)) else None
    if few is None:
        return
    batch, problem = objective.on_host(few), ""
    with without_dropout(model):
        with (
            weights_as_numbers(inner, _compute_dtype(accelerator, dtype)) as read,
            on_text_alone(inner, samples.has_images),
        ):
            numbers = logits_of(model, objective, batch, accelerator.device).float()
        try:
            found = logits_of(model, objective, batch, accelerator.device).float()
            difference = relative_difference(found, numbers)
            if difference > TOLERANCE:
                problem = f"logits differ by {difference:.1e} of the largest from those of the same weights as numbers"
        except Exception as error:  # the code of a model may do anything with bytes
            if not read:
                raise
            problem = f"{type(error).__name__}: {first_line(error)}"
    if problem := next((of_rank for of_rank in ranks.gather_objects(problem) if of_rank), ""):
        named = f" The code reads the weights of {', '.join(sorted(read)[:4])}." if read else ""
        raise BadInputError(
            f"adapter.quantize: {class_name(base_of(inner))} does not compute with quantised layers ({problem}).{named}"
            " Set adapter.quantize=none, or quantise a model of another type"
        )


def _compute_dtype(accelerator: Accelerator, dtype: str) -> torch.dtype:
    names = {"bf16": torch.bfloat16, "fp16": torch.float16}
    own: torch.dtype = getattr(torch, dtype)
    return names.get(accelerator.mixed_precision, own)
