"""Micro-batches of rows with pictures, as a plan takes them: those that hold most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from toolkit.data.picture_samples import KINDS_OF_TOKENS, PictureSamples
from toolkit.data.samples import IGNORED, Batch
from toolkit.model.fake_tensors import unset_fake_temporarily
from toolkit.planning.workload import Workload

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
    with_most = replace(workload, batch=lambda size: batch([shown[i % len(shown)] for i in range(size)], length))
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
