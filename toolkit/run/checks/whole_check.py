"""Rows that ranks share, matrices that they cut, a base in 4 bits: each must compute what whole, plain ones do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from toolkit.data.samples.samples import Batch, Samples
from toolkit.data.samples.sequence_parts import Part, counts_here
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.attention import attend_by_heads, attention_of, require_sequence
from toolkit.model.quantised.quantised import quantised_fact, quantised_layers, weights_as_numbers
from toolkit.objectives.objective import Objective
from toolkit.run.checks.comparison import ROUNDED, SAME, Numbers, compared, logits_of, on_text_alone
from toolkit.run.stages.part import RunPart
from toolkit.run.stages.stages import BuiltRun, MetaModel
from toolkit.sharding.fsdp2.fsdp import class_name
from toolkit.sharding.fsdp2.unit_states import UnitStates
from toolkit.sharding.parallel.sequence_parallel import form_groups
from toolkit.sharding.tensor.cut import cut_of, whole_layers
from toolkit.sharding.tensor.plan import tensor_plan

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
