"""Compares a model whose matrices are cut (`sharding.tensor`) with itself, whole, on a short row."""

from __future__ import annotations

import functools

import torch
from torch import nn

from toolkit.data.samples.samples import Samples
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.objectives.objective import Objective
from toolkit.run.checks.comparison import ROUNDED, Numbers, compared
from toolkit.run.checks.sequence_check import outputs_and_gradients
from toolkit.run.stages.part import RunPart
from toolkit.run.stages.stages import BuiltRun, MetaModel
from toolkit.sharding.fsdp2.fsdp import class_name
from toolkit.sharding.tensor.cut import cut_of, whole_layers
from toolkit.sharding.tensor.plan import tensor_plan

CUT_TOKENS = 128
"""Tokens of the row that is compared; every rank computes it whole once, a matrix at a time."""


class CutMatrices(RunPart):
    """Matrices that the ranks of a tensor group cut."""

    def on_meta(self, on_meta: MetaModel) -> None:
        if (size := self.recipe.sharding.tensor) > 1:
            tensor_plan(on_meta.model, size)  # refuses what cannot be cut, before any weight is read

    def check(self, run: BuiltRun) -> None:
        opened, size = self.opened, self.recipe.sharding.tensor
        compared = (run.inner, run.objective, run.data.train, opened.device, opened.in_16_bits)
        differ = check_tensor(*compared)
        if size > 1:
            by = "no row" if differ is None else f"a difference of {differ:.0e}"
            fact = f"cut by {size} ranks; checked: logits and gradients as of whole matrices ({by})"
            self.facts["matrices"] = fact


def check_tensor(
    model: nn.Module, objective: Objective, samples: Samples, device: torch.device, in_16_bits: bool
) -> float | None:
    """Compares logits, and gradients of the embeddings' outputs, of cut layers with those of whole ones.

    Every rank calls this, on the same samples. Gradients of parameters are not computed, so nothing is reduced.

    Returns:
        The largest difference of any rank, as a share of the largest number, or None if there is nothing to compare.

    Raises:
        BadInputError: if it is more than `ROUNDED`, or the model cannot run so.
    """
    cut, batch = cut_of(model), samples.few(CUT_TOKENS)
    if cut is None or batch is None:
        return None
    # Not of documents: a head's loss has a part of the vocabulary even where layers are whole.
    run = functools.partial(outputs_and_gradients, model, objective, batch, device, with_documents=False)

    def whole() -> Numbers:
        with whole_layers(cut):
            return run()

    outcome = compared(model, whole, run)
    if problem := outcome.problem(ROUNDED[in_16_bits], "whole matrices"):
        raise BadInputError(
            f"sharding.tensor: {class_name(base_of(model))} does not compute the same with matrices that ranks cut "
            f"({problem}); remove it"
        )
    return outcome.difference
