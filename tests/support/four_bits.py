"""What the bytes of NF4 mean, by hand.

bitsandbytes 0.50 cannot be the reference on a CPU: if a row is not a whole number of blocks, its kernel gives parts of
blocks the scales of others, and weights are off by up to half of the largest.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 64
NESTED_BLOCK = 256
# Dettmers et al., QLoRA (2023), appendix E.
NF4 = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)


def matrix_of(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """The matrix of bitsandbytes' bytes and their state, in the dtype of the state."""
    scales = state.absmax
    if state.nested:
        scales = state.state2.code[scales.long()].view(-1)
        scales = scales * state.state2.absmax.repeat_interleave(NESTED_BLOCK)[: len(scales)] + state.offset
    flat = packed.view(torch.uint8).flatten()
    values = NF4[torch.stack([flat >> 4, flat & 15], dim=1).long()].view(-1, BLOCK)
    return (values * scales[:, None]).view(state.shape).to(state.dtype)


@torch.no_grad()
def as_dequantised(model: nn.Module, kept: Collection[str], double: bool = False) -> None:
    """Gives linear layers the weights that bitsandbytes makes of their 4 bits.

    Args:
        kept: paths of the layers that stay as they are.
        double: whether the scales are quantised, too.
    """
    from bitsandbytes.functional import quantize_4bit

    chosen = [layer for path, layer in model.named_modules() if type(layer) is nn.Linear and path not in kept]
    assert chosen
    for layer in chosen:
        packed, state = quantize_4bit(
            layer.weight.contiguous(), blocksize=BLOCK, quant_type="nf4", compress_statistics=double
        )
        layer.weight.copy_(matrix_of(packed, state))


def read_by_hand() -> None:
    """Has bitsandbytes' own layers in this process, and peft's around them, read their bytes by hand."""
    import bitsandbytes

    def multiply(inputs: torch.Tensor, packed: torch.Tensor, quant_state: Any, bias: Any = None) -> torch.Tensor:
        return F.linear(inputs, matrix_of(packed, quant_state).to(inputs.dtype), bias)

    bitsandbytes.matmul_4bit = multiply
    bitsandbytes.functional.dequantize_4bit = matrix_of
