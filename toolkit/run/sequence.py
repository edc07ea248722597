"""Rows that ranks share (`sharding.sequence`) or run in chunks: who has which part, and that no token notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
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
from toolkit.sharding.chunks import chunks_of
from toolkit.sharding.fsdp import class_name, reshard_all
from toolkit.sharding.sequence import form_groups

CHECKED_TOKENS = 1024
"""Of the row that is compared, which every rank has whole once."""

TOLERANCE = {False: 1e-4, True: 5e-2}
"""By whether compute is in 16 bits: the largest difference of logits or gradients, as a share of the largest one."""


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


def check_parts(
    model: nn.Module,
    inner: nn.Module,
    objective: Objective,
    samples: TextSamples,
    part: Part,
    device: torch.device,
    in_16_bits: bool,
    chunked: bool = False,
) -> float | None:
    """Compares parts of a row, and chunks of it, with the row whole: logits, and gradients of what is embedded.

    Every rank calls this, on the same samples. Gradients of parameters are not made: nothing is reduced.

    Args:
        inner: the model without what wraps it, for its name.
        chunked: norms and MLPs run for a few tokens at a time.

    Returns:
        The largest difference of any rank, as a share of the largest number; None where there is nothing to compare.

    Raises:
        BadInputError: where it is more than `TOLERANCE`, or the model cannot run on parts of rows.
    """
    if part.count == 1 and not chunked:
        return None
    batch, was_training = _few_tokens(samples), model.training
    length = batch["input_ids"].shape[1]
    # Dropout would make any two forwards differ.
    model.eval()
    with chunks_of(length, inner):
        whole = _outcome(model, inner, objective, batch, device)
    differences, problem = dict.fromkeys(whole, 0.0), ""
    try:
        with chunks_of(max(1, length // part.count // 3), inner):
            mine = _outcome(model, inner, objective, part.of(batch), device)
        for name, found in mine.items():
            same = whole[name][:, part.index * found.shape[1] :][:, : found.shape[1]]
            differences[name] = relative_difference(found[:, : same.shape[1]], same) if same.numel() else 0.0
    except Exception as error:  # the code of a model may do anything with half a row
        problem = f"{type(error).__name__}: {first_line(error)}"
    model.train(was_training)
    outcomes = ranks.gather_objects((differences, problem))
    problem = next((told for _, told in outcomes if told), "")
    # Kept as it is where it is not a number, which the first step will say.
    worst = {name: max((of_rank[name] for of_rank, _ in outcomes), default=0.0) for name in whole}
    name = max(worst, key=lambda name: worst[name])
    if not problem and worst[name] > TOLERANCE[in_16_bits]:
        problem = f"{name} differ by {worst[name]:.1e} of the largest from those of whole rows"
    if problem:
        raise BadInputError(_mixes(inner, part, problem))
    return worst[name]


def _mixes(inner: nn.Module, part: Part, problem: str) -> str:
    field, place = "sharding.sequence", f"in attention that can be shared ({problem})"
    if part.count == 1:
        field, place = "sharding.chunk_tokens", f"in attention ({problem})"
    return (
        f"{field}: {class_name(base_of(inner))} with attention {attention_of(inner)!r} mixes the tokens "
        f"of a row elsewhere than {place}; remove {field}"
    )


def _few_tokens(samples: TextSamples) -> Batch:
    """A row of few tokens; of two documents, neither of which ends with a part, where documents share rows."""
    ids = [token for document in samples.documents(0) for token in document][:CHECKED_TOKENS]
    cut = len(ids) // 3 if samples.packed else 0
    pieces = [piece for piece in (ids[:cut], ids[cut:]) if piece]
    return stack([sample_of([(piece, [True] * len(piece)) for piece in pieces], len(ids), samples.pad_id)])


def _outcome(
    model: nn.Module, inner: nn.Module, objective: Objective, batch: Batch, device: torch.device
) -> dict[str, torch.Tensor]:
    """Logits (B, T, V), and the gradient (B, T, D) of half their squares to what the embeddings give."""
    moved = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in objective.on_host(batch).items()
    }
    embedded: list[torch.Tensor] = []

    def begin_here(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    embeddings: Any = base_of(inner).get_input_embeddings()
    handle = embeddings.register_forward_hook(begin_here)
    try:
        # DDP would wait for gradients of its parameters.
        with torch.enable_grad(), getattr(model, "no_sync", nullcontext)():
            logits = objective.logits(model, moved).float()
            with _nothing_reduced(model):
                (gradient,) = torch.autograd.grad(logits, embedded, logits.detach())
    finally:
        handle.remove()
    return {"logits": logits.detach(), "gradients": gradient.float()}


@contextmanager
def _nothing_reduced(model: nn.Module) -> Iterator[None]:
    """Inside, the backward of a forward before reduces no gradients of FSDP2's units.

    There are none. They would get zeros, and their parameters would count as used by a step.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        reshard_all(model)
