"""Corrects bitsandbytes' own 4-bit layers, which transformers loads, on CPUs.

Two of bitsandbytes 0.50's kernels for CPUs differ from training: one takes scales of other blocks if a row of the
matrix is not a whole number of blocks, and one rounds to bfloat16.
"""

from __future__ import annotations

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
    from bitsandbytes.functional import dequantize_blockwise

    scales = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
    return matrix_of_blocks(packed, scales.float(), state.blocksize, state.quant_type, dtype).view(state.shape)


def matrix_of_blocks(
    packed: torch.Tensor, scales: torch.Tensor, block: int, kind: str, dtype: torch.dtype
) -> torch.Tensor:
    """Returns blocks of numbers, (blocks, `block`), from their bytes, (bytes, 1), and scales, (blocks,) in float32."""
    # One block a row: bitsandbytes' kernel for CPUs gives a block that lies in two rows the scale of another one.
    found: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        packed, scales, block, kind, (len(scales), block), dtype
    )
    return found


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
