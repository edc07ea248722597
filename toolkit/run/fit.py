"""The stage that trains a prepared run, from a checkpoint if there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from toolkit import ranks
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.resume import Resumption
from toolkit.checkpoint.session import RunCheckpoints, RunIdentity, require_output_dir
from toolkit.checkpoint.store import StorePath
from toolkit.data.stream import describe_stream
from toolkit.errors import counted
from toolkit.optim.schedule import build_schedule, changed_rate
from toolkit.planning.hardware import peak_flops_of
from toolkit.recipe.figures import steering
from toolkit.recipe.recipe import Recipe
from toolkit.run.folder.folder import write_beginning, write_data_report
from toolkit.run.parts.part import Loop, RunPart, reads_of
from toolkit.run.shown.live_report import LiveReport
from toolkit.run.stages.accelerator import inner_optimizer
from toolkit.run.stages.rows import build_evaluation
from toolkit.run.stages.stages import OpenedRun, PreparedRun
from toolkit.sharding.fsdp2.shards import state_once
from toolkit.sharding.tensor.copies import require_alike
from toolkit.training.durable_writes import patiently
from toolkit.training.extension import Extension
from toolkit.training.extensions.heartbeat import Heartbeat
from toolkit.training.extensions.non_finite import NonFiniteSteps, require_some_steps
from toolkit.training.extensions.records import Records
from toolkit.training.loop_state import Windows
from toolkit.training.metrics import Metrics
from toolkit.training.stop import StopRequests
from toolkit.training.trainer import Trainer
from toolkit.training.usage import ModelFlops, model_flops


@dataclass(frozen=True)
class Fitted:
    """The results of training apart from the model.

    Attributes:
        records: the records of metrics.jsonl.
        missing: why the last checkpoint is not in the store, or None if it is or there is no store.
    """

    records: list[dict[str, Any]]
    missing: str | None


def fit(
    opened: OpenedRun,
    run: PreparedRun,
    parts: Sequence[RunPart],
    found: Resumption,
    store: StorePath | None,
    heartbeat: Heartbeat,
    live: LiveReport,
    facts: dict[str, str],
) -> Fitted:
    """Trains to the run's end, from the beginning or from the checkpoint `found`. Collective.

    Raises:
        StoppedError: if a rank was asked to end; the state is saved.
        TrainingError: if too many steps in a row had no finite loss and gradient, or all steps of the run; or ranks
            hold different copies of a parameter.
    """
    recipe, accelerator, output_dir, console = opened.recipe, opened.accelerator, opened.output_dir, opened.console
    ranks.on_first_rank(lambda: write_beginning(output_dir, recipe, run.data.report, run.inner, run.fit, run.tokenizer))
    for part in parts:
        part.start(run, facts, found.start is not None)

    def recorded(split: str, values: Mapping[str, float], step: int) -> None:
        for part in parts:
            part.recorded(split, values, step)

    # Dropout differs between ranks, except those that compute the same rows.
    set_seed(recipe.training.seed + accelerator.process_index // recipe.sharding.tensor)
    if found.start is not None:
        console.print(_resumed_from(found, recipe), markup=False)
    with (
        StopRequests(recipe.checkpoint.time_limit_minutes) as stop,
        Metrics(
            accelerator,
            output_dir / "metrics.jsonl",
            recipe.logging,
            run.num_steps,
            run.objective.unit,
            run.planned.peak_bytes,
            live.record,
            live.output is None,
            recorded,
            steering(recipe.training.best_by).field,
        ) as metrics,
    ):
        checkpoints = _checkpoints_of(opened, run, parts, metrics, store, heartbeat)
        loop = Loop(run, metrics, heartbeat, checkpoints)
        windows = next((made for part in parts if (made := part.windows(loop)) is not None), run.windows)
        # Records come first: checkpoints hold them, and errors follow them.
        extensions = [stop, heartbeat, Records(metrics, _flops(accelerator, run.inner))]
        extensions.append(NonFiniteSteps(metrics, recipe.training.max_non_finite_steps))
        extensions += [each for part in parts if (each := part.extension(loop)) is not None]
        trainer = _build_trainer(opened, run, windows, [*extensions, checkpoints])
        if found.start is not None:
            checkpoints.restore(*found.start, trainer, trainer.schedule, run.num_positions)
            if (told := changed_rate(trainer.schedule, metrics.records)) is not None:
                console.warn(told)
        with checkpoints:
            trainer.fit()
        require_some_steps(trainer.counters)
        if opened.plugin.engine is not None:
            opened.plugin.engine.flush()  # the last step may still fail
        require_alike(state_once(run.inner), "at the end")  # without a save, or since the last one
    # On all ranks: inside a collective the others would time out while rank 0 waits for a full disk.
    require_output_dir(output_dir)
    ranks.on_first_rank(lambda: patiently(metrics.catch_up, "metrics.jsonl", console.warn, heartbeat.wait))
    if run.data.stream is not None:
        _report_stream(opened, run)
    return Fitted(metrics.records, checkpoints.missing)


def _checkpoints_of(
    opened: OpenedRun,
    run: PreparedRun,
    parts: Sequence[RunPart],
    metrics: Metrics,
    store: StorePath | None,
    heartbeat: Heartbeat,
) -> RunCheckpoints:
    recipe, optimizer = opened.recipe, inner_optimizer(run.sharded.optimizer)
    # Checkpoints may go to a store, and trackers' settings may hold a key.
    values = recipe.model_dump(mode="json", exclude={"logging": {"tracker_settings"}})
    identity = RunIdentity(values, recipe.training.seed, opened.plugin.text, reads_of(parts))
    accelerator, folder, section = opened.accelerator, opened.output_dir, recipe.checkpoint
    return RunCheckpoints(accelerator, folder, section, identity, run.model, optimizer, metrics, store, heartbeat)


def _build_trainer(opened: OpenedRun, run: PreparedRun, windows: Windows, extensions: Sequence[Extension]) -> Trainer:
    recipe, accelerator, optimizer = opened.recipe, opened.accelerator, run.sharded.optimizer
    return Trainer(
        accelerator,
        run.model,
        optimizer,
        build_schedule(inner_optimizer(optimizer), recipe.schedule, run.num_steps),
        run.objective,
        recipe.training,
        windows,
        evaluation=build_evaluation(accelerator, recipe, run.data),
        by_block=run.accumulation.by_block,
        balance=run.balance,
        copies=recipe.sharding.tensor,
        extensions=extensions,
    )


def _report_stream(opened: OpenedRun, run: PreparedRun) -> None:
    """Writes the data report again with all rows that were read; at the beginning it had only the first window."""
    assert run.data.stream is not None
    report = describe_stream(run.data.report, run.data.stream)
    run.shown.data_report = report
    opened.story.of_rows(report.to_dict())
    ranks.on_first_rank(lambda: write_data_report(opened.output_dir, opened.recipe, report))


def _resumed_from(found: Resumption, recipe: Recipe) -> str:
    assert found.start is not None
    manifest = found.start[1]
    return (
        f"   resumed: after step {manifest.step}, {counted(manifest.samples, 'sample')}, from {found.origin} "
        f"(written by {counted(manifest.world_size, 'rank')}, {manifest.strategy}){_other_ranks(manifest, recipe)}"
    )


def _other_ranks(manifest: Manifest, recipe: Recipe) -> str:
    """Describes a change in the number of ranks since the checkpoint, and in the samples of a step."""
    if manifest.world_size == ranks.world_size():
        return ""
    before, now = (
        values["training"]["micro_batch_size"]
        * values["training"]["gradient_accumulation_steps"]
        * (number // values["sharding"]["sequence"] // values["sharding"].get("tensor", 1))
        for values, number in (
            (manifest.recipe, manifest.world_size),
            (recipe.model_dump(mode="json"), ranks.world_size()),
        )
    )
    steps = "as many samples a step" if before == now else f"{now} samples a step, which were {before}"
    return f"; {counted(ranks.world_size(), 'rank')} now: the same samples in the same order, {steps}"


def _flops(accelerator: Accelerator, model: nn.Module) -> tuple[ModelFlops, float] | None:
    if accelerator.device.type != "cuda":
        return None
    peak = peak_flops_of(torch.cuda.get_device_name(accelerator.device), accelerator.mixed_precision)
    # No MFU for a device whose peak is not known, rather than a guess.
    if peak is None:
        return None
    return model_flops(model), peak
