"""The stages that turn a model without weights into a sharded one: planning its memory, sharding and loading."""

from __future__ import annotations

import torch
from torch import nn

from toolkit import ranks
from toolkit.data.samples.image_samples import image_samples_of
from toolkit.model.adapters.adapter_checks import require_kept
from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.attention import attention_of
from toolkit.model.load import LoadedModel
from toolkit.model.structure.model_parts import may_leave_unused
from toolkit.objectives.teacher import shard_teacher
from toolkit.optim.build import build_optimizer
from toolkit.planning.check import Planned, plan_run
from toolkit.planning.workload.workload import with_images, workload_of_model
from toolkit.run.stages.accelerator import checkpointing_of, compilation_of
from toolkit.run.stages.stages import MetaModel, OpenedRun, ShardedModel
from toolkit.sharding.apply import prepare_blocks
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.blocks.compiling import Compilation
from toolkit.sharding.plan.strategy import MeshShape
from toolkit.sharding.plan.units import plan_units
from toolkit.sharding.tensor.axes import joined_mesh
from toolkit.terminal import LongAction, Terminal

# Fewest blocks first, because the forward of each one is computed twice.
AUTO_CHECKPOINTING = (4, 3, 2, 1)
"""The n that `sharding.activation_checkpointing: auto` tries in turn, after none: every n-th block."""


def plan_memory(opened: OpenedRun, on_meta: MetaModel) -> Planned:
    """Plans the run's memory, and decides which blocks are checkpointed. Collective.

    Raises:
        BadInputError: if the run cannot fit.
    """
    recipe, plugin, accelerator = opened.recipe, opened.plugin, opened.accelerator
    sizes = accelerator.parallelism_config
    shard = MeshShape(sizes.dp_replicate_size, sizes.dp_shard_size, plugin.reshard_ranks, plugin.tensor)
    mesh = shard if plugin.strategy.sharded else MeshShape(accelerator.num_processes, 1)
    precision, counts = accelerator.mixed_precision, on_meta.data.report.label_counts
    teacher = None if on_meta.teacher is None else on_meta.teacher.model
    images = image_samples_of(on_meta.data.train)

    def plan() -> Planned:
        workload = workload_of_model(recipe, on_meta.model, precision, counts, teacher)
        workload = workload if images is None else with_images(workload, images)
        ways, offload = _checkpointings(opened), plugin.offload is not None
        return plan_run(recipe, workload, plugin.strategy, mesh, offload, ways, opened.device)

    # Rank 0 decides for all, so that every rank checkpoints the same blocks and refuses the same runs.
    with LongAction(opened.console, "planning the memory"):
        return ranks.on_first_rank(plan)


def _checkpointings(opened: OpenedRun) -> list[Checkpointing | None]:
    """Lists the checkpointings from which the plan chooses: the recipe's, or those of `auto`."""
    recipe, plugin, section = opened.recipe, opened.plugin, opened.recipe.sharding
    if section.activation_checkpointing != "auto":
        return [plugin.checkpointing if plugin.strategy.sharded else checkpointing_of(recipe)]
    return [None, *(Checkpointing(n, section.offload_checkpoints) for n in AUTO_CHECKPOINTING)]


def shard_model(opened: OpenedRun, on_meta: MetaModel, planned: Planned) -> ShardedModel:
    """Shards the model with the checkpointing that was planned, and reads its weights. Collective.

    Raises:
        BadInputError: if the model cannot be sharded so, or its weights cannot be read.
    """
    recipe, accelerator = opened.recipe, opened.accelerator
    opened.plugin.checkpointing = planned.checkpointing
    compilation = prepare_forwards(opened, on_meta.loaded)
    made = build_optimizer(on_meta.model, recipe.optimizer, recipe.sharding.unit_classes)
    prepared: tuple[nn.Module, torch.optim.Optimizer] = accelerator.prepare(on_meta.model, made)
    model, optimizer = prepared
    inner = accelerator.unwrap_model(model)
    require_kept(inner, on_meta.loaded.fit, recipe.export)
    if (teacher := on_meta.teacher) is not None:
        strategy, precision = opened.plugin.strategy, accelerator.mixed_precision
        # It is not cut, so the ranks of a tensor group run it alike, and share its parameters as all ranks do.
        mesh = joined_mesh(accelerator.state.device_mesh) if strategy.sharded else None
        shard_teacher(teacher.model, strategy, mesh, precision, recipe.sharding.unit_classes, teacher.load_weights)
        teacher.model.to(opened.device)
    return ShardedModel(model, inner, optimizer, compilation, on_meta.objective, on_meta.data, on_meta.padded)


def prepare_forwards(opened: OpenedRun, loaded: LoadedModel) -> Compilation | None:
    """Prepares a model whole for DDP. The plugin loads the weights and prepares the blocks of one that it shards."""
    if attention_of(base_of(loaded.model)) == "flex_attention" and opened.accelerator.is_main_process:
        Terminal().print("flex_attention compiles its kernels in the first forward, which can take minutes")
    if opened.plugin.strategy.sharded:
        opened.plugin.load_weights = loaded.load_weights
        return opened.plugin.compilation
    return _prepare_for_ddp(opened, loaded)


def _prepare_for_ddp(opened: OpenedRun, loaded: LoadedModel) -> Compilation | None:
    """Does what the sharding plugin does in `prepare`, for a model that DDP wraps whole."""
    model = loaded.model
    loaded.load_weights(None)
    compilation, checkpointing = compilation_of(opened.recipe), opened.plugin.checkpointing
    if checkpointing is not None or compilation is not None:
        prepare_blocks(model, plan_units(model, opened.recipe.sharding.unit_classes), checkpointing, compilation)
    # It makes DDP walk the graph in every step, so only models that need it get it.
    opened.accelerator.ddp_handler.find_unused_parameters = may_leave_unused(model, loaded.trained)
    return compilation
