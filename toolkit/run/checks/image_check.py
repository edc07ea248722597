"""Checks before the first step, on the run's rows, that images reach their own row in the model and no other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import nn

from toolkit.checkpoint.export import relative_difference
from toolkit.data.samples.image_samples import ImageSamples
from toolkit.data.samples.samples import Batch
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.objectives.objective import Objective
from toolkit.run.checks.comparison import logits_of, refused
from toolkit.run.checks.packing_check import require_apart
from toolkit.sharding.fsdp2.fsdp import class_name

LOOKED_AT = 256
"""Number of samples among which rows are chosen."""


TRIED = 8
"""Number of rows with images that are each tried alone."""


@dataclass(frozen=True)
class SightCheck:
    """Measured differences, as shares of the largest logit.

    Attributes:
        seen: change of a row's logits with its image.
        leaks: change of the logits of rows next to it; 0 if none shares the sample.
        alone: the largest difference of a row next to others from the row alone.
        shared: whether several rows share the sample.
    """

    seen: float
    leaks: float
    alone: float
    shared: bool


@torch.no_grad()
def check_images(
    model: nn.Module, objective: Objective, samples: ImageSamples, device: torch.device, in_16_bits: bool
) -> SightCheck | None:
    """Compares logits on a real sample with an image. Every rank calls this, on the same samples.

    Returns:
        The measured differences, or None if no sample has an image, or the logits are not finite.

    Raises:
        BadInputError: if an image has no effect or is learned as text, or the model cannot take it on every rank.
        LeakError: if rows that share a sample see each other.
    """
    found = next((n for n in _shared_samples_first(samples) if samples.has_image(n)), None)
    if found is None:
        return None
    require_no_targets(samples)
    with without_dropout(model):
        _require_features(model, objective, samples, device)
        check = _measure(model, objective, samples, found, device)
    if not all(map(math.isfinite, (check.seen, check.leaks, check.alone))):
        return None  # the first step will say so
    name = _row_name(samples, found, _first_seen(samples, found))
    if check.seen == 0.0:
        raise BadInputError(
            f"{name}: its image changes no logit of {_class(model)}, so it would not be seen; train another model"
        )
    require_apart(check.leaks, check.alone, in_16_bits, f"{_class(model)} ({name})", MEND, "the image of another is")
    return check


def require_no_targets(samples: ImageSamples) -> None:
    """Checks that no token that stands for an image is learned.

    Raises:
        BadInputError: if one is.
    """
    placeholders = np.array(sorted(samples.images.token_ids))
    for number in _looked_at(samples):
        for place, (ids, targets) in enumerate(samples.tokens(number)):
            if np.any(np.isin(ids, placeholders) & np.asarray(targets, dtype=bool)):
                raise BadInputError(
                    f"{_row_name(samples, number, place)}: tokens that stand for an image would be learned as text; "
                    "report this"
                )


def _require_features(model: nn.Module, objective: Objective, samples: ImageSamples, device: torch.device) -> None:
    """Tries rows with different images alone: transformers refuses one if features and places differ in number.

    Next to others, a row with too many could balance one with too few.
    """
    for number, place in _rows_of_unlike_sizes(samples):
        name = _row_name(samples, number, place)
        with refused(f"{name}: {_class(model)} cannot take its images: {{error}}"):
            _logits(model, objective, samples.alone(number, place), device)


def _measure(
    model: nn.Module, objective: Objective, samples: ImageSamples, number: int, device: torch.device
) -> SightCheck:
    """Measures a sample in which the first row with an image gets another image."""
    seen, first = samples.seen(number), _first_seen(samples, number)
    others_seen = [*seen[:first], [_changed_image(seen[first][0]), *seen[first][1:]], *seen[first + 1 :]]
    together, changed = (
        _logits(model, objective, samples.batch([number], [images]), device) for images in (seen, others_seen)
    )
    # The small image of a batch without any is after all pieces.
    alone = [_logits(model, objective, samples.alone(number, place), device)[0] for place in range(len(seen))]
    pairs = list(zip(changed, together, strict=True))[: len(seen)]
    others = [pair for place, pair in enumerate(pairs) if place != first]
    return SightCheck(
        seen=relative_difference(*pairs[first]),
        leaks=max((relative_difference(*pair) for pair in others), default=0.0),
        alone=max(relative_difference(together[place], one) for place, one in enumerate(alone)),
        shared=len(pairs) > 1,
    )


def _looked_at(samples: ImageSamples) -> range:
    return range(min(LOOKED_AT, len(samples)))


def _first_seen(samples: ImageSamples, number: int) -> int:
    """Returns the place of the first piece of a sample that has an image."""
    return next(place for place, (_, found) in enumerate(samples.records(number)) if found)


def _rows_of_unlike_sizes(samples: ImageSamples) -> list[tuple[int, int]]:
    """Returns sample and place of pieces with images of different sizes: the longest ones, and the shortest."""
    by_sizes: dict[str, tuple[int, int, int]] = {}
    for number in _looked_at(samples):
        pieces = zip(samples.records(number), samples.tokens(number), strict=True)
        for place, ((_, records), (ids, _)) in enumerate(pieces):
            if records:
                sizes = str(sorted(str(record.get("size")) for record, _ in records))
                by_sizes.setdefault(sizes, (len(ids), number, place))
    in_order = sorted(by_sizes.values(), reverse=True)
    chosen = in_order if len(in_order) <= TRIED else [*in_order[: TRIED - 1], in_order[-1]]
    return [(number, place) for _, number, place in chosen]


def _row_name(samples: ImageSamples, number: int, place: int) -> str:
    name: str = samples.rows.name(samples.records(number)[place][0])
    return name


def _class(model: nn.Module) -> str:
    return class_name(base_of(model))


MEND = "Set data.packing=false, or another model.attention"


def _shared_samples_first(samples: ImageSamples) -> list[int]:
    """Returns the numbers of samples, those of several rows first."""
    return sorted(_looked_at(samples), key=lambda number: (len(samples.places(number)) < 2, number))


def _changed_image(image: Image.Image) -> Image.Image:
    """Returns another image of the same size with half of the bits flipped, so that no image stays the same."""
    pixels = np.asarray(image)
    return Image.fromarray(pixels ^ np.random.default_rng(0).integers(0, 256, pixels.shape, dtype=np.uint8))


def _logits(model: nn.Module, objective: Objective, batch: Batch, device: torch.device) -> list[torch.Tensor]:
    """Returns the logits of each document of a sample, (t, V), without padding, as training computes them."""
    prepared = objective.on_host(batch)
    found: list[torch.Tensor] = []
    logits = logits_of(model, objective, prepared, device).float()
    for row, positions, length in zip(logits, prepared["position_ids"], prepared["lengths"].tolist(), strict=True):
        starts = (positions[:length] == 0).nonzero().flatten().tolist()
        found += [row[start:end] for start, end in zip(starts, [*starts[1:], length], strict=True)]
    return found
