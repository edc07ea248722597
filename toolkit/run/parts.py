"""The parts of a run: tokenizer, data, model, optimizer and what is checked of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.checkpoint.manifest import Manifest
from toolkit.data import build, tokenizer
from toolkit.data.build import TokenisedData
from toolkit.data.cache import cache_folder
from toolkit.data.cut import Part
from toolkit.data.loader import EpochOrder, TrainLoader
from toolkit.data.samples import JudgedSamples, LabelledSamples, PairSamples, TextSamples
from toolkit.data.stream import StreamLoader
from toolkit.errors import BadInputError
from toolkit.model.adapter_checks import require_kept, require_mergeable, require_one_type
from toolkit.model.adapters import base_of
from toolkit.model.attention import attention_of, settle_attention
from toolkit.model.load import fingerprint, load
from toolkit.model.quantised import quantised_layers
from toolkit.objectives.balance import Balance, build_balance
from toolkit.objectives.build import AnyObjective, build_objective
from toolkit.objectives.classification import SequenceClassification
from toolkit.objectives.distillation import Distillation
from toolkit.objectives.kto import Kto
from toolkit.objectives.objective import Objective
from toolkit.objectives.preference import Preference
from toolkit.objectives.reference import identity_of, with_reference
from toolkit.objectives.reward import Reward
from toolkit.optim.build import build_optimizer
from toolkit.pages.samples import SideBySide
from toolkit.planning.check import Planned, plan_run
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import NEXT_TOKEN, steps_of_run
from toolkit.run.accelerator import checkpointing_of, compilation_of
from toolkit.run.by_block import Accumulation, accumulation_of
from toolkit.run.packing_check import LeakError, check_causal, check_leaks
from toolkit.run.quantised_check import check_quantised
from toolkit.run.rows import build_windows, fitting, last_position, may_pad, require_room, without_packing
from toolkit.run.sequence import check_parts, part_of, share_rows
from toolkit.run.teacher import asked_teacher, check_teacher, place_teacher
from toolkit.sharding.apply import prepare_blocks
from toolkit.sharding.checkpointing import Checkpointing, num_in_chunks
from toolkit.sharding.chunks import CHUNK_TOKENS
from toolkit.sharding.compiling import Compilation
from toolkit.sharding.plugin import ShardingPlugin
from toolkit.sharding.strategy import MeshShape
from toolkit.sharding.units import plan_units
from toolkit.sharding.unused import has_branches
from toolkit.terminal import Pass, Terminal

# Fewest blocks first, because the forward of each one is computed twice.
AUTO_CHECKPOINTING = (4, 3, 2, 1)
"""What `sharding.activation_checkpointing: auto` tries after none, in turn: every n-th block."""


@dataclass(frozen=True)
class Leaks:
    """Rows that share a sample.

    Attributes:
        fill_rate: share of the samples' tokens that rows fill.
        differences: of a document's logits, as shares of the largest, when the others are replaced and when it is
            alone; None where no sample holds two rows.
    """

    fill_rate: float
    differences: tuple[float, float] | None


@dataclass
class Parts:
    """What `build_parts` hands to the rest of the run.

    Attributes:
        attention: the implementation that was chosen, and why.
        head_loss: what the losses come from; None for objectives that have no choice.
        leaks: what was found about rows that share a sample; None where none do.
        padded: why rows are padded although `data.packing` is not set; None where that is not so.
        side_by_side: what the model writes behind held-out prompts, if that was asked for.
        accumulation: how the micro-batches of a step run.
        balance: what watches the routers of a mixture of experts.
        parts_differ: the largest difference of logits or gradients from those of whole rows; None where rows are.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: AnyObjective
    tokenizer: PreTrainedTokenizerBase
    data: TokenisedData
    windows: TrainLoader | StreamLoader
    num_steps: int
    planned: Planned
    compilation: Compilation | None
    attention: str
    head_loss: str | None
    leaks: Leaks | None
    padded: str | None
    accumulation: Accumulation
    balance: Balance
    parts_differ: float | None = None
    side_by_side: list[SideBySide] = field(default_factory=list)

    @property
    def teacher(self) -> nn.Module | None:
        """The model that is learned from, if any."""
        return self.objective.teacher.model if isinstance(self.objective, Distillation) else None

    @property
    def teacher_fingerprint(self) -> str | None:
        """What tells its files from others'."""
        teacher: Any = self.teacher
        return None if teacher is None else teacher.fit.fingerprint


