"""`finetune(recipe)`: prepares a run in stages, trains, exports."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit import ranks
from toolkit.checkpoint.push import push_export
from toolkit.checkpoint.resume import Resumption, find
from toolkit.checkpoint.store import store_of
from toolkit.errors import BadInputError
from toolkit.pages.card import model_and_data
from toolkit.pages.run_page import RunSummary, progress_of
from toolkit.recipe.recipe import Recipe
from toolkit.run.export import export_model
from toolkit.run.fit import fit
from toolkit.run.folder.finished import changed_export
from toolkit.run.folder.folder import (
    claimed,
    is_same_and_finished,
    keep_day,
    require_unfinished,
    require_writable,
)
from toolkit.run.parts.order import parts_of
from toolkit.run.prepare import prepare_run
from toolkit.run.shown.live_report import LiveReport, ended_in
from toolkit.run.shown.notebook import NotebookOutput, finetune_on, notebook_output
from toolkit.run.shown.outcome import FinetuneResult, finished_before, print_result, result_of, summary_of, write_pages
from toolkit.run.shown.run_summary import facts_of, print_run_summary
from toolkit.run.stages.accelerator import open_run
from toolkit.run.stages.stages import OpenedRun, PreparedRun
from toolkit.supervise.lock import owned
from toolkit.supervise.output_place import require_place
from toolkit.supervise.rank_status import REPORT
from toolkit.supervise.starts import counted_start, forget_starts
from toolkit.supervise.watched import watched
from toolkit.training.durable_writes import patiently
from toolkit.training.extension import Extension
from toolkit.training.phase import Phase


def finetune(
    recipe: Recipe | str | Path,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    num_processes: int | None = None,
    extensions: Sequence[Extension] = (),
) -> FinetuneResult:
    """Runs a recipe on this process, or on all processes that the launcher started.

    Args:
        recipe: a recipe, or its name or path for `Recipe.load`.
        overrides: overrides of a recipe that is named; see `Recipe.load`.
        num_processes: the number of ranks to start, each in a process of its own, from a notebook or a script.
        extensions: extensions of the loop, in addition to those that the recipe names.

    A finished run of the same recipe in the folder is not run again: its result is read from there.

    Raises:
        ToolkitError: on every rank, with exit code 2 for bad input, before anything is left behind.
        HubError: if the export could not be pushed; the run is finished.
    """
    if not isinstance(recipe, Recipe):
        recipe = Recipe.load(recipe, overrides)
    elif overrides:
        raise BadInputError("overrides: the recipe is loaded already; give them to Recipe.load")
    if num_processes is None:
        return _finetune(recipe, extensions)
    if extensions:
        raise BadInputError(
            "extensions: objects of this process cannot be given to others, as num_processes starts them; write the "
            "classes into a file, and name them in training.extensions"
        )
    return finetune_on(recipe, num_processes)


def _finetune(recipe: Recipe, extensions: Sequence[Extension]) -> FinetuneResult:
    """Runs a recipe on the ranks that are running."""
    with open_run(recipe) as opened, ExitStack() as running:
        recipe, output_dir, console = opened.recipe, opened.output_dir, opened.console
        if ranks.on_first_rank(lambda: is_same_and_finished(output_dir, recipe)):
            return _finished_before(opened)
        running.enter_context(owned(output_dir))
        opened.found = found = find_checkpoint(opened)
        step = opened.resumed.step if opened.resumed is not None else 0
        with counted_start(output_dir, step), claimed(output_dir, recipe, found) as told:
            for line in told:
                console.warn(line)
            heartbeat = running.enter_context(watched(output_dir, recipe.training.stall_minutes))
            parts = parts_of(opened, extensions)
            run = prepare_run(opened, parts)
            keep_day(run)
        # The run is prepared: failures from here on leave the output folder as it is.
        opened.facts = facts_of(run)
        told_of = functools.partial(progress_of, limits=opened.story.limits, best_by=recipe.training.best_by)
        output = notebook_output(run.num_steps, told_of)
        with output.holding(console) if output is not None else nullcontext():
            print_run_summary(run)
        live = _live_report(run, output)
        with ended_in(live):
            if opened.resumed is not None:
                heartbeat.enter_phase(Phase.RESTORE)
            records, missing = fit(run, parts, heartbeat, live)
            if missing is not None:
                console.warn(missing)
            heartbeat.enter_phase(Phase.EXPORT)
            export_dir, difference = export_model(run, heartbeat)
            guess = run.objective.uniform_guess(run.inner, opened.recipe.objective.class_weights)
            result = result_of(output_dir, records, export_dir, difference, guess)
            pages = functools.partial(write_pages, run, result)
            ranks.on_first_rank(lambda: patiently(pages, "the report and the model card", console.warn, heartbeat.wait))
            for part in parts:
                part.finish(run, output_dir / REPORT)
        if output is not None:
            output.finish(result)
        else:
            print_result(console, opened.recipe, result, opened.story, opened.shown.side_by_side)
        ranks.on_first_rank(lambda: forget_starts(output_dir))
        heartbeat.enter_phase(Phase.EXPORT)
        _push(opened.recipe, result)
        return result


def _finished_before(opened: OpenedRun) -> FinetuneResult:
    """Prints that the run is finished already, and returns its result."""
    output_dir, console = opened.output_dir, opened.console
    console.print(f"this run is finished already, and nothing was trained: {output_dir}", markup=False)
    if (changed := ranks.on_first_rank(lambda: changed_export(output_dir))) is not None:
        console.warn(changed)
    before = ranks.on_first_rank(lambda: finished_before(output_dir))
    for doubt in before.doubts:
        console.warn(doubt)
    _push(opened.recipe, before)
    return before


def _push(recipe: Recipe, result: FinetuneResult) -> None:
    """Pushes the export if the recipe asks for it: last, because the run is complete without it."""
    if result.export_dir is not None:
        push_export(recipe.export, result.export_dir)


def rehearse(recipe: Recipe) -> None:
    """Does everything of a run except training: every check, the plan, and the first batches. Leaves nothing behind.

    Raises:
        ToolkitError: as `finetune` does.
    """
    with open_run(recipe) as opened:
        recipe, output_dir, console = opened.recipe, opened.output_dir, opened.console
        found = find_checkpoint(opened, copies=False)
        ranks.on_first_rank(lambda: require_place(output_dir))
        ranks.on_first_rank(lambda: require_unfinished(output_dir, recipe, found.is_own))
        ranks.on_first_rank(lambda: require_writable(output_dir))
        for checkpoint in found.passed_over:
            console.print(f"a run would pass over {checkpoint.folder.name}: {checkpoint.problem}", markup=False)
        parts = parts_of(opened)
        run = prepare_run(opened, parts)
        opened.facts = facts_of(run)
        print_run_summary(run)
        window = next(iter(run.windows))
        console.print(f"first micro-batch of rank 0, which has {len(window)} in a step:", markup=False)
        for name, tensor in window[0].items():
            console.print(f"  {name} {tuple(tensor.shape)}", markup=False)
        console.print("dry run: nothing was trained, and the output folder is as it was", markup=False)
        opened.accelerator.wait_for_everyone()


def find_checkpoint(opened: OpenedRun, copies: bool = True) -> Resumption:
    """Finds the checkpoint to resume from, if any."""
    recipe, section = opened.recipe, opened.recipe.checkpoint
    return find(opened.output_dir, section.resume, recipe.model_dump(mode="json"), store_of(section.to), copies)


def _live_report(run: PreparedRun, output: NotebookOutput | None) -> LiveReport:
    opened = run.opened

    def summary(records: list[dict[str, Any]]) -> RunSummary:
        # Without doubts, as the losses may get better yet.
        result = replace(result_of(opened.output_dir, records, None), doubts=())
        title = model_and_data(opened.recipe, run.inner.config.architectures[0], is_done=False)
        summary = summary_of(run, result)
        opened.story.write(opened.output_dir)
        return replace(summary, title=title)

    return LiveReport(opened.output_dir / REPORT, summary, run.num_steps, output)
