"""Handles parameters that only some ranks use in a step, such as experts and branches.

On each rank FSDP2 reduces the gradients that exist. If ranks differ, it silently adds up the gradients of different
parameters. So a unit that is about to be reduced gets zeros for missing gradients here, and all ranks reduce the same.
Before the optimizer steps, the ranks exchange which parameters they used. The gradient of a parameter that no rank used
is removed, as in a plain loop: AdamW then skips it, while zeros would decay it.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit import ranks
from toolkit.errors import BadInputError, TrainingError
from toolkit.sharding.fsdp2.fsdp import drop_unreduced_gradients, fill_missing_gradients, fsdp_groups, has_partial_sums
from toolkit.sharding.fsdp2.fsdp_replaced import before_reduction
from toolkit.sharding.fsdp2.shards import local_tensor


class UsedParameters:
    """Tracks which gradients are nothing but zeros that were filled in, on this rank and on all ranks.

    Args:
        model: sharded by `fully_shard`.
        has_gradient: returns whether a sharded parameter (any shape) has a gradient from an earlier reduction.

    Attributes:
        order: a checksum of which units were reduced so far and in which order.
    """

    def __init__(self, model: nn.Module, has_gradient: Callable[[torch.Tensor], bool]) -> None:
        self._groups = list(fsdp_groups(model))
        self._has_gradient = has_gradient
        self._filled: set[int] = set()
        self.order = 0
        for number, group in enumerate(self._groups):
            before_reduction(group, functools.partial(self._fill_and_record, number))

    def _fill_and_record(self, number: int, group: Any) -> None:
        self.order = zlib.crc32(number.to_bytes(4), self.order)
        filled = fill_missing_gradients(group)
        missing = set(map(id, filled))
        self._filled -= {id(parameter.sharded_param) for parameter in group.fsdp_params} - missing
        if not has_partial_sums(group):  # of hybrid, which hold gradients that no parameter has yet
            self._filled |= {id(parameter) for parameter in filled if not self._has_gradient(parameter)}

    def drop_unreduced(self, parameters: Iterable[torch.Tensor]) -> None:
        """Drops the gradients of `parameters` (any shape) that are not reduced yet, after `zero_grad`."""
        listed = list(parameters)
        drop_unreduced_gradients(self._groups, set(map(id, listed)))
        self._filled -= {id(parameter) for parameter in listed if parameter.grad is None}

    def known(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Returns those of `parameters` (any shape) that belong to the model."""
        own = {id(parameter.sharded_param) for group in self._groups for parameter in group.fsdp_params}
        return [parameter for parameter in parameters if id(parameter) in own]

    def used_by_any(self, parameters: Sequence[torch.Tensor]) -> list[bool]:
        """Returns whether each gradient of `parameters` (any shape) came from a backward of any rank. Collective.

        True as well for a parameter of a unit that was not reduced.

        Raises:
            TrainingError: if the ranks reduced different units, or in a different order, so that they summed the
                gradients of different parameters.
        """
        # A loss of the parameters themselves, such as a penalty, adds to the zeros.
        used = [id(parameter) not in self._filled or _has_values(parameter.grad) for parameter in parameters]
        self._filled.difference_update(map(id, parameters))
        if ranks.world_size() == 1:
            return used
        # The maxima of the order and of its negative are opposites only if all ranks have the same order.
        found = torch.tensor([self.order, -self.order, *used], dtype=torch.int64)
        # Over gloo: the host knows its values and needs the result, so there is no reason to wait for a GPU.
        dist.all_reduce(found, dist.ReduceOp.MAX, group=ranks.host_group())
        if found[0] != -found[1]:
            raise TrainingError(
                "the ranks used different units of the model in this step, so their gradients do not belong to the "
                "same parameters; a branch of the model that skips a whole block must be taken by all ranks alike"
            )
        return [bool(value) for value in found[2:].tolist()]


def _has_values(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(local_tensor(gradient).any())


def drop_unused_gradients(optimizer: torch.optim.Optimizer, used: UsedParameters) -> None:
    """Makes every step of `optimizer` first remove the zero gradients of the parameters that no rank used."""
    seen = 0

    @torch.no_grad()
    def before_step(stepped: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        nonlocal seen
        if used.order == seen:
            return  # nothing was reduced: torch initialises the state of an optimizer by a step on zero gradients
        seen = used.order
        parameters = used.known(p for group in stepped.param_groups for p in group["params"])
        for parameter, was_used in zip(parameters, used.used_by_any(parameters), strict=True):
            if not was_used:
                parameter.grad = None

    def after_zero() -> None:
        # Of a step that an overflow in float16 has skipped, or of a window that was given up.
        nonlocal seen
        seen = used.order
        used.drop_unreduced(parameter for group in optimizer.param_groups for parameter in group["params"])

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_state_dict_pre_hook(_add_missing_state)
    act_after_zero_grad(optimizer, after_zero)


def act_after_zero_grad(owner: Any, act: Callable[[], None], allows_zeros: bool = True) -> None:
    """Makes `zero_grad` of an optimizer or a model call `act` at its end.

    Args:
        allows_zeros: whether gradients may be set to zeros. If not, that raises BadInputError.
    """
    zero_grad = owner.zero_grad

    def zero_and_act(set_to_none: bool = True) -> None:
        if not set_to_none and not allows_zeros:
            raise BadInputError(
                "offload: zero_grad(set_to_none=False) would step unused parameters by zeros, but their gradients are "
                "not kept; call zero_grad()"
            )
        zero_grad(set_to_none=set_to_none)
        act()

    owner.zero_grad = zero_and_act


@torch.no_grad()
def _add_missing_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives parameters that no step has used the state that their first step would start from: zeros.

    torch's loader, which Accelerate calls, expects the state of every parameter. A checkpoint without the state of an
    unused one could not be resumed: "Missing key in checkpoint state_dict".
    """
    for group in optimizer.param_groups:
        stepped = next((parameter for parameter in group["params"] if optimizer.state.get(parameter)), None)
        if stepped is None:
            continue
        example = optimizer.state[stepped]
        if not all(_starts_at_zero(value, stepped) for value in example.values()):
            continue
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                optimizer.state[parameter] = {
                    name: torch.zeros_like(value if value.ndim == 0 else parameter, dtype=value.dtype)
                    for name, value in example.items()
                }


def _starts_at_zero(value: Any, parameter: torch.Tensor) -> bool:
    """Returns whether it is a step count or a plain moment of `parameter`, not a quantised or factored moment."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.ndim == 0 or (value.shape == parameter.shape and type(local_tensor(value)) is torch.Tensor)


def has_branches(model: nn.Module) -> bool:
    """Returns whether blocks contain lists of equal modules, such as experts, of which a forward may call only some.

    torch's DistributedDataParallel then needs `find_unused_parameters`, which makes it search the graph of every
    forward.
    """
    lists = (nn.ModuleList, nn.ModuleDict)
    inside = [path for path, module in model.named_modules() if isinstance(module, lists)]
    nested = [path for path in inside if any(path.startswith(f"{outer}.") for outer in inside)]
    return any(_has_equal_children(model.get_submodule(path)) for path in nested)


def _has_equal_children(modules: nn.Module) -> bool:
    classes = [type(module) for module in modules.children()]
    return len(set(classes)) < len(classes)
