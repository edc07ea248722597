"""The stage that trains a prepared run, from a checkpoint if there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.utils import set_seed

from toolkit.checkpoint.session import RunCheckpoints
from toolkit.optim.schedule import build_schedule
from toolkit.run.shown.live_report import LiveReport
from toolkit.run.stages.part import Loop, RunPart
from toolkit.run.stages.rows import evaluation_of
from toolkit.run.stages.stages import PreparedRun
from toolkit.training.extension import Extension
from toolkit.training.extensions.heartbeat import Heartbeat
from toolkit.training.loop_state import Windows
from toolkit.training.metrics import Metrics
from toolkit.training.stop import StopRequests
from toolkit.training.trainer import Trainer


def fit(
    run: PreparedRun, parts: Sequence[RunPart], heartbeat: Heartbeat, live: LiveReport
) -> tuple[list[dict[str, Any]], str | None]:
    """Trains to the run's end, from the beginning or from its checkpoint. Collective.

    Returns:
        The records of metrics.jsonl, and why the last checkpoint is not in the store, if there is one and it is not.

    Raises:
        StoppedError: if a rank was asked to end; the state is saved.
        TrainingError: if too many steps in a row had no finite loss and gradient, or all steps of the run; or ranks
            hold different copies of a parameter.
    """
    opened = run.opened
    recipe, accelerator, output_dir = opened.recipe, opened.accelerator, opened.output_dir
    for part in parts:
        part.start(run)

    def recorded(split: str, values: Mapping[str, float], step: int) -> None:
        for part in parts:
            part.recorded(split, values, step)

    # Dropout differs between ranks, except those that compute the same rows.
    set_seed(recipe.training.seed + accelerator.process_index // recipe.sharding.tensor)
    with (
        StopRequests(recipe.checkpoint.time_limit_minutes) as stop,
        Metrics(
            accelerator,
            output_dir / "metrics.jsonl",
            run.num_steps,
            recipe.logging.every_steps if live.output is None else None,
            run.objective.unit,
            run.planned.peak_bytes,
            live.record,
            recorded,
            recipe.training.best_by,
            opened.story.limited,
        ) as metrics,
    ):
        reads, text, optimizer = opened.digests, opened.plugin.text, run.sharded.torch_optimizer
        checkpoints = RunCheckpoints(
            accelerator, output_dir, recipe, text, reads, run.model, optimizer, metrics, heartbeat
        )
        loop = Loop(run, metrics, heartbeat, checkpoints)
        windows = next((made for part in parts if (made := part.windows(loop)) is not None), run.windows)
        extensions = [each for part in parts if (each := part.extension(loop)) is not None]
        trainer = trainer_of(run, windows, [stop, heartbeat, *extensions, checkpoints])
        if opened.found.start is not None:
            checkpoints.restore(*opened.found.start, trainer)
        with checkpoints:
            trainer.fit()
    return metrics.records, checkpoints.missing


def trainer_of(run: PreparedRun, windows: Windows, extensions: Sequence[Extension] = ()) -> Trainer:
    """Returns the loop of a run."""
    recipe, sharded = run.opened.recipe, run.sharded
    return Trainer(
        run.opened.accelerator,
        run.model,
        sharded.optimizer,
        build_schedule(sharded.torch_optimizer, recipe.schedule, run.num_steps),
        run.objective,
        recipe.training,
        windows,
        evaluation=evaluation_of(run),
        by_block=sharded.by_block,
        balance=run.balance,
        copies=recipe.sharding.tensor,
        extensions=extensions,
    )
