"""Rows that ranks share (`sharding.sequence`): who has which part, and the check that no token notices."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from toolkit import ranks
from toolkit.checkpoint.export import relative_difference
from toolkit.data.cut import Part
from toolkit.data.samples import Batch, TextSamples, sample_of, stack
from toolkit.errors import BadInputError, first_line
from toolkit.model.adapters import base_of
from toolkit.model.attention import attention_of
from toolkit.model.attention_by_heads import attend_by_heads, require_sequence
from toolkit.objectives.objective import Objective
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.fsdp import class_name
from toolkit.sharding.sequence import form_groups

CHECKED_TOKENS = 1024
"""Of the row that is compared, which every rank has whole once."""

TOLERANCE = {False: 1e-4, True: 5e-2}
"""By whether compute is in 16 bits: the largest difference of logits, as a share of the largest one."""


def part_of(accelerator: Accelerator, recipe: Recipe) -> tuple[int, int, Part]:
    """The number of this rank's group, how many groups there are, and this rank's part of its rows."""
    size = recipe.sharding.sequence
    return (
        accelerator.process_index // size,
        accelerator.num_processes // size,
        Part(accelerator.process_index % size, size),
    )


def share_rows(recipe: Recipe, model: PreTrainedModel) -> None:
    """Forms the groups of ranks that share rows, if the recipe asks for them, and has attention go by heads.

    Raises:
        BadInputError: where the groups do not fill the ranks, or the model cannot be shared so.
    """
    size = recipe.sharding.sequence
    form_groups(size)
    if size > 1:
        require_sequence(model, size, recipe.data.max_length)
        attend_by_heads(model)


@torch.no_grad()
def check_parts(
    model: nn.Module,
    inner: nn.Module,
    objective: Objective,
    samples: TextSamples,
    part: Part,
    device: torch.device,
    in_16_bits: bool,
) -> float | None:
    """Compares the logits of parts of a row with those of the row whole. Every rank calls this, on the same samples.

    Args:
        inner: the model without what wraps it, for its name.

    Returns:
        The largest difference of any rank, as a share of the largest logit; None where rows are not shared.

    Raises:
        BadInputError: where it is more than `TOLERANCE`, or the model cannot run on parts of rows.
    """
    if part.count == 1:
        return None
    batch, was_training = _few_tokens(samples), model.training
    # Dropout would make any two forwards differ.
    model.eval()
    whole = _logits(model, objective, batch, device)
    found, problem = 0.0, ""
    try:
        mine = _logits(model, objective, part.of(batch), device)
        same = whole[:, part.index * mine.shape[1] :][:, : mine.shape[1]]
        found = relative_difference(mine[:, : same.shape[1]], same) if same.numel() else 0.0
    except Exception as error:  # the code of a model may do anything with half a row
        problem = f"{type(error).__name__}: {first_line(error)}"
    model.train(was_training)
    outcomes = ranks.gather_objects((found, problem))
    problem = next((told for _, told in outcomes if told), "")
    # Kept as it is where it is not a number, which the first step will say.
    worst = max((difference for difference, _ in outcomes), default=0.0)
    if not problem and worst > TOLERANCE[in_16_bits]:
        problem = f"logits differ by {worst:.1e} of the largest from those of whole rows"
    if problem:
        raise BadInputError(
            f"sharding.sequence: {class_name(base_of(inner))} with attention {attention_of(inner)!r} mixes the tokens "
            f"of a row elsewhere than in attention that can be shared ({problem}); remove sharding.sequence"
        )
    return worst


def _few_tokens(samples: TextSamples) -> Batch:
    """A row of few tokens; of two documents, neither of which ends with a part, where documents share rows."""
    ids = [token for document in samples.documents(0) for token in document][:CHECKED_TOKENS]
    cut = len(ids) // 3 if samples.packed else 0
    pieces = [piece for piece in (ids[:cut], ids[cut:]) if piece]
    return stack([sample_of([(piece, [True] * len(piece)) for piece in pieces], len(ids), samples.pad_id)])


def _logits(model: nn.Module, objective: Objective, batch: Batch, device: torch.device) -> torch.Tensor:
    moved = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in objective.on_host(batch).items()
    }
    return objective.logits(model, moved).float()
