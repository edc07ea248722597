"""Reference losses for `toolkit verify`, written out over full logits; they share no formula with the objectives."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig

from toolkit.data.samples.samples import Batch
from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.image_inputs import kinds_of_text
from toolkit.model.structure.model_parts import writer_class
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import ModelSection

IGNORED = -100
"""transformers' value, written out so that a wrong constant of ours would show."""


KINDS, OF_IMAGES = "kinds", "of_images"
"""Keys of a row by itself: the kinds of its tokens, (1, T), and what transformers' processor makes of its images."""


class PlainLoss(Protocol):
    """A summed loss that is divided by the targets of a step."""

    def num_targets(self, batch: Batch) -> int:
        """Returns the number of tokens that are learned."""

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns logits of a micro-batch, (B, T, V)."""

    def summed(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the loss summed over the targets of a micro-batch, 0-dim, with a graph."""


class PlainCausal:
    """Cross-entropy of the next tokens."""

    def num_targets(self, batch: Batch) -> int:
        return int((batch["labels"][:, 1:] != IGNORED).sum())

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        device = next(model.parameters()).device
        given: dict[str, torch.Tensor] = {
            name: batch[name].to(device) for name in ("input_ids", "position_ids") if name in batch
        }
        if OF_IMAGES in batch:
            given |= _of_images(model, batch)
        else:
            given |= kinds_of_text(model, given["input_ids"])
        return model(**given, use_cache=False).logits  # type: ignore[no-any-return]

    def summed(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = self.forward(model, batch)[:, :-1]
        labels = batch["labels"][:, 1:].to(logits.device)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def _of_images(model: nn.Module, row: Any) -> dict[str, torch.Tensor]:
    """Returns the inputs of a model besides tokens for a row of `ImageRows`."""
    taken = inspect.signature(base_of(model).forward).parameters
    kinds = {name: row[KINDS] for name in ("mm_token_type_ids", "token_type_ids") if name in taken}
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in {**row[OF_IMAGES], **kinds}.items()}


class PlainDistillation(PlainCausal):
    """Cross-entropy and divergence from a teacher, by the formulas of docs/adapters.md, in float64."""

    def __init__(self, teacher: nn.Module, section: ObjectiveSection) -> None:
        self._teacher = teacher
        self._kind = section.divergence or "forward_kl"
        self._beta = 0.5 if section.beta is None else section.beta
        self._temperature = 1.0 if section.temperature is None else section.temperature
        self._ratio = 0.5 if section.kd_ratio is None else section.kd_ratio

    def summed(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            y = self.forward(self._teacher, batch)[:, :-1]
        z = self.forward(model, batch)[:, :-1]
        labels = batch["labels"][:, 1:].to(z.device)
        learned = labels != IGNORED
        z, y, labels = z[learned].double(), y[learned].double(), labels[learned]
        shared = min(z.shape[1], y.shape[1])
        student, teacher = ((logits[:, :shared] / self._temperature).log_softmax(dim=1) for logits in (z, y))
        divergence = self._divergence(student, teacher)
        cross_entropy = F.cross_entropy(z, labels, reduction="sum")
        return (1 - self._ratio) * cross_entropy + self._ratio * self._temperature**2 * divergence

    def _divergence(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Returns the summed divergence, 0-dim, of log-probabilities, (N, V) each."""
        if self._kind == "forward_kl":
            return _kl(teacher, student)
        if self._kind == "reverse_kl":
            return _kl(student, teacher)
        b = self._beta
        mixture = torch.logaddexp(teacher + math.log(b), student + math.log(1 - b))
        return b * _kl(teacher, mixture) + (1 - b) * _kl(student, mixture)


def _kl(of: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    return (of.exp() * (of - beside)).sum()


class PlainGrpo(PlainCausal):
    """Policy gradients by the formulas of docs/online.md; each completion runs alone, after its prompt."""

    def __init__(self, section: ObjectiveSection, adapted: bool) -> None:
        self._kind, self._beta, self._adapted = section.loss or "dapo", section.beta, adapted
        self._most = section.max_new_tokens or 1
        self._reference: Any = None

    def num_targets(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum()) if self._kind == "dapo" else len(batch["advantages"])

    def summed(self, model: Any, batch: Batch) -> torch.Tensor:
        device = next(model.parameters()).device
        total = torch.zeros((), device=device, requires_grad=True)
        for number, advantage in enumerate(batch["advantages"].tolist()):
            mine = batch["segments"] == number
            ids, learned = batch["input_ids"][mine].to(device), batch["labels"][mine].to(device)[1:] != IGNORED
            found = _log_probabilities(model, ids)
            ratios = torch.exp(found - found.detach())
            terms = -ratios * advantage
            if self._beta is not None:
                difference = self._of_reference(model, ids) - found
                terms = terms + self._beta * ratios * (difference.exp() - difference - 1)
            among = {"dapo": 1, "grpo": max(1, int(learned.sum())), "dr_grpo": self._most}[self._kind]
            total = total + terms[learned].sum() / among
        return total

    @torch.no_grad()
    def _of_reference(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        if self._adapted:
            with model.disable_adapter():
                return _log_probabilities(model, ids)
        if self._reference is None:  # before the first update
            self._reference = copy.deepcopy(model).eval()
        return _log_probabilities(self._reference, ids)


def _log_probabilities(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Returns the log-probability of each token of a row but the first, (T - 1,)."""
    logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(dim=-1).gather(1, ids[1:, None])[:, 0]


class PlainSeq2Seq:
    """Cross-entropy of targets: each row runs alone, without padding, and transformers makes the decoder's inputs."""

    def num_targets(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        device = next(model.parameters()).device
        # The model shifts the labels itself.
        return model(  # type: ignore[no-any-return]
            input_ids=batch["input_ids"].to(device), labels=batch["labels"].to(device), use_cache=False
        ).logits

    def summed(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        device = next(model.parameters()).device
        total = torch.zeros((), device=device, requires_grad=True)
        for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
            row = {"input_ids": ids[mask == 1][None], "labels": labels[labels != IGNORED][None]}
            if row["labels"].numel():  # a rank that has no sample left gets rows without a target
                logits = self.forward(model, row)[0]
                total = total + F.cross_entropy(logits, row["labels"][0].to(device), reduction="sum")
        return total


PLAIN_LOSSES: dict[str, Callable[[Recipe, torch.device], PlainLoss]] = {
    "causal_lm": lambda recipe, device: PlainCausal(),
    "seq2seq": lambda recipe, device: PlainSeq2Seq(),
    "grpo": lambda recipe, device: PlainGrpo(recipe.objective, recipe.adapter.kind != "none"),
    "distillation": lambda recipe, device: PlainDistillation(
        _plain_teacher(recipe.objective, recipe.model, device), recipe.objective
    ),
}
"""Plain loss by `objective.kind`, for the objectives that can be verified."""


def _plain_teacher(section: ObjectiveSection, student: ModelSection, device: torch.device) -> nn.Module:
    """Returns the teacher as transformers loads it, cast to float32."""
    settings: dict[str, Any] = {"dtype": getattr(torch, student.dtype)}
    if student.attention != "auto":
        settings["attn_implementation"] = student.attention
    config = AutoConfig.from_pretrained(section.teacher)
    teacher: nn.Module = writer_class(config).from_pretrained(section.teacher, use_safetensors=True, **settings)
    return teacher.float().to(device).eval()
