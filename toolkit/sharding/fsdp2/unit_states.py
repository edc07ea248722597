"""Moves FSDP2's units through their states, and owns the order of these moves, in ordinary runs and in runs by block.

FSDP2's record of a unit holds the state of its parameters, and the state of the current pass through the unit:

    parameters     SHARDED ------ gather -----> UNSHARDED ------ free ------> SHARDED
                                                 |     ^
                              keep in the node   |     |   gather in the node
                                                 v     |
                                          SHARDED_POST_FORWARD

    pass           IDLE ---- begin forward ---> FORWARD ---- end forward ---> IDLE
                   IDLE --- begin backward ---> PRE_BACKWARD --- reduce ----> POST_BACKWARD
                   POST_BACKWARD ------------------ end pass ---------------> IDLE
                   IDLE ------------- return to forward (root alone) -------> FORWARD

`reduce` adds a pass's gradients to the unit's float32 sum, or reduce-scatters that sum if the pass is the last.
This table says what causes a transition:

    transition           ordinary run                          run by block
    gather               FSDP2's hooks before forward and      the same, for the first micro-batch in the unit
                         backward, and its prefetch
    end forward, free    FSDP2's hook after forward           the same; freed after the last micro-batch
    reduce, free         FSDP2's hook after backward, as      the same, as `begin_unit_backward` has said
                         `begin_micro_batch` has said
    end pass             FSDP2, for all units at the end of    `end_passes`, for the units of the pass alone, and the
                         each backward                         end of `window` for what is left
    return to forward    -                                     `return_to_forward`, after the backward of a loss
    all units to         `free_all`, after a forward without   the same, after forwards without gradients, a window
    SHARDED and IDLE     gradients or that failed, a step, or  that failed, and a step
                         before parameters are read
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from toolkit.errors import BadInputError, TrainingError
from toolkit.sharding.fsdp2.fsdp import (
    fsdp_groups,
    groups_of_module,
    in_backward,
    run_while_sharded,
    sharded_modules,
    unreduced_gradient,
)
from toolkit.sharding.fsdp2.shards import local_tensor
from toolkit.sharding.plan.strategy import Strategy

_GENERATING: WeakSet[Any] = WeakSet()
"""The models that are generating text now; see `UnitStates.generating`."""

_GATHERED: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
"""Models whose forward may have left units gathered -> how often each of their shards was written by then."""

_COPIES: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""FSDP2's record of a parameter -> how often its gathered copy was written. FSDP2's own gathers do not count."""