def build_parts(
    accelerator: Accelerator, recipe: Recipe, plugin: ShardingPlugin, resumed: Manifest | None = None
) -> Parts:
    """Tokenizer, data, sharded model and optimizer of a run. `resumed`: of the checkpoint that it resumes from."""
    training = recipe.training
    tokens = tokenizer.load(recipe.model, recipe.data, recipe.objective.kind)
    data = build.build(recipe.data, tokens, training.seed, recipe.objective)
    model = _loaded(accelerator, recipe, tokens, data)
    data, padded = fitting(recipe, tokens, data, model)
    # The model is on the meta device still: what cannot work ends here, before any weight is read.
    require_room(model, tokens, recipe)
    packed, label_counts = data.report.packing, data.report.label_counts
    in_16_bits = accelerator.mixed_precision != "no" or recipe.model.dtype != "float32"
    attention = _attention(accelerator, recipe, model, in_16_bits, packed)
    teacher = asked_teacher(accelerator, recipe, tokens, packed)
    objective = build_objective(recipe.objective, model, packed, label_counts, teacher)
    balance = build_balance(recipe.objective, model)
    # Before `prepare`, which wraps the blocks that the plan has chosen to checkpoint.
    planned = _planned(accelerator, recipe, model, plugin, label_counts, teacher)
    compilation = _prepared(accelerator, model, recipe, plugin)
    optimizer = build_optimizer(model, recipe.optimizer, recipe.sharding.unit_classes)
    model, optimizer = accelerator.prepare(model, optimizer)
    require_kept(accelerator.unwrap_model(model), recipe.export)
    place_teacher(accelerator, recipe, teacher, plugin)
    # After `prepare`: the model is checked as it is trained, with its kernels and its precision.
    check_quantised(accelerator, recipe, model, objective, data.train)
    leaks, leak = _check_leaks(accelerator, recipe, model, objective, data, in_16_bits)
    if leak is not None:
        padded, data = leak, without_packing(recipe, tokens)
        objective = build_objective(recipe.objective, model, False, label_counts, teacher)
    check_teacher(accelerator, recipe, objective, data, in_16_bits)
    group, num_groups, part = part_of(accelerator, recipe)
    parts_differ = _check_parts(accelerator, model, objective, data, part, in_16_bits, planned)
    head_loss = _checked_head_loss(accelerator, objective, model, in_16_bits)
    size = training.micro_batch_size * training.gradient_accumulation_steps * num_groups
    num_steps = steps_of_run(training, len(data.train), size)
    # Before the first step, while the model is its own reference.
    if isinstance(objective, Preference | Kto) and objective.needs_references:
        _require_same_reference(accelerator.unwrap_model(model), recipe, resumed)
        last = last_position(recipe, data, num_steps, size, resumed)
        data = _with_references(accelerator, recipe, model, objective, data, last)
    return Parts(
        model,
        optimizer,
        objective,
        tokens,
        data,
        build_windows(recipe, data, num_steps, training.gradient_accumulation_steps, group, num_groups, part),
        num_steps,
        planned,
        compilation,
        attention,
        head_loss,
        leaks,
        padded,
        accumulation_of(recipe, planned, plugin, model, accelerator.device),
        balance,
        parts_differ,
    )


def _loaded(
    accelerator: Accelerator, recipe: Recipe, tokens: PreTrainedTokenizerBase, data: TokenisedData
) -> nn.Module:
    """The model on the meta device. Raises BadInputError where there is none, or it cannot be trained or exported."""
    kind = recipe.objective.kind
    model: nn.Module = load(recipe.model, tokens, recipe.training.seed, data.label_names, recipe.adapter, kind)
    require_one_type(model, recipe.model.dtype, accelerator.mixed_precision)
    if recipe.export.merge:
        require_mergeable(model)
    if recipe.training.compile and any(quantised_layers(model)):
        raise BadInputError(
            "training.compile is not possible with a quantised base, whose products torch cannot compile into one "
            "graph; remove it"
        )
    return model


