"""Compares the two runs and makes the rows of the report: each difference with its tolerance."""

from __future__ import annotations

import math
from collections.abc import Set

import torch

from toolkit.errors import counted, listed
from toolkit.verify.results import FAILED, NOT_USED, Outcome, PlainRun, Row, ShardedRun, measured

FLOAT32_LOSS, FLOAT32_NORM, FLOAT32_WEIGHTS = 1e-6, 1e-5, 1e-5
FLOAT32_SIZE, FLOAT32_LOAD, FROZEN = 1e-4, 1e-6, 1e-6
MIXED_LOSS, MIXED_NORM = 2e-2, 1e-1
MIXED_SIZE, MIXED_LOAD, MIXED_FROZEN = 0.3, 0.05, 1e-2
MOST_NAMES = 10
"""The most parameters that a note names."""

NEGLIGIBLE = {False: 1e-4, True: 1e-2}
"""Whether compute is in 16 bits -> the smallest gradient, as a share of the largest one, against which a difference is
measured. A smaller gradient may be rounding alone, like that of a key's bias."""


def compare(plain: PlainRun, sharded: ShardedRun, dtype: str) -> list[Row]:
    """Returns a row for each check.

    Args:
        plain: the result of the plain loop.
        sharded: the result of the ranks.
        dtype: the dtype in which the recipe holds the weights.
    """
    mixed = sharded.precision != "no" or dtype != "float32"
    expected, found = plain.outcome, sharded.outcome
    loss_tolerance = MIXED_LOSS if mixed else FLOAT32_LOSS
    # Of fresh samples the loss is a mean of advantages, which is near 0.
    least = 1e-30 if plain.drawn is None else 1.0
    rows = [
        _series_row("loss", found.losses, expected.losses, loss_tolerance, least),
        _series_row("gradient norm", found.grad_norms, expected.grad_norms, MIXED_NORM if mixed else FLOAT32_NORM),
        _weights_row(plain, found.weights, mixed, dtype),
        _gradients_row(found, expected, mixed, plain.towers),
    ]
    if plain.trained != set(expected.weights):
        rows.insert(3, _frozen_row(plain, found.weights, mixed))
    if plain.drawn is not None:
        rows.insert(0, _samples_row(len(plain.drawn[0]), sharded.differ, mixed))
    if expected.loads or found.loads:
        rows.append(_loads_row(found.loads, expected.loads, MIXED_LOAD if mixed else FLOAT32_LOAD))
        rows.append(_series_row("balance loss", found.balance, expected.balance, loss_tolerance))
    return rows


def _samples_row(count: int, differ: int | None, mixed: bool) -> Row:
    """Returns the row of the first step's completions; the ranks draw `differ` of them differently."""
    note = f"of the first step's {counted(count, 'completion')} the ranks draw {differ} otherwise"
    if mixed:  # a token changes as soon as two are almost equally likely
        return Row("samples", None, None, NOT_USED, f"{note}; not compared in 16 bits")
    return measured("samples", math.inf if differ is None else differ, 0, note)


def _series_row(check: str, found: list[float], expected: list[float], tolerance: float, least: float = 1e-30) -> Row:
    """Returns the row of the largest difference among the steps, relative to a number of at least `least`."""
    if len(found) != len(expected):
        return Row(check, None, tolerance, FAILED, f"{len(found)} sharded steps, {len(expected)} plain ones")
    differences = [abs(a - b) / max(abs(b), least) for a, b in zip(found, expected, strict=True)]
    worst = max(range(len(found)), key=lambda i: math.inf if math.isnan(differences[i]) else differences[i])
    kind = "absolute" if least == 1.0 else "relative"
    note = f"{kind}; at step {worst + 1} {found[worst]:.7g} sharded, {expected[worst]:.7g} plain"
    return measured(check, differences[worst], tolerance, note)


def weight_tolerance(reach: float, largest: float, steps: int, *, mixed: bool, dtype: str) -> tuple[float, float]:
    """Returns absolute tolerances of final weights: for elements with a steady gradient, and for all others.

    Without mixed precision, steady elements get 1e-5, but at most a tenth of the reach: AdamW moves a weight by about
    the learning rate whatever its gradient's size, so early in a warm-up 1e-5 would accept anything. With mixed
    precision they get twice the reach, and so do the others. The rounding of each step is added.

    Args:
        reach: the sum of the learning rates.
        largest: the largest absolute weight.
        steps: the number of optimizer steps.
        mixed: whether the sharded run computes in 16 bits.
        dtype: the dtype in which the weights are held.
    """
    rounding = steps * largest * torch.finfo(getattr(torch, dtype)).eps
    steady = 2 * reach if mixed else min(FLOAT32_WEIGHTS, reach / 10)
    return steady + rounding, 2 * reach + rounding


