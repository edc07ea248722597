"""DoRA on layers whose matrices ranks cut: the norms of whole rows, from each rank's part of them.

peft's layer scales outputs by magnitudes over the norms of the rows of W + s B A. Where ranks cut outputs, a rank has
whole rows. Where they cut inputs, it has parts, whose squares are summed; each rank's share of the output is scaled
alike. The norms have no gradient (arXiv 2402.09353, section 4.3).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.sharding.tensor.moves import TensorRanks, joined


def cut_dora(magnitudes: nn.Module, ranks: TensorRanks, dim: int, length: int) -> None:
    """Makes peft's module of a layer's magnitudes compute with matrices that are cut.

    Args:
        dim: the dimension of the layer's weight that is cut: 0 for outputs, whose magnitudes are cut too; 1 for inputs.
        length: of that dimension in the whole weight.
    """
    module: Any = magnitudes
    if dim == 1:
        module.get_weight_norm = functools.partial(_norms_of_parts, ranks)
    module.forward = functools.partial(_run, module, module.forward, ranks, dim, length)


@torch.no_grad()
def _norms_of_parts(
    ranks: TensorRanks,
    weight: torch.Tensor,
    lora_weight: torch.Tensor,
    scaling: float,
    adapter_name: str | None = None,
) -> torch.Tensor:
    """Returns the norms of whole rows (outputs,), of parts of them (outputs, inputs / n)."""
    parts = weight + scaling * lora_weight
    squares = torch.linalg.vector_norm(parts, dim=1, dtype=torch.float32).square()
    if not ranks.is_planned:
        dist.all_reduce(squares, group=ranks.group)
    norms: torch.Tensor = squares.sqrt().to(weight.dtype)
    return norms


def _run(
    module: Any,
    forward: Callable[..., torch.Tensor],
    ranks: TensorRanks,
    dim: int,
    length: int,
    inputs: torch.Tensor,
    **given: Any,
) -> torch.Tensor:
    """Returns what is added to the layer's output, as peft's forward does; of whole matrices in `whole_layers`."""
    if not ranks.whole:
        return forward(inputs, **given)
    base, first, second, scaling = given["base_layer"], given["lora_A"], given["lora_B"], given["scaling"]
    with torch.no_grad():
        product = second.weight @ first.weight  # this rank's rows, or columns, of the whole
        weight = joined(base.weight + scaling * product, ranks, length, dim)
        scale = module.weight.detach() if dim else joined(module.weight.detach(), ranks, length, 0)
        scale = scale / torch.linalg.norm(weight, dim=1).to(scale.dtype)
    output = base(inputs) if given["base_result"] is None else given["base_result"]
    if base.bias is not None:
        output = output - joined(base.bias.detach(), ranks, length, 0)
    added: torch.Tensor = (scale - 1) * output + scale * second(first(inputs)) * scaling
    return added
