"""bitsandbytes' own 4-bit layers compute with the weights that their bytes mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from support.four_bits import matrix_of
from support.ranks import alone, run_on_ranks
from torch import nn

from toolkit.model.quantised.quantised import make_exact_on_cpu

SHAPES = [(64, 64), (96, 128), (48, 48), (64, 32), (40, 200)]
"""Rows that are whole blocks have the kernel for AVX-512 to avoid, and others the one that mixes up scales."""


def difference(outputs: int, inputs: int, double: bool) -> float:
    """How far a layer's outputs are from those of the matrix read by hand, of the largest."""
    torch.manual_seed(0)
    layer = Linear4bit(inputs, outputs, bias=True, compute_dtype=torch.float32, quant_type="nf4")
    weight = Params4bit(torch.randn(outputs, inputs), False, quant_type="nf4", compress_statistics=double).to("cpu")
    layer.weight = weight
    model: Any = nn.ModuleDict({"layer": layer})
    model.dtype = torch.float32  # as a model of transformers has it
    make_exact_on_cpu(model)
    rows = torch.randn(3, 5, inputs)
    with torch.no_grad():
        found = model.eval()["layer"](rows)
        expected = rows @ matrix_of(weight.data, weight.quant_state).float().T + layer.bias
    return float((found - expected).abs().max() / expected.abs().max())


@alone
def differences() -> dict[str, float]:
    return {f"{shape}, {double=}": difference(*shape, double) for shape in SHAPES for double in (False, True)}


@pytest.mark.slow
def test_layers_are_exact_on_a_cpu() -> None:
    """In a process of its own: `read_by_hand` of another test would have replaced what is tested."""
    [found] = run_on_ranks(differences, 1)
    assert {case: far for case, far in found.items() if far > 1e-5} == {}
