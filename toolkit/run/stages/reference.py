"""Log-probabilities of the model before its first step, computed once and cached, for preferences and KTO.

With new adapters they are not needed: the adapters are switched off instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from toolkit import ranks
from toolkit.data.rows.cache import digest
from toolkit.data.samples.samples import ComparedSamples
from toolkit.data.samples.sequence_parts import WHOLE, Part
from toolkit.model.adapters.adapters import base_of
from toolkit.model.load import fingerprint
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.objectives.objective import Objective
from toolkit.recipe.recipe import Recipe

FILE = "reference.npy"

KEPT_SECONDS = 15.0
"""Seconds between writes of what has been computed: an interrupted run loses no more than that."""


def with_reference(
    accelerator: Accelerator,
    model: nn.Module,
    objective: Objective,
    samples: ComparedSamples,
    reached: Sequence[int],
    micro_batch_size: int,
    cache: Path,
    identity: Sequence[Any],
    tell: Callable[[int, int], None] = lambda done, total: None,
    part: Part = WHOLE,
    copies: int = 1,
) -> ComparedSamples:
    """Returns the samples with the reference's log-probabilities, (rows, 2), float32. Every rank calls this.

    Results are cached as they come, so that an interrupted run resumes there.

    Args:
        model: prepared, with the weights that it starts from.
        reached: numbers of the samples that the run reaches; the rows of others are NaN.
        cache: folder of the cache.
        identity: everything that decides the log-probabilities.
        tell: called with the number of samples done and their total.
        part: the part of the rows that this rank holds.
        copies: the number of ranks that compute the same rows.
    """
    path = cache / f"reference-{digest(*identity)}" / FILE
    known = ranks.on_first_rank(lambda: _load_cached(path, len(samples.rows)))
    missing = [number for number in reached if np.isnan(known[samples.rows_of(number)]).any()]
    kept_at = time.monotonic()
    # The reference is a fixed model: without dropout, whose masks would be kept for the run.
    with without_dropout(model):
        settings = (micro_batch_size, known, part, copies)
        for done in _compute_missing(accelerator, model, objective, samples, missing, *settings):
            tell(done, len(missing))
            if ranks.rank() == 0 and (done == len(missing) or time.monotonic() - kept_at > KEPT_SECONDS):
                _save_cached(path, known)
                kept_at = time.monotonic()
    return samples.with_reference(known)


def _load_cached(path: Path, num_rows: int) -> Any:
    """Returns the cached log-probabilities, (rows, 2); NaN for those not yet computed."""
    return np.load(path, allow_pickle=False) if path.exists() else np.full((num_rows, 2), np.nan, dtype=np.float32)


def _save_cached(path: Path, known: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place under a name of this process: another run may be computing the same rows.
    unfinished = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        np.save(unfinished, known)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@torch.no_grad()
def _compute_missing(
    accelerator: Accelerator,
    model: nn.Module,
    objective: Objective,
    samples: ComparedSamples,
    missing: Sequence[int],
    micro_batch_size: int,
    known: Any,
    part: Part,
    copies: int,
) -> Iterator[int]:
    """Fills `known` (rows, 2) on every rank, some samples at a time; yields how many are done."""
    size = part.count * copies
    group, stride = accelerator.process_index // size, micro_batch_size * accelerator.num_processes // size
    for round_start in range(0, len(missing), stride):
        start = round_start + group * micro_batch_size
        # A rank without samples left takes the first: all ranks run the same collectives.
        numbers = list(missing[start : start + micro_batch_size])
        batch = send_to_device(objective.on_host(part.of(samples.batch(numbers or [missing[0]]))), accelerator.device)
        sums, _ = objective.log_probabilities(model, batch)
        rows = [row for number in numbers for row in samples.rows_of(number)]
        # No more than its rows: a rank that took the first sample because it had none has sums, but no rows.
        for rows_of_rank, found in ranks.gather_objects((rows, sums.float().cpu().numpy()[: len(rows)])):
            known[rows_of_rank] = found
        yield min(round_start + stride, len(missing))


def identity_of(
    recipe: Recipe, model: nn.Module, start: str | None, mixed_precision: str, data: str, split: str
) -> list[Any]:
    """Returns all that decides a reference: model, weights, configuration, precision and rows. Collective.

    It includes the weights' fingerprint, because a hub name stands for other weights once its branch has moved.

    Args:
        model: the model without its wrappers.
        start: the fingerprint of the adapter that training continues, or None.
    """
    configuration = base_of(model).config.to_json_string(use_diff=False)
    section = recipe.model
    # Only if there is one: what has been computed for full models stays known.
    of_adapter = [] if start is None else [start, recipe.adapter.model_dump(exclude={"start_from", "dropout"})]
    decided = [
        section.model_dump(),
        fingerprint(section),
        configuration,
        mixed_precision,
        data,
        recipe.training.seed,
        split,
    ]
    return [*decided, *of_adapter]
