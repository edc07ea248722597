"""Corrects bitsandbytes' own 4-bit layers, which transformers loads, on CPUs.

Two of bitsandbytes 0.50's kernels for CPUs differ from training: one takes scales of other blocks if a row of the
matrix is not a whole number of blocks, and one rounds to bfloat16.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn


def matrix_of_4_bits(packed: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
    """Returns the matrix, (outputs, inputs), that bitsandbytes has packed.

    Args:
        packed: its bytes.
        state: their `QuantState`.
        dtype: of the matrix.
    """
    from bitsandbytes.functional import dequantize_4bit

    blocks = copy.copy(state)
    # One block a row, of which each kernel finds the scale.
    blocks.shape, blocks.dtype = (math.prod(state.shape) // state.blocksize, state.blocksize), dtype
    matrix: torch.Tensor = dequantize_4bit(packed, blocks)
    return matrix.view(state.shape)


def plain_layer(layer: Any, dtype: torch.dtype) -> nn.Linear:
    """Returns an ordinary layer with the weights of one of bitsandbytes' 4-bit layers."""
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    matrix = matrix_of_4_bits(layer.weight.data, layer.weight.quant_state, dtype)
    plain.weight = nn.Parameter(matrix, requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.data.to(dtype), requires_grad=False)
    return plain


def make_exact_on_cpu(model: nn.Module) -> None:
    """Has bitsandbytes' 4-bit layers of a model on a CPU compute with the weights that training had."""
    for path, layer in list(model.named_modules()):
        if type(layer).__name__ != "Linear4bit":
            continue
        if layer.in_features % layer.weight.quant_state.blocksize:
            model.set_submodule(path, plain_layer(layer, layer.compute_dtype or torch.float32))
        else:
            # The kernel for AVX-512 rounds scales and products to bfloat16, where training has float32, and fails for
            # outputs that are no multiple of 32.
            layer.support_avx512bf16_for_cpu = False
