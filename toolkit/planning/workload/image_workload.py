"""Plans micro-batches of rows with images: those that need the most memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from glob import glob
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from toolkit.data.build import build
from toolkit.data.rows.sources import has_images, map_of, open_source
from toolkit.data.samples.image_samples import KINDS_OF_TOKENS, ImageSamples, image_samples_of
from toolkit.data.samples.samples import IGNORED, Batch
from toolkit.data.samples.sequence_parts import KL_PREFIX
from toolkit.data.tokens.tokenizer import load as load_tokenizer
from toolkit.model.adapters.adapters import base_of
from toolkit.model.structure.fake_tensors import unset_fake_temporarily
from toolkit.model.structure.model_parts import LANGUAGE, asked_parts, sees
from toolkit.planning.workload.workload import Workload, workload_of
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import DataSection


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
