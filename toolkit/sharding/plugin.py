"""Registers the sharding backend with a stock `Accelerator` by two constructor arguments.

    accelerator = Accelerator(**sharding_kwargs(strategy="zero3"))

`ShardingMesh` is a `ParallelismConfig`. `Accelerator.__init__` asks it for the device mesh as soon as the process state
exists, and at that point it enters the backend into that state. This works on CPU ranks too, where stock Accelerate
silently drops an FSDP plugin. `ShardingPlugin` is a `FullyShardedDataParallelPlugin`. `Accelerator.prepare` first calls
its `set_auto_wrap_policy(model)`, which shards the model; Accelerate's own wrapping then finds nothing left to do.

This file uses private names of Accelerate. private_names.yaml lists them with those of torch, and a run names one that
has moved.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from toolkit import ranks
from toolkit.errors import BadInputError
from toolkit.recipe.combinations import refuse
from toolkit.recipe.features import Surroundings, settings_of_backend
from toolkit.sharding.accelerate_config import OTHER_AXES, refuse_other_axes
from toolkit.sharding.apply import KeepsMasters, LoadsWeights, apply, precision_policies, prepare_blocks
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.blocks.compiling import Compilation
from toolkit.sharding.fsdp2.unit_states import UnitStates
from toolkit.sharding.fsdp2.unused import UsedParameters, act_after_zero_grad, drop_unused_gradients
from toolkit.sharding.fsdp2.versions import check_versions
from toolkit.sharding.launched import (
    configured_size,
    refuse_configured_axes,
    refuse_stock_settings,
    require_reachable_host,
    resolve_offload,
    resolve_strategy,
    resolve_tensor,
    settle_threads,
)
from toolkit.sharding.loss_scale import share_overflows
from toolkit.sharding.offload import OffloadEngine, OffloadSettings, connect
from toolkit.sharding.parallel.expert_parallel import expert_grid
from toolkit.sharding.parallel.sequence_parallel import require_groups
from toolkit.sharding.plan.strategy import OFFLOAD, MeshShape, tensor_shape, with_reshard_after_forward
from toolkit.sharding.plan.unit_plan import UnitPlan
from toolkit.sharding.plan.units import plan_units
from toolkit.sharding.tensor.axes import data_mesh, tensor_mesh
from toolkit.terminal import Terminal


def sharding_kwargs(
    strategy: str | None = None,
    *,
    replicate_size: int | None = None,
    shard_size: int | None = None,
    **settings: Any,
) -> dict[str, FullyShardedDataParallelPlugin | ParallelismConfig]:
    """Returns the constructor arguments that register the backend with a stock `Accelerator`.

    Args:
        strategy: a word of `STRATEGIES` (plan/strategy.py), with or without `+offload`. If unset, that of the
            Accelerate config, or zero3.
        replicate_size: the number of replicas of `hybrid`. If unset, that of the Accelerate config.
        shard_size: the number of ranks that shard one replica of `hybrid`. If unset, that of the Accelerate config.
        settings: the other arguments of `ShardingPlugin`.

    Raises:
        BadInputError: if the strategy is unknown or contradicts the Accelerate config, settings cannot be combined, or
            the version of torch or Accelerate is not supported.
    """
    plugin = ShardingPlugin(strategy, **settings)
    mesh = ShardingMesh(plugin=plugin, dp_replicate_size=replicate_size, dp_shard_size=shard_size)
    return {"fsdp_plugin": plugin, "parallelism_config": mesh}


class ShardingPlugin(FullyShardedDataParallelPlugin):  # type: ignore[misc]
    """Shards the model when `Accelerator.prepare` is called.

    Args:
        strategy: see `sharding_kwargs`.
        unit_classes: the class names of the modules that each form a unit. If unset, the blocks are found.
        checkpointing: activation checkpointing. If unset, as `fsdp_activation_checkpointing` says.
        offload: `optimizer` keeps optimizer state in host memory, `none` does not, `OffloadSettings` says how. If
            unset, as the strategy's text says.
        compilation: how torch.compile compiles the blocks. If unset, they run eagerly.
        experts: the number of ranks that exchange tokens under expert parallelism. 1 turns it off.
        reshard_after_forward: the number of ranks of a node among which `zero3` keeps a unit sharded between forward
            and backward. If unset, all ranks.
        tensor: the number of neighbouring ranks that cut matrices (tensor parallelism). These ranks must get the same
            rows, as Accelerate's data loaders give them. If unset, that of the Accelerate config, or 1.

    Attributes:
        strategy: what is sharded, and when gradients are reduced.
        offload: how optimizer state is offloaded, or None if it is not.
        reshard_ranks: the number of ranks among which units stay sharded between forward and backward, or None for all.
        tensor: the number of ranks that cut matrices and have the same rows.
        unit_plan: the units of the prepared model. None before `prepare`.
        engine: steps the offloaded optimizer state. None before `prepare`, or without offload.
        load_weights: loads the weights of the next model, if it is built without; `prepare` calls it once.
    """

    def __init__(
        self,
        strategy: str | None = None,
        unit_classes: Sequence[str] | None = None,
        checkpointing: Checkpointing | None = None,
        offload: str | OffloadSettings | None = None,
        compilation: Compilation | None = None,
        experts: int = 1,
        reshard_after_forward: int | None = None,
        tensor: int | None = None,
    ) -> None:
        check_versions()
        _use_cpu_without_gpu()
        settle_threads()
        self.strategy = resolve_strategy(strategy)
        self.offload = resolve_offload(strategy, offload)
        self.load_weights: LoadsWeights | None = None
        self._engine: weakref.ref[OffloadEngine] | None = None
        self.unit_classes = list(unit_classes) if unit_classes else None
        self.unit_plan: UnitPlan | None = None
        self.compilation = compilation
        self.experts = experts
        self.reshard_ranks = reshard_after_forward
        self.tensor = resolve_tensor(tensor)
        self._accelerator: weakref.ref[Accelerator] | None = None
        refuse_stock_settings()
        super().__init__(
            # Version 1 reads the strategy's word itself, and fails at ours with KeyError: 'ZERO3'.
            fsdp_version=2,
            reshard_after_forward=self.strategy.reshard_each_micro_batch,
            # Accelerate 1.15's fails at persistent buffers; weights come by `load_weights` here.
            cpu_ram_efficient_loading=False,
            state_dict_type=os.environ.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT"),
        )
        # Stock checkpointing, which Accelerate applies next, redraws dropout in the second forward.
        # Accelerate 1.13 knows no offload of checkpoints.
        asked = Checkpointing(every=1, offload=getattr(self, "activation_checkpointing_offload", False))
        self.checkpointing = checkpointing or (asked if self.activation_checkpointing else None)  # type: ignore[has-type]
        self.activation_checkpointing = False
        # A recipe has been checked before.
        settings = settings_of_backend(
            compiled=self.compilation is not None,
            strategy=self.strategy.name,
            offload="none" if self.offload is None else "optimizer",
            activation_checkpointing=None if self.checkpointing is None else self.checkpointing.every,
            experts=experts,
            reshard_after_forward=reshard_after_forward,
            tensor=self.tensor,
        )
        refuse(settings, Surroundings(own_loop=True))

    def set_mixed_precision(self, mixed_precision: str, buffer_autocast: bool = False, override: bool = False) -> None:
        """Replaces stock Accelerate's policy, which reduces gradients and returns the loss in 16 bits."""
        self.mixed_precision_policy = precision_policies(mixed_precision)[0]

    def register(self, accelerator: Accelerator) -> None:
        """Remembers the accelerator whose optimizers `set_auto_wrap_policy` rebinds."""
        self._accelerator = weakref.ref(accelerator)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Plans the units, shards the model and rebinds the optimizers. Called by `Accelerator.prepare`.

        Raises:
            BadInputError: if the plugin was passed to `Accelerator` without its `ShardingMesh`.
        """
        if isinstance(model, FSDPModule):
            return
        accelerator = self._accelerator() if self._accelerator is not None else None
        if accelerator is None:
            raise BadInputError(
                "ShardingPlugin was passed without its ShardingMesh; use Accelerator(**sharding_kwargs(...))"
            )
        state = AcceleratorState()
        self.unit_plan = plan_units(model, self.unit_classes, self.experts > 1)
        engines: list[OffloadEngine] = []  # until the hooks hold it
        # Taken off, as Accelerate's state holds this plugin to the end of the process.
        load_weights, self.load_weights = self.load_weights, None
        # First: `fully_shard` then hooks the modules around forwards that are compiled and checkpointed already.
        prepare_blocks(model, self.unit_plan, self.checkpointing, self.compilation)
        renewed = apply(
            model,
            self.unit_plan,
            self.strategy,
            state.device_mesh,
            state.mixed_precision,
            is_last_micro_batch=_is_last_micro_batch,
            offload=functools.partial(self._make_engine, accelerator, engines) if self.offload is not None else None,
            experts=expert_grid(data_mesh(state.device_mesh), self.experts),
            reshard_after_forward=self.reshard_ranks,
            load_weights=load_weights,
        )
        # transformers' mark of a sharded model: `generate` then goes on until every rank has ended its rows. Without
        # it, a rank that ends early leaves the others in a gather.
        model._is_fsdp_managed_module = True  # type: ignore[assignment]
        share_overflows(accelerator.scaler)
        _tell_empty_shards_apart(model)
        for optimizer in accelerator._optimizers:
            _rebind_optimizer(optimizer, renewed)
        optimizers = _optimizers_of(model, accelerator)
        for optimizer in optimizers:
            UnitStates(model).free_behind_steps(optimizer)
        for engine in engines:
            # After the optimizers, as the engine looks its parameters up in their groups.
            engine.attach()
            connect(engine, accelerator)
        if not engines and optimizers:
            used = UsedParameters(model, lambda parameter: parameter.grad is not None)
            for optimizer in optimizers:
                drop_unused_gradients(optimizer, used)
            act_after_zero_grad(model, lambda: used.drop_unreduced(model.parameters()))

    def _make_engine(self, accelerator: Accelerator, engines: list[OffloadEngine], model: nn.Module) -> KeepsMasters:
        """Allocates the offloaded state of a sharded model that has no weights yet. Returns what stores its masters.

        Args:
            engines: gets the engine.
        """
        assert self.offload is not None
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in accelerator._optimizers]
        if len(optimizers) != 1:
            raise BadInputError(
                f"offload needs one optimizer, found {len(optimizers)}; pass the model and its one optimizer to the "
                "same accelerator.prepare"
            )
        engine = OffloadEngine(
            model,
            optimizers[0],
            self.offload,
            AcceleratorState().mixed_precision,
            _is_last_micro_batch,
            accumulates=accelerator.gradient_accumulation_steps > 1,
        )
        engines.append(engine)
        # Weakly: Accelerate's state holds this plugin to the end of the process, long after model and optimizer.
        self._engine = weakref.ref(engine)
        return engine.state.seed

    @property
    def engine(self) -> OffloadEngine | None:
        """Returns the engine that steps the offloaded state. None without offload, or once the model is gone."""
        return self._engine() if self._engine is not None else None

    @property
    def text(self) -> str:
        """Returns the strategy as an Accelerate config spells it."""
        return self.strategy.name + (OFFLOAD if self.offload is not None else "")

    def close(self) -> None:
        """Frees the offloaded state, if any. The model cannot be trained any more."""
        engine = self.engine
        if engine is not None:
            engine.close()
            self._engine = None

    def __getstate__(self) -> dict[str, Any]:
        # `Trainer` pickles its TrainingArguments; weak references and threads cannot be.
        return {**self.__dict__, "_accelerator": None, "_engine": None}


@dataclass
class ShardingMesh(ParallelismConfig):  # type: ignore[misc]
    """Builds the device mesh and enters the plugin into Accelerate's state.

    `transformers.Trainer` needs only
    `TrainingArguments(parallelism_config=ShardingMesh(plugin=ShardingPlugin(strategy="zero3")))`.
    """

    plugin: ShardingPlugin | None = None

    def __post_init__(self) -> None:
        if self.plugin is None:
            self.plugin = ShardingPlugin()
        # Before the sizes: with another axis the number of ranks would be the wrong thing to blame.
        self._refuse_other_axes()
        refuse_configured_axes()
        # Now, as `Accelerator` has the ranks meet first thing.
        require_reachable_host()
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        shape = tensor_shape(
            self.plugin.strategy,
            world_size,
            self.plugin.tensor,
            ranks_per_node,
            replicate=self.dp_replicate_size or configured_size("dp_replicate"),  # type: ignore[has-type]
            shard=self.dp_shard_size or configured_size("dp_shard"),  # type: ignore[has-type]
        )
        require_groups("sharding.experts", self.plugin.experts, shape.shard)
        with_reshard_after_forward(shape, self.plugin.strategy, self.plugin.reshard_ranks, ranks_per_node)
        if self.plugin.offload is not None:
            _refuse_replicas_on_one_host(shape)
        self.dp_replicate_size, self.dp_shard_size = shape.replicate, shape.shard
        # Accelerate would cut the model itself, by a function that transformers has no more (`_prepare_tp`).
        self.tp_size = 1
        super().__post_init__()

    @property
    def total_size(self) -> int:
        """The number of ranks."""
        assert self.plugin is not None
        size: int = super().total_size
        return size * self.plugin.tensor

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Enters the plugin into Accelerate's state and returns the mesh. Called by `Accelerator.__init__`."""
        assert self.plugin is not None
        # Again: `Trainer` sets `tp_size` here for a model that transformers has split.
        self._refuse_other_axes()
        self._require_all_processes()
        ranks.renew_thread_pool()
        _wait_for_gloo_at_exit(device_type)
        # Here, as `Accelerator.__init__` decides about autocast and gradient scaler next, by the distributed type.
        _enter_state(self.plugin)
        mesh: DeviceMesh | None = self.device_mesh  # type: ignore[has-type]
        # Accelerate builds none for a single process, which then could not read sharded checkpoints.
        if mesh is None and self.plugin.strategy.sharded:
            assert device_type is not None
            _require_process_group(device_type)
            self.device_mesh = mesh = self._build_mesh(device_type)
        return mesh

    def _build_mesh(self, device_type: str) -> DeviceMesh:
        assert self.plugin is not None
        if self.plugin.tensor > 1:
            shape = MeshShape(self.dp_replicate_size, self.dp_shard_size, tensor=self.plugin.tensor)
            mesh = tensor_mesh(device_type, shape, self.plugin.strategy.replicated)
        else:
            sizes: tuple[int, ...] = (self.dp_shard_size,)
            names: tuple[str, ...] = ("dp_shard",)
            if self.plugin.strategy.replicated:
                sizes, names = (self.dp_replicate_size, *sizes), ("dp_replicate", *names)
            mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        # The axis that `fsdp_dim_names` names; TRL's `prepare_fsdp` shards reference models along it.
        mesh["dp_shard"]._flatten("dp_shard_cp")
        return mesh

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Replaces Accelerate's own check, which rejects CPU ranks. Called by `Accelerator.__init__` next."""
        assert self.plugin is not None
        self.plugin.register(accelerator)
        accelerator.prepare = _PreparesWholeModels(accelerator, self.plugin)
        if accelerator.ddp_handler is None:
            # Without it DDP keeps a second whole copy of the gradients in its buckets.
            accelerator.ddp_handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)

    def _refuse_other_axes(self) -> None:
        """Raises BadInputError for sizes of axes that the backend does not run."""
        sizes = {axis: getattr(self, f"{axis}_size") for axis in OTHER_AXES}
        refuse_other_axes(sizes, "{}_size of ShardingMesh, or of the model's DistributedConfig,")
        if self.tp_size not in (None, 1):
            raise BadInputError(
                f"tp_size of ShardingMesh, or of the model's DistributedConfig, is {self.tp_size}, but the sharding "
                "backend cuts whole models itself; remove it, and set tensor in sharding_kwargs or ShardingPlugin"
            )

    def _require_all_processes(self) -> None:
        """Raises BadInputError if each process would silently train a separate model."""
        found = PartialState().num_processes
        if found != self.total_size:
            raise BadInputError(
                f"the launcher started {self.total_size} ranks, but Accelerate sees {found}: each would train a "
                "model of its own. On CPU ranks, ACCELERATE_USE_CPU=true must be set before anything of Accelerate "
                "is built; build the sharding arguments first"
            )

    def __getstate__(self) -> dict[str, Any]:
        # Pickled with TrainingArguments; process groups cannot be.
        return {key: value for key, value in self.__dict__.items() if key != "device_mesh"}


