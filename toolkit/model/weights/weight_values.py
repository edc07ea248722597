"""Checks the values in a model's files: refuses weights that are not finite, and reports matrices of zeros."""

from __future__ import annotations

import math

import torch
from torch import nn

from toolkit import ranks
from toolkit.errors import BadInputError, listed


class Values:
    """Checks the parameters of a model's files while they are read, so nothing is read twice.

    Args:
        source: the model's name, for errors.
        model: the model before adapters are added. Its buffers are not checked: they may be masks of minus infinity.
    """

    def __init__(self, source: str, model: nn.Module) -> None:
        self._source = source
        self._names = {name for name, _ in model.named_parameters()}
        self._zero: dict[str, bool] = {}
        self._not_finite: set[str] = set()

    def look(self, name: str, tensor: torch.Tensor) -> None:
        """Checks the rows of a parameter, (rows, ...), that this rank has read."""
        if name not in self._names or not tensor.is_floating_point():
            return
        # One pass without a copy; NaN is both the least and the largest.
        low, high = (bound.item() for bound in _wide(tensor).aminmax()) if tensor.numel() else (0.0, 0.0)
        if not math.isfinite(low) or not math.isfinite(high):
            self._not_finite.add(name)
        if tensor.ndim > 1:  # biases, and the norms of some models (Gemma), begin at zero
            self._zero[name] = self._zero.get(name, True) and low == high == 0

    def zero(self) -> list[str]:
        """Returns the matrices that are zero on all ranks. Collective.

        Raises:
            BadInputError: on every rank, if a parameter is not finite.
        """
        found = ranks.gather_objects(
            (sorted(self._not_finite), {name for name, zero in self._zero.items() if zero}, bool(self._zero))
        )
        wrong = sorted({name for names, _, _ in found for name in names})
        if wrong:
            raise BadInputError(
                f"model.name_or_path: {len(wrong)} of the weights of {self._source!r} hold numbers that are not "
                f"finite: {listed(wrong)}; no loss would be a number. Download them again, or name another model"
            )
        zero = [names for _, names, has_looked in found if has_looked]  # one rank that reads speaks for all
        return sorted(set.intersection(*zero)) if zero else []


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.element_size() == 1 else tensor  # torch compares no 8-bit floats
