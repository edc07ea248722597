"""Puts the sharding backend in the place of a suite's own in this process, and plants a fault if one is named.

Imported by every process of a suite. `CONFORMANCE_BACKEND` is `stock` or a strategy of the backend.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
import transformers.distributed.mixin
from accelerate.utils import operations
from torch.nn.parallel import DistributedDataParallel

from toolkit.sharding import apply as applied
from toolkit.sharding import plugin, sharding_kwargs
from toolkit.sharding.apply import apply
from toolkit.sharding.fsdp2 import gloo
from toolkit.sharding.fsdp2.fsdp import groups_of_module
from toolkit.sharding.fsdp2.fsdp_replaced import before_reduction
from toolkit.sharding.fsdp2.unit_states import UnitStates
from toolkit.sharding.fsdp2.unused import UsedParameters, drop_unused_gradients
from toolkit.sharding.plan.strategy import STRATEGIES
from toolkit.sharding.plan.units import plan_units

STRATEGY = os.environ.get("CONFORMANCE_BACKEND", "stock")
_sharded: list[tuple[Any, UsedParameters]] = []


def _shard(model: Any, mesh_manager: Any, fsdp_plan: Any, ep_plan: Any) -> Any:
    """Is transformers' `apply_fully_sharded_data_parallelism`."""
    config = model.config.distributed_config
    if config.ep_size > 1 or config.tp_size > 1:
        plugin.ShardingMesh(tp_size=max(config.ep_size, config.tp_size))  # refused, as `Trainer` finds it
    is_hybrid = config.dp_replicate_size > 1
    mesh = mesh_manager.get_mesh(("dp_replicate", "fsdp") if is_hybrid else "fsdp")
    strategy = STRATEGIES["hybrid" if is_hybrid else STRATEGY]
    apply(model, plan_units(model), strategy, mesh, "no", is_last_micro_batch=lambda: True)
    model._is_fsdp_managed_module = True
    _sharded.append((model, UsedParameters(model, lambda parameter: parameter.grad is not None)))
    return model


def _followed(init: Any) -> Any:
    """Has optimizers do what the plugin makes those of `prepare` do."""

    @functools.wraps(init)
    def follow(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for model, used in _sharded:
            if used.known(self.param_groups[0]["params"]):
                UnitStates(model).free_behind_steps(self)
                drop_unused_gradients(self, used)

    return follow


def _with_backend(init: Any) -> Any:
    @functools.wraps(init)
    def with_backend(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, **sharding_kwargs(STRATEGY)})

    return with_backend


def _drop_reductions() -> None:
    """Each rank has the sum of its own gradients alone."""

    def own(output: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
        output.copy_(whole.view(group.size(), -1)[group.rank()] * group.size())

    gloo.reduce_scatter = own
    DistributedDataParallel.require_backward_grad_sync = property(lambda _: False, lambda *_: None)


def _gather_once() -> None:
    """Each gather of weights, and of tensors of a shape, brings what the first one has brought."""
    gather, gather_tensors = gloo._AllGather.__call__, operations._gpu_gather
    kept: dict[Any, Any] = {}

    def stale(self: Any, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = gather(self, output_tensor, *args, **kwargs)
        output_tensor.copy_(kept.setdefault(self, output_tensor.clone()))
        return work

    gloo._AllGather.__call__ = stale
    operations._gpu_gather = lambda data: kept.setdefault(
        str(operations.get_data_structure(data)), gather_tensors(data)
    )


def _lose_sums() -> None:
    """What a reduction adds to is gone, and so is what `no_sync` has summed."""

    def lose(group: Any) -> None:
        for parameter in group.fsdp_params:
            parameter.sharded_param.grad = None

    def communicate(module: Any) -> None:
        gloo.communicate(module)
        for group in groups_of_module(module):
            before_reduction(group, lose)

    @contextmanager
    def forgetting(self: Any) -> Iterator[None]:
        yield
        self.zero_grad(set_to_none=False)

    applied.communicate = communicate
    DistributedDataParallel.no_sync = forgetting


FAULTS = {"dropped_reduction": _drop_reductions, "stale_gather": _gather_once, "lost_accumulation": _lose_sums}

if STRATEGY != "stock":
    transformers.distributed.mixin.apply_fully_sharded_data_parallelism = _shard
    torch.optim.Optimizer.__init__ = _followed(torch.optim.Optimizer.__init__)
    accelerate.Accelerator.__init__ = _with_backend(accelerate.Accelerator.__init__)
    FAULTS.get(os.environ.get("CONFORMANCE_FAULT", ""), lambda: None)()
