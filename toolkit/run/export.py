"""Exports the model of a run, and compares the export's logits with its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from toolkit import ranks
from toolkit.checkpoint.export import (
    ExportSettings,
    dtype_of_export,
    is_whole,
    names_fact,
    reload,
    require_room,
    require_unread,
    source_of_run,
    verify,
    write_export,
)
from toolkit.data.samples.loader import evaluation_batches
from toolkit.model.adapters.adapters import has_adapter
from toolkit.paths import GIB
from toolkit.run.stages.stages import PreparedRun
from toolkit.sharding.apply import PRECISIONS
from toolkit.terminal import LongAction
from toolkit.training.durable_writes import patiently
from toolkit.training.extensions.heartbeat import Heartbeat
from toolkit.training.phase import Phase


def export_model(run: PreparedRun, heartbeat: Heartbeat) -> tuple[Path | None, float | None]:
    """Writes and checks the export; returns its folder and the difference of logits. Collective."""
    opened, settings, console = run.opened, run.opened.recipe.export, run.opened.console
    if not settings.enabled:
        return None, None
    folder = opened.output_dir / "export"
    dtype = dtype_of_export(settings.dtype, run.fit.dtype, has_adapter(run.inner) and not settings.merge)
    how = ExportSettings(dtype, int(settings.max_shard_gib * GIB), settings.merge)
    has_room = partial(require_room, run.inner, folder, how)
    ranks.on_first_rank(lambda: patiently(has_room, "the export", console.warn, heartbeat.wait))
    heartbeat.enter_phase(Phase.EXPORT)
    with LongAction(console, "exporting the model"):
        ranks.on_first_rank(lambda: require_unread(run.fit))
        then = "start the same command again: it goes on from the last checkpoint, if there is one"
        source = source_of_run(run.inner, run.fit, run.tokenizer, how)
        write_export(source, folder, how, then, replaces=True)
    if not settings.verify:
        return folder, None
    with LongAction(console, "checking the export"):
        difference = _check_export(run, folder, how)
    if not console.quiet and is_whole(run.inner, how) and (told := names_fact(folder, run.fit.stored)) is not None:
        console.warn(f"the export {told}; test it with the server that will load it")
    for change in run.fit.files.changes():
        console.warn(f"{change}; the export has it as it was then")
    return folder, difference


def _check_export(run: PreparedRun, folder: Path, how: ExportSettings) -> float | None:
    """Returns the difference of logits between the model and its export. Collective."""
    recipe, accelerator = run.opened.recipe, run.opened.accelerator
    # In training's compute dtype, so that only what the export changed may differ.
    compute = PRECISIONS[accelerator.mixed_precision] or getattr(torch, recipe.model.dtype)
    config, trust = run.inner.config, recipe.model.trust_remote_code
    # The others wait on the host: inside a collective NCCL would time out after ten minutes.
    reloaded = ranks.alone_on_first_rank(lambda: reload(folder, accelerator.device, compute, config, trust))
    # The same sample on every rank: if the model is sharded, all ranks take part in its forward.
    batch = next(iter(evaluation_batches(run.data.train, 1, 0, 1, 1)))
    return verify(accelerator, run.model, reloaded, run.objective.logits, batch, how.dtype)
