"""Describes what one rank runs in a micro-batch, before there are weights or data."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from glob import glob
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from toolkit.data.build import build
from toolkit.data.kinds.registry import rows_of
from toolkit.data.rows.sources import has_images, map_of, open_source
from toolkit.data.samples.image_samples import KINDS_OF_TOKENS, ImageSamples, image_samples_of
from toolkit.data.samples.samples import IGNORED, Batch
from toolkit.data.samples.sequence_parts import KL_PREFIX, Part
from toolkit.data.tokens import tokenizer
from toolkit.data.tokens.tokenizer import load as load_tokenizer
from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.attention import attend_by_heads, attention_of, require_sequence
from toolkit.model.attention.document_attention import BY_DOCUMENT
from toolkit.model.attention.positions import takes_positions
from toolkit.model.load import SpecialTokens, load_without_weights
from toolkit.model.structure.fake_tensors import unset_fake_temporarily
from toolkit.model.structure.model_parts import LANGUAGE, asked_parts, sees
from toolkit.objectives.build import build_objective
from toolkit.objectives.objective import Objective
from toolkit.objectives.teacher import teacher_without_weights
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.objectives.spec import ObjectiveSpec
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import DataSection, ModelSection
from toolkit.sharding.tensor.cut import cut_model
from toolkit.sharding.tensor.moves import TensorRanks
from toolkit.sharding.tensor.plan import tensor_plan

UNMASKED = "unmasked_sdpa"
"""Name of the attention that stands for kernels without a mask: flash attention, and sdpa on plain causal rows.

