"""Exponential moving averages of the weights, sharded as the weights are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.sharding.fsdp2.shards import beside, local_tensor, state_once
from toolkit.sharding.offload import engine_of

AVERAGE = "average."
"""Prefix of the names of averages in a checkpoint."""


class Ema:
    """Averages of a model's trainable parameters, in float32: average = decay x average + (1 - decay) x weight.

    They begin with the model's current weights, without bias correction.

    Args:
        model: the model inside DDP, sharded already.
        decay: decay of one optimizer step.

    Attributes:
        tensors: name of a parameter -> its average, in the parameter's shape; a DTensor if the parameter is one. If
            optimizer state is offloaded, averages are on the host, next to the float32 masters that they average.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        self._to_host = engine_of(model) is not None
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        state = state_once(model)
        self.tensors = {name: self._float32_copy(tensor) for name, tensor in state.items() if name in trained}

    def _float32_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        local = local_tensor(tensor)
        device = torch.device("cpu") if self._to_host else local.device
        local = local.to(device, torch.float32, copy=True)
        return beside(tensor, local) if isinstance(tensor, DTensor) else local

    @torch.no_grad()
    def update(self) -> None:
        """Adds the weights of one optimizer step. If they are offloaded, it waits until they have been stepped."""
        state = state_once(self._model)
        for name, average in self.tensors.items():
            local = local_tensor(average)
            local.lerp_(local_tensor(state[name]).to(local.device, local.dtype), 1.0 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets the model compute with the averages inside the block, which takes memory for a copy of its weights."""
        state = state_once(self._model)
        last = {name: _clone_shard(state[name]) for name in self.tensors}
        self.put()
        try:
            yield
        finally:
            self._load(last)

    def put(self) -> None:
        """Loads the averages into the model permanently."""
        self._load(self.tensors)

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # Not strict: frozen parameters have no average, and tied weights have one.
        self._model.load_state_dict(tensors, strict=False)


def _clone_shard(tensor: torch.Tensor) -> torch.Tensor:
    local = local_tensor(tensor).clone()
    return beside(tensor, local) if isinstance(tensor, DTensor) else local
