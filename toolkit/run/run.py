"""`finetune(recipe)`: builds the parts of a run in order, fits, exports."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from toolkit import ranks
from toolkit.checkpoint.push import push_export, require_login
from toolkit.checkpoint.resume import Resumption, find
from toolkit.checkpoint.session import RunCheckpoints, require_output_dir
from toolkit.checkpoint.store import StorePath, store_of
from toolkit.checkpoint.upload import finish_interrupted
from toolkit.data.samples import TextSamples
from toolkit.data.stream import describe_stream
from toolkit.errors import BadInputError, counted
from toolkit.optim.ema import Ema
from toolkit.optim.schedule import build_schedule
from toolkit.pages.run_page import RunSummary
from toolkit.planning.time.hardware import peak_flops_of
from toolkit.recipe.recipe import Recipe
from toolkit.run.accelerator import (
    build_accelerator,
    build_plugins,
    grow_segments,
    inner_optimizer,
    quiet_libraries,
    released_at_last,
)
from toolkit.run.finished import changed_export
from toolkit.run.folder import (
    claimed,
    clear_killed,
    is_same_and_finished,
    require_unfinished,
    require_writable,
    write_beginning,
    write_data_report,
)
from toolkit.run.live import LiveReport, ended_in
from toolkit.run.loss_warnings import uniform_guess
from toolkit.run.outcome import (
    FinetuneResult,
    conclude,
    export_model,
    finished_before,
    result_of,
    summary_of,
    write_pages,
)
from toolkit.run.parts import Parts, build_parts
from toolkit.run.rows import build_evaluation, rest_of_run
from toolkit.run.run_summary import facts_of, introduce
from toolkit.run.samples import first_samples, last_samples
from toolkit.sharding.plugin import (
    ShardingPlugin,
)
from toolkit.supervise.lease import owned
from toolkit.supervise.parent_death import ended_with_launcher
from toolkit.supervise.rank_status import REPORT
from toolkit.supervise.rendezvous import timed_rendezvous
from toolkit.supervise.store_lease import owned_store
from toolkit.supervise.watched import watched
from toolkit.terminal import Terminal
from toolkit.training.durable_writes import patiently
from toolkit.training.heartbeat import Heartbeat, Phase
from toolkit.training.metrics import Metrics
from toolkit.training.profile import StepProfile
from toolkit.training.stop import StopRequests
from toolkit.training.trainer import Trainer
from toolkit.training.usage import ModelFlops, forget_peaks, model_flops


def finetune(recipe: Recipe | str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> FinetuneResult:
    """Runs a recipe on this process, or on all processes that the launcher started.

    Args:
        recipe: or its name or path, which `Recipe.load` takes.
        overrides: of a recipe that is named; see `Recipe.load`.

    A run that its folder holds already, done by the same recipe, is not run again: the result is read from there.

    Raises:
        ToolkitError: on every rank; with exit code 2 for bad input, before anything is left behind.
        HubError: where the export could not be pushed; the run is done.
    """
    started = time.perf_counter()
    if not isinstance(recipe, Recipe):
        recipe = Recipe.load(recipe, overrides)
    elif overrides:
        raise BadInputError("overrides: the recipe is loaded already; give them to Recipe.load")
    with _started(recipe) as (accelerator, plugin, output_dir, console), ExitStack() as running:
        if ranks.on_first_rank(lambda: is_same_and_finished(output_dir, recipe)):
            console.print(f"this run is finished already, and nothing was trained: {output_dir}", markup=False)
            if (changed := ranks.on_first_rank(lambda: changed_export(output_dir))) is not None:
                console.warn(f"{changed}; `toolkit export {output_dir}` makes it from the last checkpoint")
            ranks.on_first_rank(lambda: clear_killed(output_dir))
            before = ranks.on_first_rank(lambda: finished_before(output_dir))
            _push(recipe, before)
            return before
        running.enter_context(owned(output_dir))
        store = store_of(recipe.checkpoint.to)
        running.enter_context(owned_store(store))
        if store is not None:
            finish_interrupted(output_dir, store, recipe.checkpoint, console.warn)
        found = _found(recipe, output_dir, store)
        with claimed(output_dir, recipe, found, store) as told:
            for line in told:
                console.warn(line)
            beats = running.enter_context(watched(output_dir, recipe.training.stall_minutes))
            parts = build_parts(accelerator, recipe, plugin, found.start[1] if found.start is not None else None)
        # The parts fit each other: what fails from here on leaves the output folder as it is.
        facts = facts_of(accelerator, recipe, plugin, parts)
        introduce(console, facts, recipe, plugin, parts)
        if found.start is not None:
            facts["resumed"] = f"after step {found.start[1].step:,}; the duration is that of the rest"
        live = _live_report(recipe, plugin, parts, facts, output_dir, started)
        with ended_in(live):
            beats.at(Phase.RESTORE)
            fitted = _fit(accelerator, recipe, plugin, parts, output_dir, found, store, console, beats, live)
            beats.at(Phase.EXPORT)
            export_dir, difference, sample = export_model(accelerator, recipe, parts, output_dir)
            seconds, inner = time.perf_counter() - started, accelerator.unwrap_model(parts.model)
            guess = uniform_guess(parts.objective, inner, recipe.objective.class_weights)
            result = result_of(output_dir, fitted.records, export_dir, difference, sample, seconds, guess)
            pages = functools.partial(write_pages, recipe, plugin, parts, facts, result, fitted.step_seconds)
            ranks.on_first_rank(lambda: patiently(pages, "the report and the model card", console.warn))
        conclude(console, recipe, result)
        if fitted.missing is not None:
            console.warn(fitted.missing)
        beats.at(Phase.EXPORT)
        _push(recipe, result)
        return result


def _push(recipe: Recipe, result: FinetuneResult) -> None:
    """Pushes the export where the recipe asks for it: last, as the run is whole without it."""
    if result.export_dir is not None:
        push_export(recipe.export, result.export_dir)


def rehearse(recipe: Recipe) -> None:
    """Does all of a run but its training: every check, the plan, and the first batches. Leaves nothing behind.

    Raises:
        ToolkitError: as `finetune` would.
    """
    with _started(recipe) as (accelerator, plugin, output_dir, console):
        found = _found(recipe, output_dir, store_of(recipe.checkpoint.to), copies=False)
        ranks.on_first_rank(lambda: require_unfinished(output_dir, recipe, found.is_own))
        ranks.on_first_rank(lambda: require_writable(output_dir))
        for checkpoint in found.passed_over:
            console.print(f"a run would pass over {checkpoint.folder.name}: {checkpoint.problem}", markup=False)
        parts = build_parts(accelerator, recipe, plugin)
        introduce(console, facts_of(accelerator, recipe, plugin, parts), recipe, plugin, parts)
        window = next(iter(parts.windows))
        console.print(f"first micro-batch of rank 0, which has {len(window)} in a step:", markup=False)
        for name, tensor in window[0].items():
            console.print(f"  {name} {tuple(tensor.shape)}", markup=False)
        console.print("dry run: nothing was trained, and the output folder is as it was", markup=False)
        accelerator.wait_for_everyone()


@contextmanager
def _started(recipe: Recipe) -> Iterator[tuple[Accelerator, ShardingPlugin, Path, Terminal]]:
    """The accelerator, its plugin, the output folder's path and rank 0's console; released at the end."""
    quiet_libraries()
    # Both before the accelerator: CUDA is not started yet, and a setting that cannot be used ends here.
    grow_segments()
    plugins = build_plugins(recipe)
    plugin: ShardingPlugin = plugins["fsdp_plugin"]
    output_dir = Path(recipe.training.output_dir).expanduser().resolve()
    with timed_rendezvous(recipe.training.stall_minutes):
        accelerator = build_accelerator(recipe, plugins, output_dir)
    forget_peaks(accelerator.device)
    console = Terminal(quiet=not accelerator.is_main_process)
    with released_at_last(accelerator, plugin), ended_with_launcher():
        ranks.on_first_rank(lambda: require_login(recipe.export))
        yield accelerator, plugin, output_dir, console


def _found(recipe: Recipe, output_dir: Path, store: StorePath | None, copies: bool = True) -> Resumption:
    """The checkpoint that the run goes on from, if any."""
    return find(output_dir, recipe.checkpoint.resume, recipe.model_dump(mode="json"), store, copies)


@dataclass(frozen=True)
class _Fitted:
    """What training leaves: the records of metrics.jsonl, and seconds by kind of the profiled steps, if any.

    Attributes:
        missing: why the last checkpoint is not in the store; None: it is, or there is no store.
    """

    records: list[dict[str, Any]]
    step_seconds: dict[str, float] | None
    missing: str | None


def _fit(
    accelerator: Accelerator,
    recipe: Recipe,
    plugin: ShardingPlugin,
    parts: Parts,
    output_dir: Path,
    found: Resumption,
    store: StorePath | None,
    console: Terminal,
    beats: Heartbeat,
    live: LiveReport,
) -> _Fitted:
    """Trains to the run's end, from the beginning or from the checkpoint `found`."""
    model = accelerator.unwrap_model(parts.model)
    ranks.on_first_rank(lambda: write_beginning(output_dir, recipe, parts.data.report, model, parts.tokenizer))
    accelerator.init_trackers(recipe.logging.project_name, config=_tracker_config(recipe))
    set_seed(recipe.training.seed, device_specific=True)  # dropout differs between ranks
    num_positions = parts.windows.num_positions
    if found.start is not None:
        size, manifest = parts.windows.samples_per_step, found.start[1]
        parts.num_steps, num_positions = rest_of_run(recipe, parts.num_steps, size, num_positions, manifest)
        console.print(_resumed_from(found), markup=False)
    metrics_file, unit = output_dir / "metrics.jsonl", parts.objective.unit
    profile = _profile_of(accelerator, recipe, output_dir)
    with (
        StopRequests(recipe.checkpoint.time_limit_minutes) as stop,
        Metrics(
            accelerator, metrics_file, recipe.logging, parts.num_steps, unit, parts.planned.peak_bytes, live.record
        ) as metrics,
    ):
        checkpoints = RunCheckpoints(
            accelerator,
            output_dir,
            recipe,
            plugin.text,
            parts.data.fingerprint,
            parts.model,
            inner_optimizer(parts.optimizer),
            metrics,
            store,
            beats,
            parts.teacher_fingerprint,
            parts.data.content,
        )
        trainer = _build_trainer(accelerator, recipe, parts, metrics, stop, checkpoints, profile, beats)
        if found.start is not None:
            checkpoints.restore(*found.start, trainer, trainer.schedule, num_positions)
        count = recipe.logging.held_out_samples
        prompts = first_samples(accelerator, parts, count, output_dir, resumed=found.start is not None)
        with checkpoints:
            trainer.fit()
        if plugin.engine is not None:
            plugin.engine.flush()  # the last step may still fail
        last_samples(accelerator, parts, prompts, output_dir)
    _write_last_records(metrics, output_dir, console)
    if profile is not None:
        console.print(_where_time_went(profile.seconds), markup=False)
    if parts.data.stream is not None:
        _tell_stream(accelerator, recipe, parts, output_dir)
    return _Fitted(metrics.records, profile.seconds if profile is not None else None, checkpoints.missing)