transformers makes no mask for an attention name that it does not know. For a name that it knows, it makes the
mask of packed rows whenever it sees fake tensors, because it cannot read the positions.
"""


@dataclass(frozen=True)
class Workload:
    """A model on the meta device, its objective, and batches of the run's shape.

    Attributes:
        model: the model that the backend gets; its parameters have no memory.
        objective: builds the objective of a model like this one, and of a teacher.
        batch: returns a batch on the CPU for a micro-batch size; only shapes and types matter, not values.
        mixed_precision: `no`, `bf16` or `fp16`.
        tokens: tokens of one sample.
        unit_classes: as `plan_units` takes them.
        sequence: ranks that share a row.
        attention: the attention of copies of the model, or None to keep its own.
        teacher: on the meta device, if the objective has one.
        experts: ranks of an expert-parallel group, each with whole experts of its own.
        also: batches of other shapes, some of which may need more memory.
        has_images: whether the batches are of rows with images.
        tensor: ranks that cut matrices; the copies of the model are cut, as the first of these ranks has them.
    """

    model: nn.Module
    objective: Callable[..., Objective]
    batch: Callable[[int], dict[str, torch.Tensor]]
    mixed_precision: str
    tokens: int
    unit_classes: list[str] | None = None
    sequence: int = 1
    attention: str | None = None
    teacher: nn.Module | None = None
    experts: int = 1
    also: tuple[Callable[[int], dict[str, torch.Tensor]], ...] = ()
    has_images: bool = False
    tensor: int = 1

    def model_copy(self) -> nn.Module:
        """Returns a copy of the model in training mode, for callers that add hooks."""
        model = self._copy_of(self.model).train()
        if self.tensor > 1:
            cut_model(model, tensor_plan(model, self.tensor), TensorRanks(self.tensor))
        return model

    def teacher_copy(self) -> nn.Module | None:
        """Returns a copy of the teacher in evaluation mode, or None without one."""
        return None if self.teacher is None else self._copy_of(self.teacher).eval()

    def _copy_of(self, model: nn.Module) -> nn.Module:
        model = copy.deepcopy(model)
        if self.attention is not None:
            register_unmasked()
            with contextlib.suppress(ValueError):  # a model that knows its own kernels alone keeps what it has
                base_of(model).set_attn_implementation(self.attention)
        if self.sequence > 1:
            attend_by_heads(model)
        return model


def _unmasked(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    # On a CPU dropout would select a kernel with whole score matrices; CUDA's kernel keeps two numbers.
    return sdpa_attention_forward(module, query, key, value, *args, **{**kwargs, "dropout": 0.0})


def register_unmasked() -> None:
    """Registers UNMASKED with transformers; a second call changes nothing."""
    AttentionInterface.register(UNMASKED, _unmasked)


@dataclass
class PlannedTokenizer:
    """Stands for a tokenizer that does not exist yet, as far as a configuration needs it."""

    size: int
    bos_token_id: int | None = None
    eos_token_id: int | None = 0
    pad_token_id: int | None = 1

    def __len__(self) -> int:
        return self.size


def workload_of(recipe: Recipe, mixed_precision: str, parts: Sequence[str] = (LANGUAGE,)) -> Workload:
    """Returns the workload of a recipe on rows of text; it reads the model's configuration, but no weights and no data.

    Args:
        parts: the trained parts of a model that reads more than text, in words of `model.train`.

    Raises:
        BadInputError: if there is no such model.
    """
    labels, kind = _labels(recipe.objective), recipe.objective.kind
    tokens = _tokenizer(recipe.model, recipe.data, kind)
    model = load_without_weights(recipe.model, tokens, labels, recipe.adapter, kind, parts)
    teacher = teacher_without_weights(recipe, mixed_precision)
    return workload_of_model(recipe, model, mixed_precision, dict.fromkeys(labels, 1) if labels else None, teacher)


def workload_of_model(
    recipe: Recipe,
    model: nn.Module,
    mixed_precision: str,
    label_counts: dict[str, int] | None,
    teacher: nn.Module | None = None,
) -> Workload:
    """Returns the workload of a recipe whose model exists already, on the meta device.

    Args:
        label_counts, teacher: as `build_objective` takes them.
    """
    if recipe.sharding.sequence > 1:
        require_sequence(model, recipe.sharding.sequence, recipe.data.max_length)
    if recipe.sharding.tensor > 1:
        tensor_plan(model, recipe.sharding.tensor)  # refuses what cannot be cut
    rows = rows_of(recipe.data, recipe.objective)
    packed = rows.packed
    if recipe.data.packing is None and recipe.objective.spec.may_pad:
        packed = takes_positions(model)  # a run pads its rows then

    def objective(model: nn.Module, teacher: nn.Module | None = None) -> Objective:
        continued = recipe.adapter.start_from is not None
        return build_objective(recipe.objective, model, packed, label_counts, teacher, continued=continued)

    return Workload(
        model,
        objective,
        lambda size: _empty_batch(recipe, size),
        mixed_precision,
        sum(rows.lengths),
        recipe.sharding.unit_classes,
        recipe.sharding.sequence,
        _attention(recipe.objective.spec, attention_of(base_of(model)), packed),
        teacher,
        recipe.sharding.experts,
        tensor=recipe.sharding.tensor,
    )


def with_rows_of(workload: Workload, recipe: Recipe) -> Workload:
    """Returns the workload with the rows of a recipe that differs in its data, or in how many ranks share them.

    Raises:
        BadInputError: if so many ranks cannot share them.
    """
    sequence = recipe.sharding.sequence
    if sequence > 1:
        require_sequence(workload.model, sequence, recipe.data.max_length)
    return replace(
        workload,
        batch=lambda size: _empty_batch(recipe, size),
        tokens=sum(rows_of(recipe.data, recipe.objective).lengths),
        sequence=sequence,
    )


def with_matrices_of(workload: Workload, recipe: Recipe) -> Workload:
    """Returns the workload with matrices that as many ranks cut as a recipe says.

    Raises:
        BadInputError: if so many ranks cannot cut them.
    """
    size = recipe.sharding.tensor
    if size > 1:
        tensor_plan(workload.model, size)
    return replace(workload, tensor=size)


def _labels(section: ObjectiveSection) -> list[str] | None:
    """Returns the names of a new head's outputs; two stand for classes that only the data names."""
    if not section.spec.has_classes:
        return list(section.spec.head_names) or None
    return list(section.labels or ("0", "1"))


def _tokenizer(section: ModelSection, data: DataSection, kind: str) -> SpecialTokens:
    if section.train_tokenizer_vocab_size is not None:
        return PlannedTokenizer(section.train_tokenizer_vocab_size)
    # Read nothing that is not needed: a tokenizer may have to come from the hub.
    if section.name_or_path is not None and section.add_tokens is None:
        return PlannedTokenizer(0)  # the configuration says it all
    loaded: SpecialTokens = tokenizer.load(section, data, kind)
    return loaded


def _attention(spec: ObjectiveSpec, chosen: str, packed: bool) -> str | None:
    """Returns `UNMASKED`, or None: rows that share a sample need a mask with sdpa, but not with flash or flex."""
    if spec.padded or chosen == "eager":
        return None
    # sdpa with a mask of packed rows uses the memory-efficient kernel and keeps (B, 1, T, T).
    return None if chosen in ("sdpa", BY_DOCUMENT) and packed else UNMASKED