def _weights_row(plain: PlainRun, found: dict[str, torch.Tensor], mixed: bool, dtype: str) -> Row:
    """Returns the row of the trained weights."""
    expected = {name: weight for name, weight in plain.outcome.weights.items() if name in plain.trained}
    unlike = _mismatched_tensors(found, plain.outcome.weights)
    if unlike:
        return Row("weights", None, None, FAILED, unlike)
    largest = max(weight.abs().max().item() for weight in expected.values())
    # Adapters are held in float32, whatever the base is.
    held = dtype if len(expected) == len(plain.outcome.weights) else "float32"
    tolerance, loose = weight_tolerance(plain.reach, largest, len(plain.outcome.losses), mixed=mixed, dtype=held)
    steady, others, num_others = _weight_differences(plain, expected, found)
    where = max(steady, key=lambda name: steady[name])
    row = measured("weights", steady[where], tolerance, f"absolute; in {where}")
    note = row.note
    if num_others and not mixed:
        note += f"; {num_others:,} whose gradient is near rounding within {loose:.1e}"
    astray = [name for name, difference in others.items() if difference > loose]
    if astray:
        note += f"; farther than that: {listed(astray, MOST_NAMES)}"
    return Row("weights", row.found, tolerance, FAILED if astray else row.verdict, note)


def _mismatched_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str | None:
    """Names the tensors that are missing or have another shape, or returns None if there are none."""
    names = [name for name in expected if name not in found or found[name].shape != expected[name].shape]
    return f"missing in the sharded model, or of another shape: {listed(names, MOST_NAMES)}" if names else None


def _weight_differences(
    plain: PlainRun, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> tuple[dict[str, float], dict[str, float], int]:
    """Returns the largest difference in each parameter among steady elements and among the others. NaN is infinite.

    The last value is the number of the other elements.
    """
    steady_ones, others, num_others = {}, {}, 0
    for name, weight in expected.items():
        difference = _absolute_difference(found[name], weight)
        steady = plain.steady.get(name, torch.ones_like(weight, dtype=torch.bool))
        steady_ones[name] = difference.where(steady, 0.0).max().item()
        others[name] = difference.where(~steady, 0.0).max().item()
        num_others += int((~steady).sum())
    return steady_ones, others, num_others


def _absolute_difference(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    difference = (found.to(expected) - expected).abs()
    return difference.where(~difference.isnan(), math.inf)


def _frozen_row(plain: PlainRun, found: dict[str, torch.Tensor], mixed: bool) -> Row:
    """Checks that frozen weights are unchanged. A quantised base has bitsandbytes' values of whole matrices."""
    expected = {name: weight for name, weight in plain.outcome.weights.items() if name not in plain.trained}
    unlike = _mismatched_tensors(found, expected)
    if unlike:
        return Row("frozen weights", None, None, FAILED, unlike)
    differences = {
        name: _absolute_difference(found[name], weight).max().item() / max(weight.abs().max().item(), 1e-30)
        for name, weight in expected.items()
    }
    where = max(differences, key=lambda name: differences[name])
    note = f"of {len(expected):,} tensors, as a share of the tensor's largest; in {where}"
    return measured("frozen weights", differences[where], MIXED_FROZEN if mixed else FROZEN, note)


def _gradients_row(found: Outcome, expected: Outcome, mixed: bool, towers: Set[str]) -> Row:
    """Compares each parameter's gradient. A global norm would hide a router, AdamW's update hides a gradient's size."""
    left_out = towers & set(found.without_gradient) & set(expected.without_gradient)
    missing = [name for name in found.without_gradient if name not in left_out]
    if len(found.losses) == 1 and set(missing) <= set(expected.without_gradient):
        # While B is zero, A has no gradient.
        missing = [name for name in missing if ".lora_A." not in name and ".lora_embedding_B." not in name]
    if missing:
        note = f"no gradient in any step: {listed(missing, MOST_NAMES)}"
        if set(missing) <= set(expected.without_gradient):
            note += "; nor in the plain loop: the model does not use them"
        return Row("gradients", None, None, FAILED, note)
    largest = max(expected.sizes.values(), default=0.0)
    differences = {
        name: abs(found.sizes.get(name, math.inf) - size) / max(size, NEGLIGIBLE[mixed] * largest, 1e-30)
        for name, size in expected.sizes.items()
    }
    where = max(differences, key=lambda name: math.inf if math.isnan(differences[name]) else differences[name])
    note = f"size of each parameter's mean gradient, relative; in {where}"
    if left_out:
        note += f"; the model leaves out {listed(sorted(left_out), MOST_NAMES)}, in the plain loop, too"
    return measured("gradients", differences[where], MIXED_SIZE if mixed else FLOAT32_SIZE, note)


def _loads_row(found: list[list[list[float]]], expected: list[list[list[float]]], tolerance: float) -> Row:
    """Returns the row of each expert's share of choices."""
    pairs = [(_flatten(a), _flatten(b)) for a, b in zip(found, expected, strict=False)]
    if len(found) != len(expected) or any(len(a) != len(b) for a, b in pairs):
        return Row("expert load", None, tolerance, FAILED, "other layers or experts than in the plain loop")
    difference = max(abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True))
    return measured("expert load", difference, tolerance, "absolute, of each step, layer and expert")


def _flatten(loads: list[list[float]]) -> list[float]:
    return [share for layer in loads for share in layer]
