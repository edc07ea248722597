"""Before the first step, on the rows of the run: is what is seen where it belongs, and nowhere else?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from accelerate.utils import send_to_device
from PIL import Image
from torch import nn

from toolkit.checkpoint.export import relative_difference
from toolkit.data.picture_samples import KINDS_OF_TOKENS, PictureSamples
from toolkit.data.samples import IGNORED, Batch
from toolkit.errors import BadInputError, first_line
from toolkit.model.adapters import base_of
from toolkit.objectives.objective import Objective
from toolkit.run.packing_check import TOLERANCE, LeakError
from toolkit.sharding.fsdp import class_name

LOOKED_AT = 256
"""Samples among which the first with a picture and with several rows are looked for."""


class SightError(BadInputError):
    """Rows with images do not reach the model as they should."""


@dataclass(frozen=True)
class SightCheck:
    """What was measured, as shares of the largest logit.

    Attributes:
        seen: by how much a row's logits change with its image.
        leaks: by how much those of the rows beside it change with that; 0 if none shares the sample.
        alone: by how much a row beside others differs from the row alone, of those of the sample the most.
        shared: whether several rows share the sample.
    """

    seen: float
    leaks: float
    alone: float
    shared: bool


@torch.no_grad()
def check_pictures(
    model: nn.Module,
    inner: nn.Module,
    objective: Objective,
    samples: PictureSamples,
    device: torch.device,
    in_16_bits: bool,
) -> SightCheck | None:
    """Compares logits on a real sample with an image. Every rank calls this, on the same samples.

    Returns:
        What was measured; None if no sample has an image, or the logits are not finite.

    Raises:
        SightError: an image is not seen, or is learned as text; or the model cannot take it.
        LeakError: rows that share a sample see each other.
    """
    found = next((n for n in _by_interest(samples) if samples.has_picture(n)), None)
    if found is None:
        return None
    name = samples.rows.name(samples.rows_of(found)[0])  # type: ignore[attr-defined]
    seen = samples.seen(found)
    first = next(i for i, pictures in enumerate(seen) if pictures)
    others_seen = [*seen[:first], [_another(seen[first][0]), *seen[first][1:]], *seen[first + 1 :]]
    batch, other = samples.shown([found], [seen]), samples.shown([found], [others_seen])
    if bool((batch["labels"][batch[KINDS_OF_TOKENS] > 0] != IGNORED).any()):
        raise SightError(f"{name}: tokens that stand for an image would be learned as text; report this")
    spans, was_training = _documents(batch), model.training
    model.eval()
    try:
        together, changed = (_logits(model, objective, one, device) for one in (batch, other))
        alone = 0.0
        for i, (start, end) in enumerate(spans):
            by_itself = _logits(model, objective, samples.alone(found, i).batch([0]), device)[: end - start]
            alone = max(alone, relative_difference(together[start:end], by_itself))
    except Exception as error:  # of the model's own code
        raise SightError(
            f"{name}: {class_name(base_of(inner))} cannot take its images: {type(error).__name__}: {first_line(error)}"
        ) from error
    finally:
        model.train(was_training)
    others = [slice(*span) for i, span in enumerate(spans) if i != first]
    check = SightCheck(
        seen=relative_difference(changed[slice(*spans[first])], together[slice(*spans[first])]),
        leaks=max((relative_difference(changed[span], together[span]) for span in others), default=0.0),
        alone=alone,
        shared=len(spans) > 1,
    )
    if not all(map(math.isfinite, (check.seen, check.leaks, check.alone))):
        return None  # the first step will say so
    _require(check, TOLERANCE[in_16_bits], name, class_name(base_of(inner)))
    return check


def _require(check: SightCheck, tolerance: tuple[float, float], name: str, model: str) -> None:
    if check.seen == 0.0:
        raise SightError(f"{name}: its image changes no logit of {model}, so it would not be seen; train another model")
    why = None
    if check.leaks > tolerance[0]:
        why = f"an image changes the logits of rows beside it by {check.leaks:.1e} of the largest, more than"
        why = f"{why} {tolerance[0]:.0e}"
    elif check.alone > tolerance[1]:
        why = f"beside others a row's logits differ by {check.alone:.1e} of the largest from its own alone, more than"
        why = f"{why} {tolerance[1]:.0e}"
    if why is not None:
        leak = LeakError(f"data.packing: rows that share a sample see each other in {model} ({name}): {why}. {MEND}")
        leak.why = f"rows with images that share a sample see each other in {model}: {why}"
        raise leak


MEND = "Set data.packing=false, or another model.attention"


def _by_interest(samples: PictureSamples) -> list[int]:
    """Samples of several rows first."""
    looked_at = range(min(LOOKED_AT, len(samples)))
    return sorted(looked_at, key=lambda number: (len(samples.rows_of(number)) < 2, number))


def _documents(batch: Batch) -> list[tuple[int, int]]:
    """Where the documents of the only row are, without padding."""
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    return list(zip(starts, [*starts[1:], int(batch["lengths"][0])], strict=True))


def _another(picture: Image.Image) -> Image.Image:
    """Another picture of the same size: half of the bits are turned, so that no picture stays as it is."""
    pixels = np.asarray(picture)
    return Image.fromarray(pixels ^ np.random.default_rng(0).integers(0, 256, pixels.shape, dtype=np.uint8))


def _logits(model: nn.Module, objective: Objective, batch: Batch, device: torch.device) -> torch.Tensor:
    """Of the only row, (T, V), as training computes them."""
    moved = send_to_device(objective.on_host(batch), device)
    return objective.logits(model, moved)[0].float()