def _empty_batch(recipe: Recipe, size: int) -> dict[str, torch.Tensor]:
    """Returns an uninitialised micro-batch of full rows, shaped as the data's samples make it."""
    rows = rows_of(recipe.data, recipe.objective)
    dims = {"B": size, "R": size, **dict(zip("TU", rows.lengths, strict=False))}
    batch = {
        name: torch.empty(field.sizes(dims), dtype=getattr(torch, field.dtype)) for name, field in rows.batch.items()
    }
    return Part(0, recipe.sharding.sequence).of(batch)


# ---- Plans micro-batches of rows with images: those that need the most memory ----


def workload_on_rows(recipe: Recipe, mixed_precision: str) -> Workload:
    """Returns the workload of a recipe on its own rows, or `workload_of` if it cannot use them.

    It uses the rows if the model takes images, the rows have some, and they are on this machine. They are tokenised as
    in a run, which then finds them in the cache.

    Raises:
        BadInputError: if there is no such model.
    """
    workload = workload_of(recipe, mixed_precision)
    if not sees(base_of(workload.model)):
        return workload
    samples = _samples_with_images(recipe)
    # For rows that are not on this machine, the recipe decides.
    shows = samples is not None or (recipe.model.train is not None and _is_remote(recipe.data))
    parts = asked_parts(recipe.model, recipe.adapter, shows)
    if set(parts) != {LANGUAGE}:
        workload = workload_of(recipe, mixed_precision, parts)
    return workload if samples is None else with_images(workload, samples)


def _is_remote(data: DataSection) -> bool:
    """Returns whether some training rows are not on this machine."""
    return any(not glob(os.path.expanduser(source.path)) for source in data.train)


def _samples_with_images(recipe: Recipe) -> ImageSamples | None:
    """Returns the training samples if rows have images, or None if not or if they are not on this machine."""
    if not recipe.objective.spec.sees_images or _is_remote(recipe.data):
        return None
    if not any(
        has_images(open_source(source, "data.train", through=map_of(recipe.data))) for source in recipe.data.train
    ):
        return None
    tokens = load_tokenizer(recipe.model, recipe.data, recipe.objective.kind)
    return image_samples_of(build(recipe.data, tokens, recipe.training.seed, recipe.objective).train)


LOOKED_AT = 4096
"""Number of samples that are searched for those with the most images."""


def with_images(workload: Workload, samples: ImageSamples) -> Workload:
    """Returns the workload on real micro-batches: those with the most image tokens, and those of text, if any.

    The latter are longer by the tokens of the small image that is appended to their rows.
    """
    shown, blind = _by_image_tokens(samples), _first_without_image(samples)
    _, smallest = samples.images.smallest

    def batch(numbers: Sequence[int], length: int) -> Batch:
        with unset_fake_temporarily():  # decodes images, while the planner's modes are on
            return _padded_to_length(samples.batch(numbers), length, samples.pad_id)

    length = samples.max_length
    with_most = replace(
        workload, batch=lambda size: batch([shown[i % len(shown)] for i in range(size)], length), has_images=True
    )
    if not blind:
        return with_most
    longer = length + len(smallest)
    return replace(with_most, also=(lambda size: batch([blind[0]] * size, longer),))


def _by_image_tokens(samples: ImageSamples) -> list[int]:
    """Returns the numbers of the samples with images, most image tokens first; without images, sample 0."""
    placeholders = np.array(sorted(samples.images.token_ids))
    looked_at = range(min(LOOKED_AT, len(samples)))
    counts = {
        number: sum(int(np.isin(ids, placeholders).sum()) for ids, _ in samples.tokens(number)) for number in looked_at
    }
    return [number for number in sorted(counts, key=lambda n: -counts[n]) if counts[number]] or [0]


def _first_without_image(samples: ImageSamples) -> list[int]:
    """Returns the first sample without an image, if there is one."""
    return [n for n in range(min(LOOKED_AT, len(samples))) if not samples.has_image(n)][:1]


def _padded_to_length(batch: Batch, length: int, pad_id: int) -> Batch:
    """Returns the batch with rows padded to `length` tokens, the longest of a run."""
    missing = length - batch["input_ids"].shape[1]
    if missing <= 0:
        return batch
    filled: dict[str, Any] = {"input_ids": pad_id, "labels": IGNORED, "segments": -1, KINDS_OF_TOKENS: 0}

    def longer(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "position_ids":
            return torch.cat([tensor, tensor[:, -1:] + 1 + torch.arange(missing)], dim=1)
        return F.pad(tensor, (0, missing), value=filled[name]) if name in filled else tensor

    return {name: longer(name.removeprefix(KL_PREFIX), tensor) for name, tensor in batch.items()}
