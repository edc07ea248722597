"""The states of FSDP2's units, drawn, and the one owner of their order, for ordinary runs and for those by block.

FSDP2's record of a unit says where its parameters are, and which pass through the unit is under way:

    parameters     SHARDED ------ gather -----> UNSHARDED ------ free ------> SHARDED
                                                 |     ^
                              keep in the node   |     |   gather in the node
                                                 v     |
                                          SHARDED_POST_FORWARD

    pass           IDLE ---- begin forward ---> FORWARD ---- end forward ---> IDLE
                   IDLE --- begin backward ---> PRE_BACKWARD --- reduce ----> POST_BACKWARD
                   POST_BACKWARD ------------------ end pass ---------------> IDLE
                   IDLE ------------- return to forward (root alone) -------> FORWARD

`reduce` sums a pass's gradients into the unit's float32 sum, or reduce-scatters that sum if the pass is the last.
Who causes a transition:

    transition           ordinary run                          run by block
    gather               FSDP2's hooks before forward and      the same, for the first micro-batch in the unit
                         backward, and its prefetch
    end forward, free    FSDP2's hook behind forward           the same; freed behind the last micro-batch
    reduce, free         FSDP2's hook behind backward, as      the same, as `begin_unit_backward` has said
                         `begin_micro_batch` has said
    end pass             FSDP2, for all units at the end of    `end_passes`, for the units of the pass alone, and
                         each backward                         `end_window` for what is left
    return to forward    -                                     `return_to_forward`, behind the backward of a loss
    all units to         `free_all`, behind a forward          the same, behind forwards without gradients
    SHARDED and IDLE     without gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from toolkit.sharding.fsdp import fsdp_groups, groups_of_module, sharded_modules
from toolkit.sharding.strategy import Strategy

_GENERATING: WeakSet[Any] = WeakSet()
"""Models that write texts now; see `UnitStates.generating`."""


class UnitStates:
    """Moves the units of one model through their states, where FSDP2's own hooks don't.

    Args:
        root: the model, sharded by `toolkit.sharding.apply`.
    """

    def __init__(self, root: Any) -> None:
        self._root = root

    # Ordinary runs.

    def follow_micro_batches(
        self, strategy: Strategy, is_last_micro_batch: Callable[[], bool], is_by_block: Callable[[], bool]
    ) -> None:
        """Registers hooks of the root: before each training forward, and behind each forward without gradients.

        Args:
            is_last_micro_batch: whether this forward's micro-batch ends the accumulation window.
            is_by_block: whether this forward is one of several that run by block, whose states the window has set.
        """

        def before_forward(_module: object, _args: object) -> None:
            if torch.is_grad_enabled() and not is_by_block():
                self.begin_micro_batch(strategy, is_last_micro_batch())

        def after_forward(_module: object, _args: object, _output: object) -> None:
            # Other micro-batches of a window that runs by block are in the midst of their forwards.
            if not torch.is_grad_enabled() and not is_by_block() and self._root not in _GENERATING:
                self.free_all()

        self._root.register_forward_pre_hook(before_forward)
        self._root.register_forward_hook(after_forward)

    def begin_micro_batch(self, strategy: Strategy, is_last: bool) -> None:
        """Says what the backward of the coming micro-batch reduces and frees.

        Stock `Accelerator.accumulate` switches reduction off until the last micro-batch, whatever the
        stage: then ZeRO-3 keeps whole float32 gradients, 4 bytes per parameter on every rank.
        """
        self._root.set_requires_gradient_sync(strategy.reduce_each_micro_batch or is_last)
        if strategy.replicated and strategy.reduce_each_micro_batch:
            # Inside the window each replica keeps its own sum, sharded; the replicas add up once a step.
            self._root.set_requires_all_reduce(is_last)
        self._root.set_reshard_after_backward(strategy.reshard_each_micro_batch or is_last)

    def free_all(self) -> None:
        """Ends every pass and frees what a forward without gradients gathered and no backward will free.

        Otherwise the root's parameters stay whole, and `model.parameters()` gives tensors that the
        optimizer does not know.
        """
        for unit in sharded_modules(self._root):
            groups = groups_of_module(unit)
            copied = [each for group in groups if group.is_sharded_post_forward for each in group.fsdp_params]
            for group in groups:
                # On torch 2.11 a unit with an uncalled module is still in its forward, and may stay gathered after it.
                group._training_state = type(group._training_state).IDLE
            unit.reshard()
            for parameter in copied:  # a group's, which FSDP2 frees when backward has gathered them
                parameter._sharded_post_forward_param = parameter._sharded_post_forward_param_data = None
            # torch 2.11 goes on waiting for a module that was not called (a head whose weight alone is used), and
            # gathers the unit no more.
            unit._get_fsdp_state()._modules_to_run_forward.clear()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Inside, many forwards without gradients follow each other, which may begin below the root (as peft's do).

        The root stays gathered, and so does what the strategy keeps from forward to backward: a text is one forward
        for each token, and each would gather it anew. All is freed at the end.
        """
        self._root.unshard()
        _GENERATING.add(self._root)
        try:
            yield
        finally:
            _GENERATING.discard(self._root)
            self.free_all()
            self.forget_forwards()

    @contextmanager
    def reducing_nothing(self) -> Iterator[None]:
        """Inside, the backward of an earlier forward reduces no gradients, and frees all units at the end.

        For a backward that makes no gradients of parameters: they would get zeros, and count as used by a step.
        """
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)
            self.free_all()

    # Runs by block, in the order of a window.

    def begin_window(self) -> None:
        """Has no backward reduce, free or end anything until a unit is told to."""
        self._root.set_requires_gradient_sync(False)
        self._root.set_reshard_after_backward(False)
        self._root.set_is_last_backward(False)

    def begin_forwards(self) -> None:
        """Says that no forward is under way, so that the gathers of the next one wait for what comes before it.

        If several forwards go through the model together and one has ended, FSDP2 takes the next unit of another for
        a root. torch 2.11 keeps it for good, others until a backward ends: gathers would not wait for the optimizer's
        step.
        """
        self._root._get_fsdp_state()._state_ctx.iter_forward_root = None

    def keep_after_forward(self, unit: Any) -> None:
        """Has a unit stay gathered: another micro-batch enters it next."""
        unit.set_reshard_after_forward(False)

    def free_after_forward(self, unit: Any) -> None:
        """Has a unit be freed behind its next forward, the last of the window."""
        unit.set_reshard_after_forward(True)

    def return_to_forward(self) -> None:
        """Says that the root's forward is still under way, after a backward in its midst.

        FSDP2 would free the root's parameters when that forward ends, and gather them for the backward behind it.
        """
        for group in groups_of_module(self._root):
            group._training_state = type(group._training_state).FORWARD

    def forget_forwards(self) -> None:
        """Has a backward prefetch by the order of the forwards that come now.

        FSDP2 notes those without gradients, too, and the first unit's backward would gather the last unit of theirs.
        """
        for group in fsdp_groups(self._root):
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()

    @contextmanager
    def backward_by_unit(self) -> Iterator[None]:
        """Inside, FSDP2 ends no pass when a backward ends; `end_passes` does.

        FSDP2 looks at all units whenever a backward ends, and waits for all reductions so far, which then hide behind
        nothing.
        """
        context = self._root._get_fsdp_state()._state_ctx
        context.post_backward_final_callback_queued = True
        try:
            yield
        finally:
            context.post_backward_final_callback_queued = False

    def begin_unit_backward(self, unit: Any, is_last: bool) -> None:
        """Says whether the coming pass through a unit is its last, which reduces and frees it."""
        unit.set_requires_gradient_sync(is_last)
        unit.set_reshard_after_backward(is_last)

    def end_passes(self, modules: Iterable[Any]) -> None:
        """Ends the pass of each of these units: sums what is left, and waits for the reduction if there was one.

        FSDP2 does this for all units when a backward ends; these are the ones that were in it.
        """
        for module in modules:
            state: Any = module._get_fsdp_state()
            for group in groups_of_module(module):
                states = type(group._training_state)
                if group._training_state != states.POST_BACKWARD:
                    group.post_backward()
                    if group.reduce_grads:
                        _free_last_reduction(group)
                group._training_state = states.IDLE
            state._training_state = type(state._training_state).IDLE

    def end_window(self) -> None:
        """Reduces what no unit has reduced yet, and ends every pass, as FSDP2 does when an ordinary backward ends."""
        self._root.set_requires_gradient_sync(True)
        self._root.set_reshard_after_backward(True)
        self._root.set_is_last_backward(True)
        self._root._get_fsdp_state()._root_post_backward_final_callback()


def _free_last_reduction(group: Any) -> None:
    """Waits for the last reduction and lets its input go; torch 2.11 does so only when it reduces the next unit."""
    last = getattr(group.comm_ctx, "reduce_scatter_state", None)
    if last is not None:
        if last.event is not None:
            group.device_handle.current_stream().wait_event(last.event)
        group.comm_ctx.reduce_scatter_state = None