def _attention(accelerator: Accelerator, recipe: Recipe, model: PreTrainedModel, in_16_bits: bool, packed: bool) -> str:
    """Gives the model the attention of the run; what it is, and why."""
    asked, compiled = recipe.model.attention, recipe.training.compile
    chosen = settle_attention(base_of(model), asked, accelerator.device, in_16_bits, packed, compiled)
    share_rows(recipe, model)
    return chosen


def _planned(
    accelerator: Accelerator,
    recipe: Recipe,
    model: nn.Module,
    plugin: ShardingPlugin,
    label_counts: dict[str, int] | None,
    teacher: nn.Module | None,
) -> Planned:
    """What the run will hold; the plugin is told what to checkpoint. Raises BadInputError where it cannot fit."""
    sizes, num_ranks = accelerator.parallelism_config, accelerator.num_processes
    sharded = plugin.strategy.sharded
    shard = MeshShape(sizes.dp_replicate_size, sizes.dp_shard_size, plugin.node)
    mesh = shard if sharded else MeshShape(num_ranks, 1)
    # Rank 0 decides for all, so that every rank checkpoints the same blocks and refuses the same runs.
    with Pass(Terminal(quiet=ranks.rank() != 0), "planning the memory"):
        planned = ranks.on_first_rank(
            lambda: plan_run(
                recipe,
                model,
                plugin.strategy,
                mesh,
                plugin.offload is not None,
                _checkpointings(recipe, plugin, model),
                accelerator.mixed_precision,
                label_counts,
                accelerator.device,
                teacher,
            )
        )
    plugin.checkpointing = planned.checkpointing
    return planned


def _checkpointings(recipe: Recipe, plugin: ShardingPlugin, model: nn.Module) -> list[Checkpointing | None]:
    """Those among which the plan chooses: the one asked for, or what `auto` stands for."""
    section = recipe.sharding
    if section.activation_checkpointing != "auto":
        return [plugin.checkpointing if plugin.strategy.sharded else checkpointing_of(recipe)]
    offload, size = section.offload_checkpoints, section.chunk_tokens
    found = [None, *(Checkpointing(n, offload, size) for n in AUTO_CHECKPOINTING)]
    # Last, as little is gained where a row is not long. Behind checkpoints of all blocks it takes no time.
    tokens = recipe.training.micro_batch_size * recipe.data.max_length // section.sequence
    may_chunk = recipe.objective.kind != "seq2seq" and tokens > CHUNK_TOKENS
    if size is None and may_chunk and num_in_chunks(model, plan_units(model, section.unit_classes)):
        found.append(Checkpointing(1, offload, CHUNK_TOKENS))
    return found


def _require_same_reference(inner: Any, recipe: Recipe, resumed: Manifest | None) -> None:
    """Notes which files the reference is from, for the checkpoints of the run.

    Raises:
        BadInputError: if the checkpoint to resume from was trained against the weights of other files.
    """
    inner.fit.fingerprint = inner.fit.fingerprint or fingerprint(recipe.model)
    if resumed is not None and resumed.base not in (None, inner.fit.fingerprint):
        raise BadInputError(
            f"checkpoint.resume: the reference of the run up to step {resumed.step} had other weights than "
            f"model.name_or_path ({recipe.model.name_or_path!r}) has now; bring them back (of a hub model: set "
            "model.revision to their commit), or start anew with another training.output_dir"
        )


def _with_references(
    accelerator: Accelerator,
    recipe: Recipe,
    model: nn.Module,
    objective: Preference | Kto,
    data: TokenisedData,
    last: int,
) -> TokenisedData:
    """The data with the log-probabilities of the model before its first step, as far as the run's `last` position."""
    tell = Pass(Terminal(quiet=not accelerator.is_main_process), "log-probabilities of the reference")
    found: dict[str, Any] = {}
    for split, samples in (("train", data.train), ("validation", data.validation)):
        if isinstance(samples, PairSamples | JudgedSamples):
            inner, precision = accelerator.unwrap_model(model), accelerator.mixed_precision
            identity = identity_of(recipe, inner, precision, data.fingerprint, split)
            size, cache = recipe.training.micro_batch_size, cache_folder(recipe.data)
            if split == "train":
                reached = EpochOrder(len(samples), recipe.training.seed, recipe.data.shuffle).first(last)
            else:
                reached = list(range(len(samples))[: recipe.data.max_validation_samples])
            told = (cache, identity, tell, part_of(accelerator, recipe)[2])
            found[split] = with_reference(accelerator, model, objective, samples, reached, size, *told)
    return replace(data, **found)


