"""Compares a model whose matrices are cut (`sharding.tensor`) with itself, whole, on a short row."""

from __future__ import annotations

import torch
from torch import nn

from toolkit import ranks
from toolkit.checkpoint.export import relative_difference
from toolkit.data.samples.samples import Samples
from toolkit.errors import BadInputError, first_line
from toolkit.model.adapters.adapters import base_of
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.objectives.objective import Objective
from toolkit.run.checks.sequence_check import TOLERANCE, outputs_and_gradients
from toolkit.sharding.fsdp2.fsdp import class_name
from toolkit.sharding.tensor.cut import cut_of, whole_layers

CHECKED_TOKENS = 128
"""Tokens of the row that is compared; every rank computes it whole once, a matrix at a time."""


def check_tensor(
    model: nn.Module, inner: nn.Module, objective: Objective, samples: Samples, device: torch.device, in_16_bits: bool
) -> float | None:
    """Compares logits, and gradients of the embeddings' outputs, of cut layers with those of whole ones.

    Every rank calls this, on the same samples. Gradients of parameters are not computed, so nothing is reduced.

    Args:
        inner: the model without its wrappers.

    Returns:
        The largest difference of any rank, as a share of the largest number, or None if there is nothing to compare.

    Raises:
        BadInputError: if it is more than `TOLERANCE`, or the model cannot run so.
    """
    cut, batch = cut_of(inner), samples.few(CHECKED_TOKENS)
    if cut is None or batch is None:
        return None
    differences, problem = {}, ""
    try:
        with without_dropout(model):
            # Not of documents: a head's loss has a part of the vocabulary even where layers are whole.
            found = outputs_and_gradients(model, inner, objective, batch, device, with_documents=False)
            with whole_layers(cut):
                whole = outputs_and_gradients(model, inner, objective, batch, device, with_documents=False)
        differences = {name: relative_difference(found[name], same) for name, same in whole.items()}
    except Exception as error:  # the code of a model may do anything with some of its heads
        problem = f"{type(error).__name__}: {first_line(error)}"
    outcomes = ranks.gather_objects((differences, problem))
    problem = next((problem for _, problem in outcomes if problem), "")
    worst = max(max(of_rank.values(), default=0.0) for of_rank, _ in outcomes)
    if not problem and worst > TOLERANCE[in_16_bits]:
        problem = f"its logits or gradients differ by {worst:.1e} of the largest from those of whole matrices"
    if problem:
        raise BadInputError(
            f"sharding.tensor: {class_name(base_of(inner))} does not compute the same with matrices that ranks cut "
            f"({problem}); remove it"
        )
    return worst
