"""Checks before the first step that a quantised model computes the same as with dequantised weights."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

from toolkit.data.samples.samples import Samples
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.model.quantised.quantised import quantised_fact, quantised_layers, weights_as_numbers
from toolkit.objectives.objective import Objective
from toolkit.run.checks.comparison import SAME, Numbers, compared, logits_of, on_text_alone
from toolkit.run.stages.part import RunPart
from toolkit.run.stages.stages import BuiltRun
from toolkit.sharding.fsdp2.fsdp import class_name

QUANTISED_TOKENS = 512
"""Tokens of the first row that are compared."""


class QuantisedBase(RunPart):
    """A base of 4 bits under adapters."""

    def check(self, run: BuiltRun) -> None:
        check_quantised(self.opened.accelerator, self.recipe.model.dtype, run.inner, run.objective, run.data.train)
        self.facts["quantised"] = quantised_fact(run.inner) or ""


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
    few = samples.few(QUANTISED_TOKENS) if any(quantised_layers(model)) else None
    if few is None:
        return
    batch, read = objective.on_host(few), set[str]()

    def logits() -> Numbers:
        return {"logits": logits_of(model, objective, batch, accelerator.device).float()}

    def of_numbers() -> Numbers:
        dtype_of_compute = _compute_dtype(accelerator, dtype)
        with weights_as_numbers(model, dtype_of_compute) as names, on_text_alone(model, samples.has_images):
            found = logits()
        read.update(names)
        return found

    outcome = compared(model, of_numbers, logits)
    if problem := outcome.problem(SAME[False], "the same weights as numbers"):
        named = f" The code reads the weights of {', '.join(sorted(read)[:4])}." if read else ""
        raise BadInputError(
            f"adapter.quantize: {class_name(base_of(model))} does not compute with quantised layers ({problem}).{named}"
            " Set adapter.quantize=none, or quantise a model of another type"
        )


def _compute_dtype(accelerator: Accelerator, dtype: str) -> torch.dtype:
    names = {"bf16": torch.bfloat16, "fp16": torch.float16}
    own: torch.dtype = getattr(torch, dtype)
    return names.get(accelerator.mixed_precision, own)
