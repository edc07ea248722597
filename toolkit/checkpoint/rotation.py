"""Decides which checkpoints to delete once a new one counts."""

from __future__ import annotations

from toolkit.checkpoint.manifest import Checkpoint, Manifest
from toolkit.recipe.schema import CheckpointSection


def superseded(found: list[Checkpoint], settings: CheckpointSection) -> list[Checkpoint]:
    """Returns the checkpoints to delete, by `keep_last` and `keep_best`.

    Checkpoints that do not count are not counted among those to keep, and stay. Of those with non-finite values only
    the last stays.
    """
    whole = [checkpoint for checkpoint in found if checkpoint.manifest is not None and checkpoint.problem is None]
    if settings.num_kept is None:
        return []
    broken = [checkpoint for checkpoint in found if checkpoint.manifest and checkpoint.manifest.non_finite is not None]
    kept = {checkpoint.step for checkpoint in whole[-settings.num_kept :]}
    if settings.keep_best:
        merits = {c.step: _merit(c.manifest) for c in whole if c.manifest is not None}
        known = {step: merit for step, merit in merits.items() if merit is not None}
        kept |= {max(known, key=known.__getitem__)} if known else set()
    return [checkpoint for checkpoint in whole if checkpoint.step not in kept] + broken[:-1]


def _merit(manifest: Manifest) -> float | None:
    if manifest.merit is not None or manifest.eval_loss is None:
        return manifest.merit
    return -manifest.eval_loss
