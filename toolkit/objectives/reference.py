"""Log-probabilities of the model before its first step, computed once and kept, for preferences without adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from toolkit import ranks
from toolkit.data.cache import digest, kept
from toolkit.data.samples import PairSamples
from toolkit.objectives.preference import Preference
from toolkit.recipe.schema import ModelSection

FILE = "reference.npy"


def with_reference(
    accelerator: Accelerator,
    model: nn.Module,
    objective: Preference,
    samples: PairSamples,
    micro_batch_size: int,
    cache: Path,
    identity: Sequence[Any],
) -> PairSamples:
    """The samples with the reference's log-probabilities, (rows, 2), float32. Every rank calls this.

    Args:
        model: prepared, with the weights that it starts from.
        cache: where they are kept.
        identity: all that decides them.
    """
    folder = cache / f"reference-{digest(*identity)}"
    if not ranks.on_first_rank(folder.exists):
        found = _compute(accelerator, model, objective, samples, micro_batch_size)
        ranks.on_first_rank(lambda: kept(folder, lambda unfinished: np.save(unfinished / FILE, found)))
    reference = ranks.on_first_rank(lambda: np.load(folder / FILE, allow_pickle=False))
    return replace(samples, reference=reference)


@torch.no_grad()
def _compute(
    accelerator: Accelerator, model: nn.Module, objective: Preference, samples: PairSamples, micro_batch_size: int
) -> Any:
    """(rows, 2); rows that are in no sample are zero."""
    was_training = model.training
    # The reference is a fixed model: without dropout, whose masks would be kept for the whole run.
    model.eval()
    reference = np.zeros((len(samples.rows), 2), dtype=np.float32)
    mine: dict[int, list[float]] = {}
    stride = micro_batch_size * accelerator.num_processes
    for round_start in range(0, len(samples), stride):
        start = round_start + accelerator.process_index * micro_batch_size
        # A rank without samples left takes the first: all ranks run the same collectives.
        numbers = list(range(start, min(start + micro_batch_size, len(samples))))
        batch = send_to_device(objective.on_host(samples.batch(numbers or [0])), accelerator.device)
        sums, _ = objective.log_probabilities(model, batch)
        rows = [row for number in numbers for row in samples.pairs(number)]
        # Not strict: a rank that took the first sample for want of its own has sums, and no rows.
        mine |= dict(zip(rows, sums.tolist(), strict=False))
    for part in ranks.gather_objects(mine):
        reference[list(part)] = np.array(list(part.values()), dtype=np.float32).reshape(-1, 2)
    model.train(was_training)
    return reference


def identity_of(model: ModelSection, mixed_precision: str, data: str, seed: int, split: str) -> list[Any]:
    """All that decides a reference: the model and its files, the precision, the rows."""
    files = []
    if model.name_or_path is not None and (folder := Path(model.name_or_path).expanduser()).is_dir():
        files = [
            [file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(folder.glob("*.safetensors"))
        ]
    return [model.model_dump(), files, mixed_precision, data, seed, split]
