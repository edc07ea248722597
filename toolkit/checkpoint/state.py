"""The state of a run as named tensors, and of this rank's random number generators."""

from __future__ import annotations

import base64
import random
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
from toolkit.model.adapters import has_adapter, trained_names
from toolkit.sharding.shards import beside, local_tensor, state_once

MODEL, OPTIMIZER = "model.", "optimizer."
"""Come before the names of the model's tensors, and of the optimizer's; averages begin with `average.`"""


def named_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, more: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """The live tensors of model, optimizer and what else is saved: DTensors where they are sharded, tied weights once.

    Of an adapted model only what is trained: the rest is where it was. With offload they are the float32
    masters and the moments on the host, as without. A tensor without dimensions is shown with one, and a
    quantised moment as the float32 values it stands for, which is a copy: see `put_back`.

    Args:
        model: not wrapped in DDP.
        more: tensors of extensions, by their names in a checkpoint.
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


SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")
"""Keys of an optimizer's running means of squared gradients."""


@torch.no_grad()
def first_impossible(tensors: dict[str, torch.Tensor]) -> str | None:
    """The first tensor of a state on this rank that no training leaves, and why; None: there is none.

    Weights, averages and moments are finite, and a mean of squares is not below zero. Buffers of a model may be
    anything.
    """
    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        if name.startswith(MODEL) or not local.is_floating_point() or not local.numel():
            continue
        low, high = torch.aminmax(local)
        if not (low.isfinite() and high.isfinite()):
            return f"{name} holds values that are not finite"
        if low < 0 and name.endswith(SECOND_MOMENTS):
            return f"{name} holds values below zero ({low.item():.3g}), and is a mean of squares"
    return None


@torch.no_grad()
def first_non_finite(tensors: dict[str, torch.Tensor], parameters: Iterable[str]) -> str | None:
    """The first of the model's parameters that is not finite on this rank; None if all are.

    Args:
        parameters: their names. Buffers are not looked at: a mask may hold infinities.
    """
    for name in parameters:
        local = local_tensor(tensors[MODEL + name]) if MODEL + name in tensors else torch.empty(0)
        if local.is_floating_point() and local.numel():
            # One pass and no memory, unlike `isfinite().all()`; what is not a number comes through as it is.
            extremes = torch.stack(torch.aminmax(local))
            if not extremes.isfinite().all():
                return name
    return None


def is_quantised(tensor: torch.Tensor) -> bool:
    """Whether this rank's part is a tensor subclass, as torchao's moments are."""
    return type(local_tensor(tensor)) not in (torch.Tensor, nn.Parameter)


def unquantised(tensor: torch.Tensor) -> torch.Tensor:
    """The float32 values of a quantised tensor, sharded as it is; another tensor as it is.

    Blocks of values share a scale, and where they begin depends on the number of ranks: only values fit any.
    """
    if not is_quantised(tensor):
        return tensor
    values = local_tensor(tensor).dequantize().float()
    return beside(tensor, values) if isinstance(tensor, DTensor) else values


@torch.no_grad()
def put_back(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Quantises the optimizer's tensors from what `named_tensors` gave, filled since."""
    for name, value in _optimizer_tensors(model, optimizer):
        if is_quantised(value):
            quantise_into(local_tensor(value), local_tensor(tensors[name]))


def quantise_into(moment: Any, values: torch.Tensor) -> None:
    """Gives a quantised moment the values that one of its kind stood for: in the same blocks, the same codes."""
    if not hasattr(moment, "qmap"):  # of float8, which reaches as far down as up
        moment.copy_(values)
        return
    # The signed maps end at 1 and above -1. By its largest value, as `copy_` has it, a block with that one below zero
    # would shrink each time.
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
    """`named_tensors`, after the optimizer has made the tensors that it otherwise makes in its first step."""
    # torch makes missing state by a step on zeros of its own. Taken for parameters that no rank used, these once
    # cost every resumed run its moments (docs/log.md).
    get_optimizer_state_dict(model, optimizer)
    return named_tensors(model, optimizer, more)


def host_copy(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy on the host, which training does not touch any more."""
    return {name: _copied(tensor) for name, tensor in tensors.items()}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    # A copy also where it is on the host already: the next step changes the live tensor.
    local = local_tensor(tensor).to("cpu", copy=True)
    return beside(tensor, local) if isinstance(tensor, DTensor) else local


def described(tensors: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Name -> [type, shape of the whole], for the manifest."""
    return {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()}


def first_failure(error: CheckpointException) -> str:
    """The first rank that failed inside torch.distributed.checkpoint, and what it said."""
    rank, found = next(iter(error.failures.items()))
    return f"rank {rank}: {first_line(found[0])}"


def random_states() -> dict[str, Any]:
    """This rank's random number generators, as plain values."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "torch": _encoded(torch.get_rng_state()),
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
    }
    if torch.cuda.is_available():
        # Of this rank's device alone; the other devices are other ranks'.
        states["cuda"] = _encoded(torch.cuda.get_rng_state())
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(_decoded(states["torch"]))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decoded(states["cuda"]))


def _encoded(state: torch.Tensor) -> str:
    # Text, because it goes into JSON: nothing of a checkpoint is a pickle.
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decoded(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
