"""Connects the engine to an ordinary model, optimizer and `Accelerator`.

The model's state dict holds the float32 masters, and the optimizer's holds the moments. All are DTensors with the names
and placements of an ordinary run. So runs with and without offload load each other's checkpoints, at any number of
ranks. Only public hooks of torch are used.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.errors import BadInputError
from toolkit.sharding.fsdp2.shards import beside, local_tensor
from toolkit.sharding.fsdp2.unused import act_after_zero_grad
from toolkit.sharding.offload.engine import OffloadEngine
from toolkit.sharding.offload.offloaded_units import OffloadedUnit, UnitSlice
from toolkit.sharding.offload.settings import counts_steps


def connect(engine: OffloadEngine, accelerator: Accelerator) -> None:
    """Registers the hooks of model and optimizer, and replaces the accelerator's clipping by the engine's."""
    _connect_optimizer(engine)
    _connect_model(engine)
    for owner in (engine.optimizer, engine.model):
        act_after_zero_grad(owner, engine.discard, allows_zeros=False)
    # Accelerate's own clips the parameters' `.grad`, which are gone by then: it would return 0 and clip nothing.
    own_clip = weakref.WeakMethod(engine.clip_grad_norm_)  # the accelerator outlives the model

    def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
        clip = own_clip()
        return (type(accelerator).clip_grad_norm_.__get__(accelerator) if clip is None else clip)(*args, **kwargs)

    accelerator.clip_grad_norm_ = clip_grad_norm_
    accelerator.clip_grad_value_ = _refuse_clipping_by_value


def _refuse_clipping_by_value(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    raise BadInputError(
        "clip_grad_value_: gradients are not on the device any more with offload; use clip_grad_norm_, or no offload"
    )


def _connect_optimizer(engine: OffloadEngine) -> None:
    optimizer = engine.optimizer
    # `_show_state` clears it: what is there already would be lost without a word.
    if any(state for state in optimizer.state.values()):
        raise BadInputError("offload: the optimizer has state already; load it after accelerator.prepare")

    def before_step(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The optimizer's own step finds no gradients after this, and does nothing.
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise BadInputError("offload: optimizer.step takes no closure; call backward before step")
        engine.step()

    def before_loading(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        engine.flush()
        _load_state(engine, state_dict)
        # torch would also move the state to the parameters' device.
        return {**state_dict, "state": {}}

    optimizer.register_step_pre_hook(before_step)
    # The worker may still be writing the moments that are about to be read.
    optimizer.register_state_dict_pre_hook(lambda _: engine.flush())
    optimizer.register_load_state_dict_pre_hook(before_loading)
    # torch has just put the empty state that it was given in place of the views.
    optimizer.register_load_state_dict_post_hook(lambda _: _show_state(engine))
    _show_state(engine)


def _show_state(engine: OffloadEngine) -> None:
    """Fills the optimizer's state with the moments, as views of the engine's memory."""
    engine.optimizer.state.clear()
    for unit in engine.state.units:
        for slot in unit.slots:
            if slot.group is not None:
                shown = {name: beside(slot.parameter, slot.view(flat)) for name, flat in unit.moments.items()}
                counted = {"step": slot.step} if counts_steps(engine.optimizer) else {}
                engine.optimizer.state[slot.parameter] = {**counted, **shown}


@torch.no_grad()
def _load_state(engine: OffloadEngine, state_dict: dict[str, Any]) -> None:
    """Copies loaded moments into the engine's memory, because torch would round them to the parameters' dtype."""
    slots = engine.state.by_parameter()
    for group, stored_group in zip(engine.optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, index in zip(group["params"], stored_group["params"], strict=True):
            if id(parameter) in slots:
                _load_slot(*slots[id(parameter)], state_dict["state"].get(index, {}))


def _load_slot(unit: OffloadedUnit, slot: UnitSlice, stored: dict[str, Any]) -> None:
    slot.step.copy_(torch.as_tensor(stored.get("step", 0.0)))
    for name, flat in unit.moments.items():
        value = stored.get(name)
        # A parameter that never got a gradient has no state in an ordinary run's checkpoint.
        if value is None:
            slot.view(flat).zero_()
        else:
            slot.view(flat).copy_(local_tensor(value).view(slot.shape))


def _connect_model(engine: OffloadEngine) -> None:
    # Every name of a tied parameter: a state dict holds all of them.
    names = {name: id(parameter) for name, parameter in engine.model.named_parameters(remove_duplicate=False)}
    slots = engine.state.by_parameter()
    masters = {name: slots[key] for name, key in names.items() if key in slots}

    def after_saving(_: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
        for name, (unit, slot) in masters.items():
            # With keep_vars the caller wants the parameters themselves.
            if isinstance(state_dict.get(prefix + name), DTensor) and not isinstance(
                state_dict[prefix + name], nn.Parameter
            ):
                state_dict[prefix + name] = beside(slot.parameter, slot.view(unit.master))

    @torch.no_grad()
    def before_loading(_: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: object) -> None:
        engine.flush()
        for name, (unit, slot) in masters.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, DTensor):
                slot.view(unit.master).copy_(value.to_local().view(slot.shape))

    model: Any = engine.model
    model.register_state_dict_pre_hook(lambda *_: engine.flush())
    model.register_state_dict_post_hook(after_saving)
    model.register_load_state_dict_pre_hook(before_loading)