def _checked_head_loss(
    accelerator: Accelerator,
    objective: AnyObjective,
    model: nn.Module,
    in_16_bits: bool,
) -> str | None:
    """What the losses come from, tried on a few tokens; None for objectives that have no choice."""
    if isinstance(objective, SequenceClassification | Reward):
        return None
    return objective.check_head_loss(model, accelerator.device, in_16_bits)


def _check_leaks(
    accelerator: Accelerator,
    recipe: Recipe,
    model: nn.Module,
    objective: Objective,
    data: TokenisedData,
    in_16_bits: bool,
) -> tuple[Leaks | None, str | None]:
    """What was found about rows that share a sample, if any do; why they must not, where the recipe leaves it open.

    Raises BadInputError where they leak and the recipe asks for them.
    """
    if recipe.objective.kind in (*NEXT_TOKEN, "preference", "kto") and recipe.sharding.sequence == 1:
        check_causal(model, accelerator.unwrap_model(model), objective, accelerator.device)
    # Both completions of a pair share a sample, whether or not it is packed.
    pairs = isinstance(data.train, PairSamples)
    if not isinstance(data.train, TextSamples) or not (data.train.packed or pairs):
        return None, None
    found, leak = None, None
    try:
        with Pass(Terminal(quiet=ranks.rank() != 0), "checking that rows that share a sample do not see each other"):
            found = check_leaks(
                model,
                accelerator.unwrap_model(model),
                objective,
                data.train,
                recipe.training.micro_batch_size,
                accelerator.device,
                in_16_bits,
            )
    except LeakError as error:
        leak = error
    # All or none: ranks whose rounding differs must not train on different samples.
    leak = next((told for told in ranks.gather_objects(leak) if told is not None), None)
    if leak is not None:
        if not may_pad(recipe, data):
            raise leak
        return None, leak.why
    if not data.train.packed:
        return None, None
    train = data.report.train
    assert train is not None
    assert train.fill_rate is not None, "rows are packed"
    return Leaks(train.fill_rate, found), None


def _check_parts(
    accelerator: Accelerator,
    model: nn.Module,
    objective: Objective,
    data: TokenisedData,
    part: Part,
    in_16_bits: bool,
    planned: Planned,
) -> float | None:
    """The largest difference from whole rows, see `check_parts`; None where rows are whole."""
    if not isinstance(data.train, TextSamples | LabelledSamples):
        return None
    inner = accelerator.unwrap_model(model)
    chunked = planned.checkpointing is not None and planned.checkpointing.chunk_tokens is not None
    return check_parts(model, inner, objective, data.train, part, accelerator.device, in_16_bits, chunked)


def _prepared(
    accelerator: Accelerator, model: PreTrainedModel, recipe: Recipe, plugin: ShardingPlugin
) -> Compilation | None:
    """How blocks are compiled; what the plugin shards, it prepares itself."""
    if attention_of(base_of(model)) == "flex_attention" and accelerator.is_main_process:
        Terminal().print("flex_attention compiles its kernels in the first forward, which can take minutes")
    if plugin.strategy.sharded:
        return plugin.compilation
    return _prepare_for_ddp(accelerator, model, recipe, plugin.checkpointing)


def _prepare_for_ddp(
    accelerator: Accelerator, model: PreTrainedModel, recipe: Recipe, checkpointing: Checkpointing | None
) -> Compilation | None:
    """What the sharding plugin does in `prepare`, for a model that DDP wraps as it is; how it was compiled, if so."""
    model.materialize_weights()
    compilation = compilation_of(recipe)
    if checkpointing is not None or compilation is not None:
        prepare_blocks(model, plan_units(model, recipe.sharding.unit_classes), checkpointing, compilation)
    # It costs DDP a walk over the graph in every step, so only models with branches get it.
    accelerator.ddp_handler.find_unused_parameters = has_branches(model)
    return compilation
