"""The digest by which ranks compare what they hold alike."""

from __future__ import annotations

import pytest
import torch

from toolkit.sharding.tensor.copies import AT_ONCE, _digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_digest_tells_single_bits_and_places(dtype: torch.dtype) -> None:
    tensor = (torch.arange(AT_ONCE + 7) % 251).to(dtype).view(1, -1)
    other = tensor.clone()
    assert _digest(tensor) == _digest(other)
    for place in (0, 5, AT_ONCE - 1, AT_ONCE, AT_ONCE + 6):
        other = tensor.clone()
        other.view(torch.uint8)[0, place * tensor.element_size()] ^= 1
        assert _digest(tensor) != _digest(other), place
    other = tensor.clone()
    other[0, [1, 2]] = other[0, [2, 1]]
    assert _digest(tensor) != _digest(other)
    assert _digest(torch.empty(0, dtype=dtype)) == 0


def test_a_digest_tells_zeros_apart() -> None:
    """Which are equal as numbers."""
    assert _digest(torch.tensor([0.0])) != _digest(torch.tensor([-0.0]))
