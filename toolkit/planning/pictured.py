"""Micro-batches of rows with pictures, as a plan takes them: those that hold most."""

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
from toolkit.data.picture_samples import KINDS_OF_TOKENS, PictureSamples
from toolkit.data.samples import IGNORED, Batch
from toolkit.data.sources import has_pictures, open_source
from toolkit.data.tokenizer import load as load_tokenizer
from toolkit.model.adapters import base_of
from toolkit.model.fake_tensors import unset_fake_temporarily
from toolkit.model.parts import LANGUAGE, asked_parts, sees
from toolkit.planning.workload import Workload, workload_of
from toolkit.recipe.recipe import Recipe


def workload_on_rows(recipe: Recipe, mixed_precision: str) -> Workload:
    """The workload of a recipe on its own rows, if the model sees, they have images, and they lie on this machine.

    The rows are tokenised as a run does it, which finds that done. Else as `workload_of`.

    Raises:
        BadInputError: there is no such model.
    """
    workload = workload_of(recipe, mixed_precision)
    if not sees(base_of(workload.model)):
        return workload
    samples = _with_images(recipe)
    # Of rows that are elsewhere the recipe knows best.
    shows = samples is not None or (recipe.model.train is not None and _is_away(recipe))
    parts = asked_parts(recipe.model, recipe.adapter, shows)
    if set(parts) != {LANGUAGE}:
        workload = workload_of(recipe, mixed_precision, parts)
    return workload if samples is None else with_pictures(workload, samples)


def _is_away(recipe: Recipe) -> bool:
    """Whether some training rows do not lie on this machine, or are streamed."""
    return recipe.data.streaming or any(not glob(os.path.expanduser(source.path)) for source in recipe.data.train)


def _with_images(recipe: Recipe) -> PictureSamples | None:
    """The training samples, if rows have images; None if not, or if they are not here."""
    if not recipe.objective.spec.sees_pictures or _is_away(recipe):
        return None
    if not any(has_pictures(open_source(source, "data.train")) for source in recipe.data.train):
        return None
    tokens = load_tokenizer(recipe.model, recipe.data, recipe.objective.kind)
    found = build(recipe.data, tokens, recipe.training.seed, recipe.objective).train
    return found if isinstance(found, PictureSamples) else None


LOOKED_AT = 4096
"""Samples among which those with the most pictures are looked for."""


def with_pictures(workload: Workload, samples: PictureSamples) -> Workload:
    """The workload on real micro-batches: of the most tokens of pictures, and if there are such, of text alone.

    The latter are longer by what stands for the small picture behind their rows.
    """
    shown, blind = _with_most(samples), _without(samples)
    _, smallest = samples.pictures.smallest

    def batch(numbers: Sequence[int], length: int) -> Batch:
        with unset_fake_temporarily():  # decodes pictures, while the planner's modes are on
            return _lengthened(samples.batch(numbers), length, samples.pad_id)

    length = samples.max_length
    with_most = replace(
        workload, batch=lambda size: batch([shown[i % len(shown)] for i in range(size)], length), has_images=True
    )
    if not blind:
        return with_most
    longer = length + len(smallest)
    return replace(with_most, also=(lambda size: batch([blind[0]] * size, longer),))


def _with_most(samples: PictureSamples) -> list[int]:
    """Numbers of the samples with pictures, those with the most tokens of them first; of none the first sample."""
    placeholders = np.array(sorted(samples.pictures.token_ids))
    looked_at = range(min(LOOKED_AT, len(samples)))
    counts = {
        number: sum(int(np.isin(ids, placeholders).sum()) for ids, _ in samples.tokens(number)) for number in looked_at
    }
    return [number for number in sorted(counts, key=lambda n: -counts[n]) if counts[number]] or [0]


def _without(samples: PictureSamples) -> list[int]:
    """The first sample without a picture, if there is one."""
    return [n for n in range(min(LOOKED_AT, len(samples))) if not samples.has_picture(n)][:1]


def _lengthened(batch: Batch, length: int, pad_id: int) -> Batch:
    """A batch of rows of `length` tokens, as the longest ones of a run are."""
    missing = length - batch["input_ids"].shape[1]
    if missing <= 0:
        return batch
    filled: dict[str, Any] = {"input_ids": pad_id, "labels": IGNORED, KINDS_OF_TOKENS: 0}
    longer = {name: F.pad(batch[name], (0, missing), value=value) for name, value in filled.items()}
    positions = batch["position_ids"]
    more = positions[:, -1:] + 1 + torch.arange(missing)
    return {**batch, **longer, "position_ids": torch.cat([positions, more], dim=1)}
