"""Log-probabilities of the model before its first step, computed once and cached, for preferences and KTO.

With new adapters they are not needed: the adapters are switched off instead.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device

from toolkit import ranks
from toolkit.data.rows.cache import cache_folder, digest
from toolkit.data.samples.loader import EpochOrder
from toolkit.data.samples.samples import ComparedSamples
from toolkit.model.adapters.adapters import base_of
from toolkit.model.load import fingerprint
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.paths import atomic_write
from toolkit.run.stages.part import RunPart
from toolkit.run.stages.rows import length_of_run
from toolkit.run.stages.stages import BuiltRun
from toolkit.terminal import LongAction

FILE = "reference.npy"

KEPT_SECONDS = 15.0
"""Seconds between writes of what has been computed: an interrupted run loses no more than that."""


class ReferencePart(RunPart):
    """Adds the log-probabilities of the model before its first step to the rows, if the objective needs them."""

    def check(self, run: BuiltRun) -> None:
        if not run.objective.needs_references:
            return
        data, recipe, found = run.data, self.recipe, dict[str, Any]()
        for split, samples in (("train", data.train), ("validation", data.validation)):
            compared = None if samples is None else samples.compared
            if compared is None:
                continue
            if split == "train":
                order = EpochOrder(len(compared), recipe.training.seed, recipe.data.shuffle)
                reached = order.first(length_of_run(self.opened, data)[1])
            else:
                reached = list(range(len(compared))[: recipe.data.max_validation_samples])
            found[split] = with_reference(run, compared, reached, split)
        run.sharded.data = replace(data, **found)


def with_reference(run: BuiltRun, samples: ComparedSamples, reached: Sequence[int], split: str) -> ComparedSamples:
    """Returns the samples with the reference's log-probabilities, (rows, 2), float32. Every rank calls this.

    Results are cached as they come, so that an interrupted run resumes there.

    Args:
        run: its model has the weights that it starts from.
        reached: numbers of the samples that the run reaches; the rows of others are NaN.
    """
    path = cache_folder(run.opened.recipe.data) / f"reference-{digest(*_identity(run, split))}" / FILE
    known = ranks.on_first_rank(lambda: _load_cached(path, len(samples.rows)))
    missing = [number for number in reached if np.isnan(known[samples.rows_of(number)]).any()]
    kept_at, tell = time.monotonic(), LongAction(run.opened.console, "log-probabilities of the reference")
    # The reference is a fixed model: without dropout, whose masks would be kept for the run.
    with without_dropout(run.model):
        for done in _compute_missing(run, samples, missing, known):
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
    content = io.BytesIO()
    np.save(content, known)
    atomic_write(path, content.getvalue())


@torch.no_grad()
def _compute_missing(run: BuiltRun, samples: ComparedSamples, missing: Sequence[int], known: Any) -> Iterator[int]:
    """Fills `known` (rows, 2) on every rank, some samples at a time; yields how many are done."""
    opened, objective = run.opened, run.objective
    group, num_groups, part = opened.share
    size = opened.recipe.training.micro_batch_size
    stride = size * num_groups
    for round_start in range(0, len(missing), stride):
        start = round_start + group * size
        # A rank without samples left takes the first: all ranks run the same collectives.
        numbers = list(missing[start : start + size])
        batch = send_to_device(objective.on_host(part.of(samples.batch(numbers or [missing[0]]))), opened.device)
        sums, _ = objective.log_probabilities(run.model, batch)
        rows = [row for number in numbers for row in samples.rows_of(number)]
        # No more than its rows: a rank that took the first sample because it had none has sums, but no rows.
        for rows_of_rank, found in ranks.gather_objects((rows, sums.float().cpu().numpy()[: len(rows)])):
            known[rows_of_rank] = found
        yield min(round_start + stride, len(missing))


def _identity(run: BuiltRun, split: str) -> list[Any]:
    """Returns all that decides a reference: model, weights, configuration, precision and rows. Collective.

    It includes the weights' fingerprint, because a hub name stands for other weights once its branch has moved.
    """
    recipe, data, start = run.opened.recipe, run.data, run.fit.adapter
    # Only if there is one: what has been computed for full models stays known.
    of_adapter = [] if start is None else [start, recipe.adapter.model_dump(exclude={"start_from", "dropout"})]
    decided = [
        recipe.model.model_dump(),
        fingerprint(recipe.model),
        base_of(run.inner).config.to_json_string(use_diff=False),
        run.opened.accelerator.mixed_precision,
        # The fingerprint has images by name alone.
        data.fingerprint if data.content is None else f"{data.fingerprint} {data.content}",
        recipe.training.seed,
        split,
    ]
    return [*decided, *of_adapter]
