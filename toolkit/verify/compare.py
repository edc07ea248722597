"""The rows of the report: how far the sharded run may be from the plain one, and how far it is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from toolkit.verify.results import FAILED, NOT_USED, OK, REHEARSED_DROPOUT, Outcome, PlainRun, Row, ShardedRun, measured

FLOAT32_LOSS, FLOAT32_NORM, FLOAT32_WEIGHTS = 1e-6, 1e-5, 1e-5
MIXED_LOSS, MIXED_NORM = 2e-2, 1e-1
REPLAY_TOLERANCE = {"cpu": 0.0, "cuda": 1e-3}
"""Of gradients, as a share of the largest; on GPUs attention's backward adds up in any order."""


def compare(plain: PlainRun, sharded: ShardedRun, dtype: str) -> list[Row]:
    """A row per check.

    Args:
        dtype: in which the recipe holds the weights.
    """
    mixed = sharded.precision != "no" or dtype != "float32"
    expected, found = plain.outcome, sharded.outcome
    return [
        _series_row("loss", found.losses, expected.losses, MIXED_LOSS if mixed else FLOAT32_LOSS),
        _series_row("gradient norm", found.grad_norms, expected.grad_norms, MIXED_NORM if mixed else FLOAT32_NORM),
        _weights_row(plain, found.weights, mixed, dtype),
        _gradients_row(found, expected),
        _replay_row(sharded.replay, sharded.device),
        plain.packing,
    ]


def _series_row(check: str, found: list[float], expected: list[float], tolerance: float) -> Row:
    """The largest relative difference of a step."""
    if len(found) != len(expected):
        return Row(check, None, tolerance, FAILED, f"{len(found)} sharded steps, {len(expected)} plain ones")
    differences = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(found, expected, strict=True)]
    worst = max(range(len(found)), key=lambda i: math.inf if math.isnan(differences[i]) else differences[i])
    note = f"relative; at step {worst + 1} {found[worst]:.7g} sharded, {expected[worst]:.7g} plain"
    return measured(check, differences[worst], tolerance, note)


def weight_tolerance(reach: float, largest: float, steps: int, *, mixed: bool, dtype: str) -> tuple[float, float]:
    """Absolute tolerances of final weights: of elements with a steady gradient, and of the others.

    Without mixed precision 1e-5, but at most a tenth of the reach: AdamW moves a weight by about the learning
    rate whatever its gradient's size, so that early in a warm-up 1e-5 would pass anything. With it, and
    for the others, twice the reach. The rounding of each step comes on top.

    Args:
        reach: the sum of the learning rates.
        largest: weight, absolute.
        dtype: in which the weights are held.
    """
    rounding = steps * largest * torch.finfo(getattr(torch, dtype)).eps
    steady = 2 * reach if mixed else min(FLOAT32_WEIGHTS, reach / 10)
    return steady + rounding, 2 * reach + rounding


def _weights_row(plain: PlainRun, found: dict[str, torch.Tensor], mixed: bool, dtype: str) -> Row:
    expected = plain.outcome.weights
    # Told by name: nothing of these can be subtracted.
    unlike = [name for name in expected if name not in found or found[name].shape != expected[name].shape]
    if unlike:
        return Row(
            "weights", None, None, FAILED, f"missing in the sharded model, or of another shape: {listed(unlike)}"
        )
    largest = max(weight.abs().max().item() for weight in expected.values())
    tolerance, loose = weight_tolerance(plain.reach, largest, len(plain.outcome.losses), mixed=mixed, dtype=dtype)
    steady, others, num_others = _weight_differences(plain, found)
    where = max(steady, key=lambda name: steady[name])
    row = measured("weights", steady[where], tolerance, f"absolute; in {where}")
    note = row.note
    if num_others and not mixed:
        note += f"; {num_others:,} whose gradient is near rounding within {loose:.1e}"
    astray = [name for name, difference in others.items() if difference > loose]
    if astray:
        note += f"; farther than that: {listed(astray)}"
    return Row("weights", row.found, tolerance, FAILED if astray else row.verdict, note)


def _weight_differences(
    plain: PlainRun, found: dict[str, torch.Tensor]
) -> tuple[dict[str, float], dict[str, float], int]:
    """Largest difference by parameter: of the steady elements, of the others; and how many those are.

    NaN counts as infinite.
    """
    steady_ones, others, num_others = {}, {}, 0
    for name, weight in plain.outcome.weights.items():
        difference = (found[name].to(weight) - weight).abs()
        difference = difference.where(~difference.isnan(), math.inf)
        steady = plain.steady.get(name, torch.ones_like(weight, dtype=torch.bool))
        steady_ones[name] = difference.where(steady, 0.0).max().item()
        others[name] = difference.where(~steady, 0.0).max().item()
        num_others += int((~steady).sum())
    return steady_ones, others, num_others


def _gradients_row(found: Outcome, expected: Outcome) -> Row:
    if not found.without_gradient:
        return Row("gradients", None, None, OK, "every trainable parameter got one")
    note = f"no gradient in any step: {listed(found.without_gradient)}"
    if set(found.without_gradient) <= set(expected.without_gradient):
        note += "; nor in the plain loop: the model does not use them"
    return Row("gradients", None, None, FAILED, note)


def _replay_row(replay: dict[str, float] | None, device: str) -> Row:
    check = "dropout replay"
    if replay is None:
        return Row(check, None, None, NOT_USED, "no activation checkpointing")
    if not replay["blocks"]:
        return Row(check, None, None, FAILED, "no block ran under checkpointing, though the settings ask for it")
    # Another random state changed nothing, so an equal replay would be no proof.
    if not replay["effect"]:
        return Row(check, None, None, NOT_USED, "the model has no dropout to replay")
    note = f"gradients with {replay['blocks']:.0f} blocks checkpointed and with none, dropout {REHEARSED_DROPOUT}"
    return measured(check, replay["difference"], REPLAY_TOLERANCE[device], note)


def listed(names: Sequence[str], shown: int = 10) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