def _write_last_records(metrics: Metrics, output_dir: Path, console: Terminal) -> None:
    """Waits for room for them. On all ranks: inside a collective the others would give up."""
    require_output_dir(output_dir)
    ranks.on_first_rank(lambda: patiently(metrics.catch_up, "metrics.jsonl", console.warn))


def _live_report(
    recipe: Recipe, plugin: ShardingPlugin, parts: Parts, facts: dict[str, str], output_dir: Path, started: float
) -> LiveReport:
    def summary(records: list[dict[str, Any]]) -> RunSummary:
        result = result_of(output_dir, records, None, seconds=time.perf_counter() - started)
        return replace(summary_of(recipe, plugin, parts, facts, result), doubts=())  # it may get better yet

    return LiveReport(output_dir / REPORT, summary, lambda: parts.num_steps)


def _build_trainer(
    accelerator: Accelerator,
    recipe: Recipe,
    parts: Parts,
    metrics: Metrics,
    stop: StopRequests,
    checkpoints: RunCheckpoints,
    profile: StepProfile | None,
    beats: Heartbeat,
) -> Trainer:
    decay = recipe.training.ema
    return Trainer(
        accelerator,
        parts.model,
        parts.optimizer,
        build_schedule(inner_optimizer(parts.optimizer), recipe.schedule, parts.num_steps),
        parts.objective,
        recipe.training,
        metrics,
        parts.windows,
        evaluation=build_evaluation(accelerator, recipe, parts.data),
        flops=_flops(accelerator, parts.model),
        stop_reason=lambda: stop.reason,
        save_requested=stop.take_save,
        checkpoints=checkpoints,
        profile=profile,
        beats=beats,
        by_block=parts.accumulation.by_block,
        balance=parts.balance,
        ema=None if decay is None else Ema(accelerator.unwrap_model(parts.model), decay),
    )