class UnitStates:
    """Moves the units of one model through their states if FSDP2's own hooks do not.

    Args:
        root: the model, sharded by `toolkit.sharding.apply`.
    """

    def __init__(self, root: Any) -> None:
        self._root = root

    # Ordinary runs.

    def follow_micro_batches(
        self, strategy: Strategy, is_last_micro_batch: Callable[[], bool], is_by_block: Callable[[], bool]
    ) -> None:
        """Registers hooks before and after each forward, and frees units before parameters are read.

        A forward begins at the root, or at a unit that a loop calls alone. Outside of forward and backward,
        `parameters` and `named_parameters` of the model and of its modules return the sharded parameters. What a
        forward has left gathered for its backward is freed then, as that backward may never come; if it does, it
        gathers again.

        Args:
            strategy: decides what each micro-batch reduces and frees.
            is_last_micro_batch: returns whether this forward's micro-batch is the last of the optimizer step.
            is_by_block: returns whether this forward runs by block; then the hooks change no states.
        """

        def is_inside(module: Any) -> bool:
            outermost = self._context.iter_forward_root
            return module is not self._root and outermost not in (None, module._get_fsdp_state())

        def before_forward(module: Any, _args: object) -> None:
            if is_by_block() or in_backward():
                return
            # FSDP2 takes the first module that runs for its root.
            self._root._get_fsdp_state()._lazy_init()
            if is_inside(module) or self._root in _GENERATING:
                return
            self._copy_outside_inference_mode()
            self.require_no_lost_write()
            has_failed = self._context.post_backward_final_callback_queued  # in a backward, and the loop caught it
            if has_failed or (self._root in _GATHERED and _GATHERED[self._root] != self._versions()):
                self.free_all()
            if torch.is_grad_enabled():
                if has_failed:
                    self._require_no_half_gradient()
                    self._context.post_backward_final_callback_queued = False
                self.begin_micro_batch(strategy, is_last_micro_batch())

        def after_forward(module: Any, _args: object, output: object) -> None:
            # In a run by block, other micro-batches are in the middle of their forwards.
            if is_by_block() or in_backward() or is_inside(module) or self._root in _GENERATING:
                return
            self.require_no_lost_write()
            if output is None and (error := sys.exception()) is not None:  # the forward has failed
                error.ran_sharded = run_while_sharded(error)  # type: ignore[attr-defined]
            if output is None or not torch.is_grad_enabled():
                self.free_all()
            else:
                _GATHERED[self._root] = self._versions()

        for unit in sharded_modules(self._root):
            # Before FSDP2's own hook, which takes the state of the last pass for that of this one.
            unit.register_forward_pre_hook(before_forward, prepend=True)  # type: ignore[attr-defined]
            unit.register_forward_hook(after_forward, always_call=True)  # type: ignore[attr-defined]
        self._root.register_state_dict_pre_hook(lambda *_: self.require_no_lost_write())
        for module in self._root.modules():
            if next(module.parameters(), None) is not None:
                module.named_parameters = functools.partial(_read_parameters, ref(self._root), is_by_block, module)

    @property
    def _context(self) -> Any:
        """Returns what FSDP2's records of all units share."""
        return self._root._get_fsdp_state()._state_ctx

    def begin_micro_batch(self, strategy: Strategy, is_last: bool) -> None:
        """Configures what the backward of the next micro-batch reduces and frees.

        Stock `Accelerator.accumulate` switches reduction off until the last micro-batch, whatever the ZeRO stage.
        ZeRO-3 would then keep whole float32 gradients, 4 bytes per parameter on every rank.
        """
        self._root.set_requires_gradient_sync(strategy.reduce_each_micro_batch or is_last)
        if strategy.replicated and strategy.reduce_each_micro_batch:
            # Until the last micro-batch each replica keeps its own sharded sum; they all-reduce once per step.
            self._root.set_requires_all_reduce(is_last)
        self._root.set_reshard_after_backward(strategy.reshard_each_micro_batch or is_last)

    def _copy_outside_inference_mode(self) -> None:
        """Makes FSDP2 create its gathered copies now if it would in inference mode: no backward could use these."""
        if torch.is_inference_mode_enabled() and not all(hasattr(each, "_unsharded_param") for each in self._records):
            with torch.inference_mode(False):
                for unit in sharded_modules(self._root):
                    unit.unshard()
                    unit.reshard()

    @functools.cached_property
    def _records(self) -> list[Any]:
        # Once: each forward reads them, and a walk over all modules takes milliseconds.
        return [parameter for group in fsdp_groups(self._root) for parameter in group.fsdp_params]

    @functools.cached_property
    def _written_by_loops_alone(self) -> list[Any]:
        # In each forward peft's adapters of stacked experts set the frozen stacks below them to themselves.
        adapted = [each.base_layer for each in self._root.modules() if type(each).__name__ == "ParamWrapper"]
        stacks = {module for each in adapted for module in each.modules()}
        return [each for each in self._records if each._module_info.module not in stacks]

    @torch.no_grad()  # with it, a shard's tensor is read without a node of autograd
    def _versions(self) -> list[int]:
        # Each of the two counts the writes to it.
        return [each.sharded_param._version + local_tensor(each.sharded_param)._version for each in self._records]

    def require_no_lost_write(self) -> None:
        """Raises BadInputError if a gathered copy was written in place, which a gather undoes.

        A write through `.data` is not seen, as torch does not count it.
        """
        for parameter in self._written_by_loops_alone:
            copy = getattr(parameter, "_unsharded_param", None)
            if copy is not None and _COPIES.setdefault(parameter, copy._version) != copy._version:
                raise BadInputError(
                    f"{parameter._param_fqn} was changed in place through the attribute of its module after a forward; "
                    "that is a gathered copy, so the change would be lost; change what model.parameters() returns"
                )

    def _require_no_half_gradient(self) -> None:
        if any(unreduced_gradient(each) is not None for each in self._records):
            raise TrainingError(
                "the last backward ended in an error, and left gradients of a part of the model; call zero_grad() of "
                "the optimizer or of the model before the next forward"
            )

    def free_all(self) -> None:
        """Ends every pass, as an error may not have done, and frees what no backward will free.

        Also clears the recorded order of forwards, by which backward prefetches: FSDP2 records forwards without
        gradients too, and the backward of the first unit would then prefetch their last unit. And resets FSDP2's
        current root, so that the gathers of the next forward wait for the work queued before it: if several forwards
        run through the model together and one has ended, FSDP2 takes the next unit of another for a root. It
        keeps that root until a backward ends.
        """
        _GATHERED.pop(self._root, None)
        self._context.iter_forward_root = None
        for unit in sharded_modules(self._root):
            groups = groups_of_module(unit)
            copied = [each for group in groups if group.is_sharded_post_forward for each in group.fsdp_params]
            state = unit._get_fsdp_state()
            for own in (state, *groups):
                own._training_state = type(own._training_state).IDLE
            unit.reshard()
            if state._is_root is not None:  # it has run
                for group in groups:
                    group.finalize_backward()
                    group.comm_ctx.post_forward_order.clear()
            for parameter in copied:  # a group's, which FSDP2 frees when backward has gathered them
                parameter._sharded_post_forward_param = parameter._sharded_post_forward_param_data = None
            # Else FSDP2 waits for a module that was not called (a head of which only the weight is used).
            state._modules_to_run_forward.clear()

    def free_behind_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Frees, after each step, what a forward without a backward has left gathered: weights of before the step.

        A step inside of backward, as of a hook of a parameter, leaves that to the next forward.
        """
        optimizer.register_step_pre_hook(lambda *_: self.require_no_lost_write())
        optimizer.register_step_post_hook(lambda *_: None if in_backward() else self.free_all())

    @contextmanager
    def generating(self, whole: bool = False) -> Iterator[None]:
        """Keeps units gathered for many forwards without gradients, which may begin below the root (as peft's do).

        Generation runs one forward for each token, and each would gather the same parameters again. So the root stays
        gathered inside the `with` block, and so do the units that the strategy keeps until backward. All are freed at
        the end.

        Args:
            whole: whether every unit stays gathered, so that ranks need not run the same forwards.
        """
        # The first forward may be that of peft's base, below the root, and FSDP2 takes the first module for its root.
        self._root._get_fsdp_state()._lazy_init()
        freed = {group: group.post_forward_mesh_info for group in fsdp_groups(self._root)} if whole else {}
        for group in freed:
            group.post_forward_mesh_info = None
        for unit in sharded_modules(self._root) if whole else [self._root]:
            unit.unshard()
        _GENERATING.add(self._root)
        try:
            yield
        finally:
            _GENERATING.discard(self._root)
            for group, mesh in freed.items():
                group.post_forward_mesh_info = mesh
            self.free_all()

    @contextmanager
    def reducing_nothing(self) -> Iterator[None]:
        """Makes backward reduce no gradients inside the `with` block. Frees all units at the end.

        For a backward that computes no gradients of parameters: they would get zeros, and count as used in the step.
        """
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)
            self.free_all()

    # Runs by block, in the order of an optimizer step.

    @contextmanager
    def window(self) -> Iterator[None]:
        """Makes backward reduce, free and end nothing in the `with` block until `begin_unit_backward` says otherwise.

        At its end, reduces what is not reduced yet, and ends every pass, as FSDP2 does at the end of a backward.
        """
        self._switch(False)
        try:
            yield
        except BaseException:
            self._switch(True)
            self.free_all()
            raise
        self._switch(True)
        self._root._get_fsdp_state()._root_post_backward_final_callback()

    def _switch(self, ends: bool) -> None:
        self._root.set_requires_gradient_sync(ends)
        self._root.set_reshard_after_backward(ends)
        self._root.set_is_last_backward(ends)

    def return_to_forward(self) -> None:
        """Sets the root's state back to FORWARD, after a backward in the middle of its forward.

        Otherwise FSDP2 would free the root's parameters when that forward ends, and gather them again for the backward
        after it.
        """
        for group in groups_of_module(self._root):
            group._training_state = type(group._training_state).FORWARD

    @contextmanager
    def backward_by_unit(self) -> Iterator[None]:
        """Makes FSDP2 end no pass when a backward ends inside the `with` block; call `end_passes` instead.

        FSDP2 visits all units whenever a backward ends, and waits for all reductions so far. They would then overlap
        with nothing.
        """
        self._context.post_backward_final_callback_queued = True
        try:
            yield
        finally:
            self._context.post_backward_final_callback_queued = False

    def begin_unit_backward(self, unit: Any, is_last: bool) -> None:
        """Configures the next backward pass through a unit: the last one reduces and frees it."""
        unit.set_requires_gradient_sync(is_last)
        unit.set_reshard_after_backward(is_last)

    def end_passes(self, modules: Iterable[Any]) -> None:
        """Ends the pass of the units of these modules: adds up and reduces what is left.

        FSDP2 does this for all units when a backward ends. These modules are the ones that took part in it.
        """
        for module in modules:
            state: Any = module._get_fsdp_state()
            for group in groups_of_module(module):
                states = type(group._training_state)
                if group._training_state != states.POST_BACKWARD:
                    group.post_backward()
                group._training_state = states.IDLE
            state._training_state = type(state._training_state).IDLE


def _read_parameters(root: ref[Any], is_by_block: Callable[[], bool], module: Any, *args: Any, **kwargs: Any) -> Any:
    """Is the `named_parameters` of a module of the model."""
    model: Any = root()
    if model in _GATHERED and model not in _GENERATING and not in_backward() and not is_by_block():
        states = [unit._get_fsdp_state()._training_state for unit in sharded_modules(model)]
        if not any(state == type(state).FORWARD for state in states):
            UnitStates(model).free_all()
    return type(module).named_parameters(module, *args, **kwargs)
