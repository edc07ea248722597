"""Prepares an opened run for training: the stages in their order, the reference's log-probabilities, the batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.checkpoint.manifest import Manifest
from toolkit.data.build import TokenisedData
from toolkit.data.rows.cache import cache_folder
from toolkit.data.samples.loader import EpochOrder
from toolkit.data.samples.samples import Samples
from toolkit.data.templates.stops import add_ends, turn_ends
from toolkit.model.adapters.adapters import base_of
from toolkit.model.weights.weights import Fit
from toolkit.objectives.objective import Objective
from toolkit.recipe.schema import steps_of_run
from toolkit.run.checks.by_block_check import accumulation_of
from toolkit.run.checks.sequence_check import part_of
from toolkit.run.parts.part import RunPart, require_same_reads
from toolkit.run.stages.model_checks import check_model
from toolkit.run.stages.model_on_meta import build_on_meta, read_rows
from toolkit.run.stages.reference import identity_of, with_reference
from toolkit.run.stages.rows import build_windows, last_position, rest_of_run
from toolkit.run.stages.sharded_model import plan_memory, shard_model
from toolkit.run.stages.stages import CheckedModel, OpenedRun, PreparedRun, ReportExtras, ShardedModel
from toolkit.terminal import Pass
from toolkit.user_function import begin_streams


def prepare_run(opened: OpenedRun, parts: Sequence[RunPart], resumed: Manifest | None = None) -> PreparedRun:
    """Builds all that training needs. Collective.

    Args:
        resumed: manifest of the checkpoint to resume from.

    Raises:
        BadInputError: on every rank, see the stages.
    """
    recipe, accelerator = opened.recipe, opened.accelerator
    training = recipe.training
    begin_streams(training.seed)
    for run_part in parts:
        run_part.before_rows(resumed)
    require_same_reads(parts, resumed)
    on_meta = build_on_meta(opened, read_rows(opened, resumed))
    for run_part in parts:
        run_part.on_meta(on_meta)
    require_same_reads(parts, resumed)
    planned = plan_memory(opened, on_meta)
    sharded = shard_model(opened, on_meta, planned)
    checked = check_model(opened, on_meta, planned, sharded)
    group, num_groups, part = part_of(accelerator, recipe.sharding)
    size = training.micro_batch_size * training.gradient_accumulation_steps * num_groups
    for run_part in parts:
        run_part.require_batches(size)
    num_steps = steps_of_run(training, len(checked.data.train), size)
    last = last_position(recipe, checked.data, num_steps, size, resumed)
    checked = _with_references(opened, on_meta.loaded.fit, sharded, checked, last)
    windows = build_windows(
        recipe, checked.data, num_steps, training.gradient_accumulation_steps, group, num_groups, part
    )
    num_positions = windows.num_positions
    if resumed is not None:
        num_steps, num_positions = rest_of_run(recipe, num_steps, size, num_positions, resumed)
    accumulation = accumulation_of(recipe, planned, opened.plugin, sharded.model, opened.device, checked.alone)
    shown = ReportExtras(checked.data.report, [])
    ends = teach_to_stop(base_of(sharded.inner), on_meta.tokenizer, checked.data.train)
    run = PreparedRun(
        on_meta,
        planned,
        sharded,
        checked,
        windows,
        num_steps,
        num_positions,
        accumulation,
        shown,
        ends,
    )
    for run_part in parts:
        run_part.prepared(run)
    require_same_reads(parts, resumed, opened.console.warn)
    return run


def _with_references(
    opened: OpenedRun, fit: Fit, sharded: ShardedModel, checked: CheckedModel, last: int
) -> CheckedModel:
    """Adds the log-probabilities of the reference, the model before its first step, if the objective needs them.

    Args:
        last: the run's last position in the data.
    """
    objective = checked.objective
    if not objective.needs_references:
        return checked
    data = _with_log_probabilities(opened, fit.adapter, sharded, objective, checked.data, last)
    return replace(checked, data=data)


def _with_log_probabilities(
    opened: OpenedRun,
    adapter: str | None,
    sharded: ShardedModel,
    objective: Objective,
    data: TokenisedData,
    last: int,
) -> TokenisedData:
    recipe, accelerator = opened.recipe, opened.accelerator
    progress = Pass(opened.console, "log-probabilities of the reference")
    found: dict[str, Any] = {}
    for split, samples in (("train", data.train), ("validation", data.validation)):
        compared = None if samples is None else samples.compared
        if compared is not None:
            precision = accelerator.mixed_precision
            # The fingerprint has images by name alone.
            of_rows = data.fingerprint if data.content is None else f"{data.fingerprint} {data.content}"
            identity = identity_of(recipe, sharded.inner, adapter, precision, of_rows, split)
            size, cache = recipe.training.micro_batch_size, cache_folder(recipe.data)
            if split == "train":
                reached = EpochOrder(len(compared), recipe.training.seed, recipe.data.shuffle).first(last)
            else:
                reached = list(range(len(compared))[: recipe.data.max_validation_samples])
            part, copies = part_of(accelerator, recipe.sharding)[2], recipe.sharding.tensor
            where = (cache, identity, progress, part, copies)
            found[split] = with_reference(accelerator, sharded.model, objective, compared, reached, size, *where)
    return replace(data, **found)


def teach_to_stop(model: Any, tokenizer: PreTrainedTokenizerBase, samples: Samples) -> str | None:
    """Adds the ends that are learned to the model's `generation_config.eos_token_id`, which its export takes.

    A chat model's configuration often has only the end token of its base (Gemma's lacks `<end_of_turn>`), so that
    servers generate past the end of the answer.

    Returns:
        A description of what ends an answer, and what was added; None for models that do not continue a text.
    """
    if not samples.continues_text or not model.can_generate():
        return None
    learned = samples.learned_ends(turn_ends(tokenizer) | {tokenizer.eos_token_id})
    if not learned:
        return "no special token is learned as an end; generation stops where the model's settings say"
    settings = model.generation_config
    configured = settings.eos_token_id
    ends = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in sorted(learned))
    if not add_ends(settings, learned):
        return f"{ends} is learned as an end, and generation_config.eos_token_id has it"
    return f"{ends} is learned as an end; generation_config.eos_token_id of the export is {settings.eos_token_id}, " + (
        f"and not {configured} as before"
    )