class _PreparesWholeModels:
    """Is the `prepare` of an accelerator. Raises BadInputError for a model that is split over ranks already.

    Accelerate asks nothing of the backend for a model under `ddp`, nor for an optimizer that `Trainer` prepares alone.
    """

    def __init__(self, accelerator: Accelerator, plugin: ShardingPlugin) -> None:
        self._accelerator, self._plugin = accelerator, plugin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        models = [arg for arg in args if isinstance(arg, nn.Module)]
        alone = [] if models or self._plugin.unit_plan is not None else args
        optimizers = [arg for arg in alone if isinstance(arg, torch.optim.Optimizer)]
        stepped = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
        if any(map(_is_split, models)) or any(map(_has_dtensors, stepped)):
            raise BadInputError(
                "the model is split over ranks already, as by from_pretrained(distributed_config=...) or tp_plan, but "
                "the sharding backend shards whole models; remove that argument, and choose the strategy in "
                "sharding_kwargs or ShardingPlugin"
            )
        return type(self._accelerator).prepare(self._accelerator, *args, **kwargs)


def _is_split(model: nn.Module) -> bool:
    """Returns whether a model is split over ranks by other code than `fully_shard` alone."""
    is_marked = bool(getattr(model, "is_distributed_loading_by_transformers", False))
    return is_marked or (not isinstance(model, FSDPModule) and _has_dtensors(model.parameters()))


