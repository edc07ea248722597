"""Prepares an opened run for training: the stages in their order, those before any weight is read, and the batches."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from functools import partial

from transformers import PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.checkpoint.manifest import Manifest
from toolkit.data import build
from toolkit.data.build import TokenisedData
from toolkit.data.layouts.template_arguments import set_date, today, writes_date
from toolkit.data.tokens import tokenizer
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapter_checks import (
    require_mergeable,
    require_new_rows_trained,
    require_one_type,
    require_readable,
)
from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.attention import settle_attention
from toolkit.model.load import LoadedModel, load
from toolkit.model.quantised.quantised import quantised_layers
from toolkit.model.structure.model_parts import asked_parts, sees
from toolkit.objectives.build import build_objective
from toolkit.objectives.classification import SEVERAL_LABELS
from toolkit.objectives.losses.balance import build_balance
from toolkit.objectives.teacher import load_teacher
from toolkit.recipe.combinations import refuse
from toolkit.recipe.features import Surroundings
from toolkit.run.stages.part import RunPart, require_same_reads
from toolkit.run.stages.rows import build_windows, fitting, length_of_run, require_room
from toolkit.run.stages.sharded_model import plan_memory, shard_model
from toolkit.run.stages.stages import BuiltRun, MetaModel, OpenedRun, PreparedRun
from toolkit.user_function import begin_own_code


def prepare_run(opened: OpenedRun, parts: Sequence[RunPart]) -> PreparedRun:
    """Builds all that training needs. Collective.

    Raises:
        BadInputError: on every rank, see the stages.
    """
    begin_own_code(opened.recipe.training.seed)
    for part in parts:
        part.before_rows()
    require_same_reads(opened)
    on_meta = build_on_meta(opened, *read_rows(opened))
    for part in parts:
        part.on_meta(on_meta)
    require_same_reads(opened)
    planned = plan_memory(opened, on_meta)
    built = BuiltRun(opened, on_meta, planned, shard_model(opened, on_meta, planned))
    for part in parts:
        part.check(built)
    num_steps, num_positions = length_of_run(opened, built.data)
    accumulation = opened.recipe.training.gradient_accumulation_steps
    windows = build_windows(opened.recipe, built.data, num_steps, accumulation, *opened.share)
    windows.num_positions = num_positions
    run = PreparedRun(**vars(built), windows=windows, num_steps=num_steps)
    for part in parts:
        part.prepared(run)
    require_same_reads(opened, opened.console.warn)
    return run


# ---- Before any weight is read: the rows, and the model on the meta device with its attention and objective ----


def read_rows(opened: OpenedRun) -> tuple[PreTrainedTokenizerBase, TokenisedData]:
    """Loads the tokenizer and tokenises the rows; where a run resumes, a chat template keeps its date. Collective.

    Raises:
        BadInputError: if a source, a row or the tokenizer cannot be read.
    """
    recipe = opened.recipe
    tokens = tokenizer.load(recipe.model, recipe.data, recipe.objective.kind)
    if writes_date(tokens) and recipe.data.template_date is None:
        # Rank 0's: around midnight hosts differ.
        set_date(tokens, ranks.on_first_rank(lambda: _day_of(opened.resumed) or today()))
    return tokens, build.build(recipe.data, tokens, recipe.training.seed, recipe.objective)


def _day_of(resumed: Manifest | None) -> date | None:
    written = None if resumed is None else resumed.recipe["data"].get("template_date")
    return None if written is None else date.fromisoformat(written)


def build_on_meta(opened: OpenedRun, tokens: PreTrainedTokenizerBase, rows: TokenisedData) -> MetaModel:
    """Builds the model without weights, and decides all that depends on its architecture.

    Raises:
        BadInputError: if the model cannot be trained or exported as asked; before any weight is read.
    """
    recipe = opened.recipe
    loaded = _load_on_meta(opened, tokens, rows)
    model = loaded.model
    data, padded = fitting(recipe, tokens, rows, model)
    require_room(model, tokens, recipe, data)
    packed = data.report.packing
    asked, compiled = recipe.model.attention, recipe.training.compile
    attention = settle_attention(base_of(model), asked, opened.device, opened.in_16_bits, packed, compiled)
    teacher = load_teacher(recipe, tokens, opened.accelerator.mixed_precision, data.train.has_images)
    if teacher is not None:
        settle_attention(teacher.model, recipe.model.attention, opened.device, opened.in_16_bits, packed, False)
    made = partial(
        build_objective,
        recipe.objective,
        model,
        label_counts=data.report.label_counts,
        teacher=None if teacher is None else teacher.model,
        sources=recipe.data.source_names,
        continued=loaded.started is not None,
    )
    balance = build_balance(recipe.objective, model)
    return MetaModel(loaded, tokens, data, padded, attention, teacher, made, made(packed=packed), balance)


def _load_on_meta(opened: OpenedRun, tokens: PreTrainedTokenizerBase, rows: TokenisedData) -> LoadedModel:
    """Builds the model; raises BadInputError if there is none, or it cannot be trained or exported as asked."""
    recipe, has_images = opened.recipe, rows.train.has_images
    parts = asked_parts(recipe.model, recipe.adapter, has_images)
    seed, kind = recipe.training.seed, recipe.objective.kind
    loaded = load(recipe.model, tokens, seed, rows.label_names, recipe.adapter, kind, parts)
    model = loaded.model
    if rows.train.has_several_labels:
        base_of(model).config.problem_type = SEVERAL_LABELS
    if recipe.model.train is not None and not sees(base_of(model)):
        raise BadInputError("model.train has no effect: the model reads text alone; remove it")
    require_one_type(model, recipe.model.dtype, opened.accelerator.mixed_precision)
    require_readable(model, recipe.export)
    if recipe.export.merge:
        require_mergeable(model)
    if recipe.model.name_or_path is not None:
        require_new_rows_trained(model, tokens.convert_ids_to_tokens(tokenizer.new_ids(tokens)))
    quantised = any(quantised_layers(model))
    refuse(recipe, Surroundings(is_quantised=quantised, has_images=has_images))
    return loaded
