"""Adapters of stacked experts, held by expert, for expert parallelism (sharding/parallel/expert_parallel.py).

peft adapts a parameter (experts, outputs, inputs) by A, (experts x rank, inputs), an expert's rows one after another,
and by B, (outputs, rank x experts), of which no row belongs to one expert. Here B is held as A is. Saved, it is peft's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

LEAF = "stacked"
"""Name of the parameter in the place of peft's `weight`."""


class StackedOutputs(nn.Module):
    """B of the adapters of stacked experts, (experts x outputs, rank), in the place of peft's linear layer.

    Args:
        linear: of weight (outputs, rank x experts), without values yet.
    """

    def __init__(self, linear: nn.Linear, num_experts: int) -> None:
        super().__init__()
        self.num_outputs = linear.out_features
        rank = linear.in_features // num_experts
        self.stacked = nn.Parameter(linear.weight.new_zeros(num_experts * self.num_outputs, rank))

    @property
    def weight(self) -> torch.Tensor:
        """The weight for peft's wrapper: (outputs, rank, experts), as it reshapes its own, or 2-D for one expert."""
        return self.by_outputs(self.stacked).squeeze(2)

    def by_outputs(self, stacked: torch.Tensor) -> torch.Tensor:
        """Reshapes (experts x outputs, rank), for any number of experts, to (outputs, rank, experts)."""
        return stacked.view(-1, self.num_outputs, stacked.shape[1]).permute(1, 2, 0)


def hold_by_expert(model: nn.Module, adapter: str) -> None:
    """Makes the adapters of stacked experts hold B by expert."""
    from peft.tuners.lora.layer import ParamWrapper

    for layer in list(model.modules()):
        if isinstance(layer, ParamWrapper) and layer.num_experts > 1:
            layer.lora_B[adapter] = StackedOutputs(layer.lora_B[adapter], layer.num_experts)
            # Of one expert, which may be all that a rank has, peft makes the product as that of a linear layer.
            layer.fan_in_fan_out = getattr(layer.get_base_layer(), "is_transposed", False)


def each_expert(a: torch.Tensor, b: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A as (experts, rank, inputs) and B as (experts, outputs, rank) of peft's two matrices."""
    return a.reshape(experts, -1, a.shape[1]), by_experts(b, b.shape[1] // experts)


def by_experts(saved: torch.Tensor, rank: int) -> torch.Tensor:
    """Returns B of stacked experts as (experts, outputs, rank), of (outputs, rank x experts) as peft saves it."""
    return saved.reshape(saved.shape[0], rank, -1).permute(2, 0, 1)


def peft_name(name: str) -> str:
    """Returns peft's name of a parameter."""
    return f"{name.removesuffix(LEAF)}weight" if name.endswith(f".{LEAF}") else name


def as_peft_has_them(
    model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor | None]]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yields whole tensors under peft's names and in its shapes; tensors that peft has so are unchanged."""
    for name, tensor in tensors:
        if tensor is not None and peft_name(name) != name:
            tensor = model.get_submodule(name.rpartition(".")[0]).by_outputs(tensor).flatten(1)  # type: ignore[operator]
        yield peft_name(name), tensor
