"""Prepares an opened run for training: the stages in their order, and the batches."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.run.stages.model_on_meta import build_on_meta, read_rows
from toolkit.run.stages.part import RunPart, require_same_reads
from toolkit.run.stages.rows import build_windows, length_of_run
from toolkit.run.stages.sharded_model import plan_memory, shard_model
from toolkit.run.stages.stages import BuiltRun, OpenedRun, PreparedRun
from toolkit.user_function import begin_streams


def prepare_run(opened: OpenedRun, parts: Sequence[RunPart]) -> PreparedRun:
    """Builds all that training needs. Collective.

    Raises:
        BadInputError: on every rank, see the stages.
    """
    begin_streams(opened.recipe.training.seed)
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