def _has_dtensors(parameters: Iterable[torch.Tensor]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def _is_last_micro_batch() -> bool:
    return bool(GradientState().sync_gradients)


def _use_cpu_without_gpu() -> None:
    """Makes Accelerate use CPU ranks over gloo if there is no GPU. By default it would start no process group."""
    if torch.cuda.is_available():
        return
    if "ACCELERATE_USE_CPU" not in os.environ and (unused := ranks.unused_accelerator()) is not None:
        Terminal(quiet=os.environ.get("RANK", "0") != "0").print(
            f"The toolkit does not run on this machine's accelerator ({unused}): training runs on the CPU. "
            "`toolkit train --cpu 2` does so with two ranks."
        )
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def _refuse_replicas_on_one_host(shape: MeshShape) -> None:
    """Raises BadInputError if several replicas would each hold all optimizer state in the memory of one host."""
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", str(shape.num_ranks))) // shape.tensor
    if shape.replicate > 1 and shape.shard < on_host:
        raise BadInputError(
            f"hybrid{OFFLOAD}: the {on_host} ranks of a host form {on_host // shape.shard} replicas, each of which "
            f"would hold and step all optimizer state in the same host memory; set dp_shard_size to {on_host} or "
            f"a multiple, or choose zero3{OFFLOAD}"
        )


def reset_accelerate() -> None:
    """Resets Accelerate's state, so that this process (a notebook) can build another `Accelerator`."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _enter_state(plugin: ShardingPlugin) -> None:
    """Makes `plugin` the FSDP plugin of this process, or for `ddp` removes FSDP."""
    state = AcceleratorState()
    if plugin.strategy.sharded:
        kind = DistributedType.FSDP
        state.fsdp_plugin = plugin
        plugin.set_mixed_precision(state.mixed_precision)
    else:
        kind = _type_without_fsdp()
        state.fsdp_plugin = None
    state.distributed_type = PartialState().distributed_type = kind


def _type_without_fsdp() -> DistributedType:
    """Returns the distributed type that this process would have without FSDP."""
    state = PartialState()
    if state.distributed_type != DistributedType.FSDP:
        return state.distributed_type
    if state.num_processes == 1:
        return DistributedType.NO
    return DistributedType.MULTI_GPU if state.device.type == "cuda" else DistributedType.MULTI_CPU


def _require_process_group(device_type: str) -> None:
    """Creates a process group for a single process, so that it follows the same code path as several."""
    if not dist.is_initialized():
        backend = "nccl" if device_type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        # A store in this process: no port that another program could have.
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def _wait_for_gloo_at_exit(device_type: str | None) -> None:
    """Gives gloo's threads time to release the last collective before Python exits and the group is destroyed.

    The threads take the GIL to do so. Once Python is finalizing, that aborts the process: "terminate called without an
    active exception" (pytorch/pytorch#190489). With torch 2.13, 10 of 25 pairs of ranks whose last call was a barrier
    died this way, and none with this pause. GPU ranks have gloo groups too, for messages between hosts.

    If DDP's reducer is the last to hold the group, it ends the group's threads while it holds the GIL, and both wait
    forever. So this module keeps a reference to the group.
    """
    if device_type == "cpu":
        _last_group[:] = [dist.group.WORLD]
    _pause_at_exit()


@functools.cache
def _pause_at_exit() -> None:
    atexit.register(time.sleep, 0.1)


_last_group: list[Any] = []


def _tell_empty_shards_apart(model: nn.Module) -> None:
    """Gives each empty shard a unique `data_ptr`, because Accelerate maps an optimizer's parameters by it.

    A parameter with fewer rows than ranks (a LoRA matrix, a classifier's head) has empty shards. Their `data_ptr` is
    0, so Accelerate would take them all for one parameter.
    """
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", None)
        if local is not None and local.numel() == 0:
            local.data_ptr = lambda local=local: -id(local)


def _optimizers_of(model: nn.Module, accelerator: Accelerator) -> list[torch.optim.Optimizer]:
    """Returns torch's optimizers that step a parameter of the model. Other models' are prepared by the same object."""
    own = set(map(id, model.parameters()))
    inner = [getattr(optimizer, "optimizer", optimizer) for optimizer in accelerator._optimizers]
    return [each for each in inner if any(id(p) in own for group in each.param_groups for p in group["params"])]


def _rebind_optimizer(optimizer: torch.optim.Optimizer, renewed: Mapping[Any, nn.Parameter]) -> None:
    """Replaces the parameters of `optimizer`, and the keys of its state, by the sharded parameters."""
    for group in optimizer.param_groups:
        group["params"] = [renewed.get(parameter, parameter) for parameter in group["params"]]
    for parameter in [known for known in optimizer.state if renewed.get(known, known) is not known]:
        optimizer.state[renewed[parameter]] = optimizer.state.pop(parameter)
