"""Rows that ranks share (`sharding.sequence`): this rank's part, and a check against whole rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from toolkit.data.samples.samples import Batch, Samples
from toolkit.data.samples.sequence_parts import Part, counts_here
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.attention import attend_by_heads, attention_of, require_sequence
from toolkit.objectives.objective import Objective
from toolkit.run.checks.comparison import ROUNDED, Numbers, compared, on_text_alone
from toolkit.run.stages.part import RunPart
from toolkit.run.stages.stages import BuiltRun, MetaModel
from toolkit.sharding.fsdp2.fsdp import class_name
from toolkit.sharding.fsdp2.unit_states import UnitStates
from toolkit.sharding.parallel.sequence_parallel import form_groups

CHECKED_TOKENS = 1024
"""Tokens of the row that is compared; every rank computes it whole once."""

BY_TOKEN = 3
"""Dimensions of values by token, (B, T, ...), of which a rank has its part; values by document have two."""


class SharedRows(RunPart):
    """Rows that ranks share."""

    def on_meta(self, on_meta: MetaModel) -> None:
        models = [loaded.model for loaded in (on_meta.loaded, on_meta.teacher) if loaded is not None]
        share_rows(self.recipe.sharding.sequence, self.recipe.data.max_length, *models)

    def check(self, run: BuiltRun) -> None:
        opened, part = self.opened, self.opened.share[2]
        if part.count == 1:
            return
        differ = check_parts(run.inner, run.objective, run.data.train, part, opened.device, opened.in_16_bits)
        checked = differ is not None and f"; checked: logits and gradients as of whole rows (difference {differ:.0e})"
        self.facts["rows"] = f"each shared by {part.count} ranks{checked or ''}"


def share_rows(size: int, max_length: int, *models: PreTrainedModel) -> None:
    """Forms the groups of `size` ranks that share rows, if any, and splits their attention by heads.

    Raises:
        BadInputError: if the groups do not divide the ranks, or one of the models does not support it.
    """
    form_groups(size)
    for model in models if size > 1 else ():
        require_sequence(model, size, max_length)
        attend_by_heads(model)


def check_parts(
    model: nn.Module, objective: Objective, samples: Samples, part: Part, device: torch.device, in_16_bits: bool
) -> float | None:
    """Compares parts of a row with the whole row.

    It compares logits, what the loss needs of whole documents, and gradients of the embeddings' outputs. Every rank
    calls this, on the same samples. Gradients of parameters are not computed, so nothing is reduced.

    Returns:
        The largest difference of any rank, as a share of the largest number, or None if there is nothing to compare.

    Raises:
        BadInputError: if it is more than `ROUNDED`, or the model cannot run on parts of rows.
    """
    batch = samples.few(CHECKED_TOKENS)
    if batch is None:
        return None
    mine = part.of(batch)
    width = mine["input_ids"].shape[1]

    def whole() -> Numbers:
        with on_text_alone(model, samples.has_images):
            found = outputs_and_gradients(model, objective, batch, device)
        here = slice(part.index * width, (part.index + 1) * width)
        return {name: value[:, here] if value.dim() == BY_TOKEN else value for name, value in found.items()}

    def parts() -> Numbers:
        return outputs_and_gradients(model, objective, mine, device)

    outcome = compared(model, whole, parts)
    if problem := outcome.problem(ROUNDED[in_16_bits], "whole rows"):
        raise BadInputError(
            f"sharding.sequence: {class_name(base_of(model))} with attention {attention_of(model)!r} mixes the tokens "
            f"of a row elsewhere than in attention that can be shared ({problem}); remove sharding.sequence"
        )
    return outcome.difference


def outputs_and_gradients(
    model: nn.Module, objective: Objective, batch: Batch, device: torch.device, with_documents: bool = True
) -> dict[str, torch.Tensor]:
    """Returns logits, (B, T, V) or (B, C) of whole rows, and what the loss needs of whole documents, (D, C).

    For each it adds the gradient (B, T, D) of half its sum of squares with respect to the embeddings' outputs.
    """
    moved = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in objective.on_host(batch).items()
    }
    asked = {"logits": objective.logits}
    if objective.needs_documents and with_documents:
        asked["numbers of documents"] = objective.by_document
    found: dict[str, torch.Tensor] = {}
    for name, function in asked.items():
        value, gradient = _with_gradient(model, functools.partial(function, model, moved), batch)
        found |= {name: value, f"gradients of {name}": gradient}
    return found


def _with_gradient(
    model: nn.Module, function: Callable[[], torch.Tensor], batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a function's result and the gradient; values of whole documents count on one rank of a group."""
    is_real = torch.arange(batch["input_ids"].shape[1]) < batch["lengths"][:, None]
    embedded: list[torch.Tensor] = []

    def begin_here(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0].clone()  # a model may scale it in place, as CTRL does

    embeddings: Any = base_of(model).get_input_embeddings()
    handle = embeddings.register_forward_hook(begin_here)
    try:
        with torch.enable_grad():
            value = function().float()
            if value.dim() == BY_TOKEN:  # values of padding do not matter
                value = value.masked_fill(~is_real.to(value.device)[..., None], 0.0)
            counts = value.dim() == BY_TOKEN or counts_here(batch)
            above = value.detach() if counts else torch.zeros_like(value)
            with UnitStates(model).reducing_nothing() if isinstance(model, FSDPModule) else nullcontext():
                (gradient,) = torch.autograd.grad(value, embedded, above)
    finally:
        handle.remove()
    return value.detach(), gradient.float()
