"""Defines the settings of offload, and checks which optimizers it supports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from toolkit.errors import BadInputError

ExecutorName = Literal["auto", "cpu_torch", "cpu_fused", "device_stream"]


@dataclass(frozen=True)
class OffloadSettings:
    """How optimizer state is held in host memory and stepped.

    Attributes:
        executor: `cpu_torch` runs torch's fused optimizer on the host, `cpu_fused` runs our own one-pass kernel,
            `device_stream` streams the state through the device. `auto` is `cpu_fused` where it can be built, and else
            `cpu_torch`.
        device_state_gib: optimizer state that stays on the device of each rank (GiB). It is that of the root and the
            first units, whose step has the least time to overlap.
        threads: threads of the step on the host. None means the rank's share of the cores minus two.
        during_backward: whether to step each unit as its gradient arrives. Only without clipping, and a step with a
            gradient that is not finite can then not be skipped.

    Raises:
        BadInputError: if a value is not allowed.
    """

    executor: ExecutorName = "auto"
    device_state_gib: float = 0.0
    threads: int | None = None
    during_backward: bool = False

    def __post_init__(self) -> None:
        if self.executor not in get_args(ExecutorName):
            allowed = ", ".join(get_args(ExecutorName))
            raise BadInputError(f"offload executor: unknown {self.executor!r}; allowed: {allowed}")
        size = self.device_state_gib
        if not (isinstance(size, int | float) and math.isfinite(size) and size >= 0):
            raise BadInputError(f"device_state_gib: {size!r}; allowed: a number of GiB from 0 up")
        if self.threads is not None and self.threads < 1:
            raise BadInputError(f"offload threads: {self.threads}; allowed: 1 or more, or unset")


def parse_offload(offload: str | OffloadSettings | None) -> OffloadSettings | None:
    """Returns the settings of the word `optimizer`, or None for `none`. Returns settings and None unchanged.

    Raises:
        BadInputError: if the word is unknown.
    """
    if offload is None or isinstance(offload, OffloadSettings):
        return offload
    word = offload.strip().lower()
    if word not in ("none", "optimizer"):
        raise BadInputError(f"offload: unknown {offload!r}; allowed: none, optimizer, or OffloadSettings(...)")
    return OffloadSettings() if word == "optimizer" else None


def state_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Returns torch's names of the tensors that the optimizer keeps in the shape of each parameter.

    Raises:
        BadInputError: if the optimizer's step is not known to be elementwise, or a setting is not supported.
    """
    for group in optimizer.param_groups:
        for option in ("capturable", "differentiable"):
            if group.get(option):
                raise BadInputError(f"offload: {option} optimizers are not supported; leave {option} out")
    # The classes themselves: a subclass may step in any way. Muon is one of AdamW's, and needs whole matrices.
    if type(optimizer) in (torch.optim.AdamW, torch.optim.Adam):
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if _any_group_sets(optimizer, "amsgrad") else names
    if type(optimizer) is torch.optim.SGD:
        # torch's first step takes the whole gradient as its buffer. Ours is there before, as zeros, and would be given
        # the dampened one. Without dampening both are the same.
        if _any_group_sets(optimizer, "dampening"):
            raise BadInputError("offload: SGD with dampening is not supported; set dampening=0")
        return ("momentum_buffer",) if _any_group_sets(optimizer, "momentum") else ()
    raise BadInputError(
        f"offload: the optimizer is {type(optimizer).__module__}.{type(optimizer).__qualname__}; supported: "
        "torch.optim.AdamW, torch.optim.Adam and torch.optim.SGD. Use one of them, or no offload"
    )


def counts_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer keeps the number of steps. SGD does not."""
    return not isinstance(optimizer, torch.optim.SGD)


def fused_kernel_refuses(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns why the `cpu_fused` executor cannot step this optimizer, or None if it can."""
    if type(optimizer) is not torch.optim.AdamW:
        return f"it steps AdamW, not {type(optimizer).__name__}"
    for option in ("amsgrad", "maximize"):
        if _any_group_sets(optimizer, option):
            return f"it has no {option}"
    return None


def hyper_parameters(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """Returns a copy of the current settings of every group. Schedulers change them right after `step`."""
    return tuple(_step_settings(group) for group in optimizer.param_groups)


def _step_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    # Left out: the parameters, how torch runs the step, and the initial learning rate that schedulers note.
    left_out = ("params", "param_names", "fused", "foreach", "capturable", "differentiable", "initial_lr")
    settings = {key: value for key, value in group.items() if key not in left_out}
    # A learning rate may be a tensor, which a scheduler changes in place: a copy of only the dict would follow it.
    return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in settings.items()}


def _any_group_sets(optimizer: torch.optim.Optimizer, option: str) -> bool:
    return any(bool(group.get(option)) for group in optimizer.param_groups)
