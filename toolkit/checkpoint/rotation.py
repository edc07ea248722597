"""Decides which checkpoints to delete once a new one counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    if settings.keep_best and (best := best_of(found)) is not None:
        kept.add(best[1].step)
    return [checkpoint for checkpoint in whole if checkpoint.step not in kept] + broken[:-1]


def best_of(found: Sequence[Checkpoint], recipe: dict[str, Any] | None = None) -> tuple[float, Manifest] | None:
    """Returns merit and manifest of the best checkpoint that counts, the first of equals, or None if none has a merit.

    Args:
        recipe: leave out those that were judged by another figure (`training.best_by`) than this recipe's.
    """
    whole = [one.manifest for one in found if one.manifest is not None and one.problem is None]
    judged = [(merit, manifest) for manifest in whole if (merit := _merit(manifest)) is not None]
    if recipe is not None:
        by = recipe["training"]["best_by"]
        judged = [one for one in judged if one[1].recipe["training"].get("best_by", "loss") == by]
    return max(judged, key=lambda one: one[0]) if judged else None


def _merit(manifest: Manifest) -> float | None:
    if manifest.merit is not None or manifest.eval_loss is None:
        return manifest.merit
    return -manifest.eval_loss
