"""Collects the state of a run as named tensors, and the state of this rank's random number generators."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from toolkit.errors import first_line
from toolkit.model.adapters.adapters import has_adapter, trained_names
from toolkit.sharding.fsdp2.shards import beside, local_tensor, state_once
from toolkit.user_function import generators, set_generators, set_streams, streams

MODEL, OPTIMIZER = "model.", "optimizer."
"""The prefixes of the model's and the optimizer's tensors. Averages start with `average.`"""


def named_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, more: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """Returns the live tensors of model, optimizer and extensions by name. Sharded ones are DTensors of whole shape.

    Tied weights are there once. An adapted model has only its trained tensors, because the others are in the base. With
    offload the tensors are the float32 masters and the moments on the host. A 0-dim tensor is returned with shape (1,).
    A quantised moment is returned as its float32 values, which are a copy: see `put_back`.

    Args:
        model: not wrapped in DDP.
        optimizer: torch's optimizer.
        more: tensors of extensions (any shape), by their names in a checkpoint.
    """
    state = state_once(model)
    kept_names = trained_names(model) if has_adapter(model) else state.keys()
    tensors = {f"{MODEL}{name}": tensor for name, tensor in state.items() if name in kept_names}
    tensors |= more
    tensors |= {name: unquantised(value) for name, value in _optimizer_tensors(model, optimizer)}
    return {name: tensor.detach() if tensor.ndim else tensor.detach().view(1) for name, tensor in tensors.items()}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, kept in optimizer.state.items():
        for key, value in kept.items():
            if isinstance(value, torch.Tensor):
                yield f"{OPTIMIZER}{parameters[id(parameter)]}.{key}", value


@torch.no_grad()
def first_non_finite(tensors: dict[str, torch.Tensor], parameters: Iterable[str]) -> str | None:
    """Returns the first of the model's parameters that is not finite on this rank, or None if all are.

    Args:
        tensors: tensors of any shape, as `named_tensors` returns them.
        parameters: the names of the parameters to check. Not buffers: a mask may hold infinities.
    """
    for name in parameters:
        local = local_tensor(tensors[MODEL + name]) if MODEL + name in tensors else torch.empty(0)
        if local.is_floating_point() and local.numel():
            # One pass and no memory, unlike `isfinite().all()`. NaN is passed on.
            extremes = torch.stack(torch.aminmax(local))
            if not extremes.isfinite().all():
                return name
    return None


def is_quantised(tensor: torch.Tensor) -> bool:
    """Returns whether this rank's part of a tensor (any shape) is of a subclass, like torchao's moments."""
    return type(local_tensor(tensor)) not in (torch.Tensor, nn.Parameter)


def unquantised(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the float32 values of a quantised tensor, in its shape and sharding, or another tensor unchanged.

    Blocks of values share a scale, and the start of the blocks depends on the number of ranks. Only plain values can be
    loaded on any number.
    """
    if not is_quantised(tensor):
        return tensor
    values = local_tensor(tensor).dequantize().float()
    return beside(tensor, values) if isinstance(tensor, DTensor) else values


@torch.no_grad()
def put_back(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Quantises loaded values into the optimizer's quantised moments.

    Args:
        model: the model.
        optimizer: its optimizer.
        tensors: the tensors (any shape) that `named_tensors` returned, filled since then.
    """
    for name, value in _optimizer_tensors(model, optimizer):
        if is_quantised(value):
            quantise_into(local_tensor(value), local_tensor(tensors[name]))


def quantise_into(moment: Any, values: torch.Tensor) -> None:
    """Sets a quantised moment to dequantised values. In the same blocks it gets the same codes again.

    Args:
        moment: a tensor of torchao with 8 or 4 bits or float8, changed in place.
        values: float32, of the moment's shape.
    """
    if not hasattr(moment, "qmap"):  # float8, whose range is symmetric
        moment.copy_(values)
        return
    # The signed maps end at 1 and above -1. `copy_` scales a block by its largest absolute value, so a block in which
    # that value is negative would shrink each time.
    blocks, qmap = values.reshape(-1, moment.block_size), moment.qmap
    scale = blocks.amax(1)
    if qmap.min() < 0:
        scale = torch.maximum(scale, blocks.amin(1) / qmap.min())
    scale = scale.clip(1e-12)
    codes = torch.bucketize(blocks / scale[:, None], (qmap[1:] + qmap[:-1]) / 2, right=True).to(torch.uint8).flatten()
    if moment.codes.numel() < codes.numel():  # 4 bits: two to a byte
        codes = codes[::2] << 4 | codes[1::2]
    moment.codes.copy_(codes.view_as(moment.codes))
    moment.scale.copy_(scale)


def with_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, more: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Has the optimizer create the state of its first step. Returns `named_tensors`, with tensors of any shape."""
    # torch creates missing state by a step on zero gradients. When these counted as unused by all ranks, every resumed
    # run lost its moments (docs/log/sharding.md).
    get_optimizer_state_dict(model, optimizer)
    return named_tensors(model, optimizer, more)


def host_copy(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies this rank's parts of tensors (any shape) to the host, so that training does not change them."""
    return {name: _copy_to_host(tensor) for name, tensor in tensors.items()}


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    # Copy even if it is on the host already: the next step changes the live tensor.
    local = local_tensor(tensor).to("cpu", copy=True)
    return beside(tensor, local) if isinstance(tensor, DTensor) else local


def described(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, list[int]]]:
    """Returns dtype and whole shape of each tensor by name, for the manifest."""
    return {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()}


def first_failure(error: CheckpointException) -> str:
    """Names the first rank that failed inside torch.distributed.checkpoint, with its message."""
    rank, found = next(iter(error.failures.items()))
    return f"rank {rank}: {first_line(found[0])}"


def random_states() -> dict[str, Any]:
    """Returns the states of this rank's random number generators and of own code's streams, as plain JSON values."""
    own = {name: _plain(states) for name, states in streams().items()}
    return _plain(generators()) | ({"own": own} if own else {})


def restore_random_states(states: dict[str, Any]) -> None:
    """Restores the states that `random_states` returned."""
    set_generators(_from_plain(states))
    set_streams({name: _from_plain(own) for name, own in states.get("own", {}).items()})


def _plain(states: dict[str, Any]) -> dict[str, Any]:
    found = dict(states)
    if "numpy" in states:
        name, keys, *rest = states["numpy"]
        found["numpy"] = [name, np.asarray(keys).tolist(), *rest]
    return found | {name: _to_base64(states[name]) for name in ("torch", "cuda") if name in states}


def _from_plain(states: dict[str, Any]) -> dict[str, Any]:
    version, numbers, gauss = states["python"]
    name, keys, *rest = states["numpy"]
    found = {"python": (version, tuple(numbers), gauss), "numpy": (name, np.array(keys, dtype=np.uint32), *rest)}
    return found | {name: _from_base64(states[name]) for name in ("torch", "cuda") if name in states}


def _to_base64(state: torch.Tensor) -> str:
    # Text for JSON: nothing in a checkpoint is a pickle.
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _from_base64(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