def _tell_stream(accelerator: Accelerator, recipe: Recipe, parts: Parts, output_dir: Path) -> None:
    """Writes the data report anew, with all the rows that have been read."""
    stream, samples = parts.data.stream, parts.data.train
    assert stream is not None
    assert isinstance(samples, TextSamples)
    # The report of the beginning knows the first window alone.
    report = describe_stream(parts.data.report, stream, samples, parts.tokenizer)
    parts.data = replace(parts.data, report=report)
    ranks.on_first_rank(lambda: write_data_report(output_dir, recipe, report))


def _resumed_from(found: Resumption) -> str:
    assert found.start is not None
    manifest = found.start[1]
    return (
        f"   resumed: after step {manifest.step}, {counted(manifest.samples, 'sample')}, from {found.origin} "
        f"(written by {counted(manifest.world_size, 'rank')}, {manifest.strategy})"
    )


def _profile_of(accelerator: Accelerator, recipe: Recipe, output_dir: Path) -> StepProfile | None:
    steps = recipe.training.profile_steps
    return None if steps is None else StepProfile(accelerator, steps[0], steps[1], output_dir)


def _where_time_went(seconds: dict[str, float] | None) -> str:
    if seconds is None:
        return "   profile: none: the run took no such steps (training.profile_steps)"
    whole = sum(seconds.values())
    parts = ", ".join(f"{kind} {part / whole:.1%}" for kind, part in seconds.items())
    return f"   profile: {whole:.3f} s a step: {parts}"


def _tracker_config(recipe: Recipe) -> dict[str, Any]:
    """The recipe as flat plain values, which is what trackers take."""
    plain = {key: value for key, (value, _) in recipe.origins().items()}
    return {key: value if isinstance(value, int | float | str | bool) else str(value) for key, value in plain.items()}


def _flops(accelerator: Accelerator, model: nn.Module) -> tuple[ModelFlops, float] | None:
    if accelerator.device.type != "cuda":
        return None
    peak = peak_flops_of(torch.cuda.get_device_name(accelerator.device), accelerator.mixed_precision)
    # No MFU for a device whose peak is not known, rather than a guess.
    if peak is None:
        return None
    return model_flops(accelerator.unwrap_model(model)), peak
