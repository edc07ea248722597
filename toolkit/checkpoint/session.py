"""Connects checkpoints to a run: decides when to save, collects the state, and restores it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from toolkit import ranks
from toolkit.checkpoint.manifest import DIGESTS, Manifest, best_of, list_checkpoints, step_folder
from toolkit.checkpoint.resume import clear_incoming
from toolkit.checkpoint.state import (
    load_tensors,
    named_tensors,
    random_states,
    read_random_states,
    read_records,
    restore_random_states,
    verify_together,
)
from toolkit.checkpoint.store import store_of
from toolkit.checkpoint.writer import Checkpointer, Save, clear_unfinished
from toolkit.errors import SAVED, BadInputError, StoppedError, ToolkitError
from toolkit.optim.schedule import changed_rate
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.fsdp2.shards import state_once
from toolkit.sharding.offload import engine_of
from toolkit.sharding.tensor.copies import require_alike
from toolkit.training.durable_writes import PATIENCE_SECONDS, patiently
from toolkit.training.extension import Extension
from toolkit.training.extensions.best import judged
from toolkit.training.extensions.heartbeat import Heartbeat
from toolkit.training.loop_state import LoopState
from toolkit.training.metrics import Metrics
from toolkit.training.phase import Phase
from toolkit.training.step import Step
from toolkit.training.trainer import Trainer
from toolkit.user_function import calls, generators, set_generators

TELL_SECONDS = 10.0
"""Seconds between two lines about a copy for which the end of a run waits."""

PARTING_SECONDS = 20.0
"""How long a rank that ends alone waits for its copy to a store: the others must hear of it within a minute."""

PACKAGES = ("torch", "accelerate", "transformers", "datasets")


class RunCheckpoints(Extension):
    """Saves and restores the state of a run. As a context manager it waits at its end for saves and copies.

    Args:
        accelerator: the accelerator of the run.
        run: the output folder.
        recipe: the resolved recipe.
        strategy: the strategy as an Accelerate config spells it, for people.
        digests: of what the run reads, by its name or field; None for what it could have, and has not.
        model: the model that `accelerator.prepare` returned.
        optimizer: torch's optimizer.
        metrics: the records of the run, and where warnings go.
        heartbeat: beats while this rank waits.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        run: Path,
        recipe: Recipe,
        strategy: str,
        digests: dict[str, str | None],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        metrics: Metrics,
        heartbeat: Heartbeat,
    ) -> None:
        self._accelerator = accelerator
        self._section = section = recipe.checkpoint
        # Checkpoints may go to a store, and trackers' settings may hold a key.
        self._recipe = recipe.model_dump(mode="json", exclude={"logging": {"tracker_settings"}})
        self._strategy, self._digests = strategy, digests
        self._model = accelerator.unwrap_model(model)
        self._optimizer = optimizer
        self._metrics = metrics
        self._run = run
        self._heartbeat = heartbeat
        ranks.on_first_rank(lambda: clear_unfinished(run))
        store = store_of(section.to)
        self._has_store = store is not None
        self._checkpointer = Checkpointer(
            run, section, metrics.warn, store, heartbeat.wait, device_type=accelerator.device.type
        )
        self._told = time.monotonic()
        self._saved_step = -1
        self._before: dict[str, Any] | None = None
        self._saved_at = time.monotonic()
        self._left_evaluation = False

    def wants_save(self) -> bool:
        """Returns whether a save is due by `every_minutes`. The clock of rank 0 decides for all ranks."""
        minutes = self._section.minutes
        return ranks.rank() == 0 and minutes is not None and time.monotonic() - self._saved_at > 60 * minutes

    def between_steps(self, trainer: LoopState, step: Step) -> None:
        """Saves the state if a checkpoint is due or requested.

        Raises:
            StoppedError: if a rank was asked to end. The state is saved, if it could be.
        """
        # First, so that there is one save, for which the end waits.
        if step.stop is not None:
            self.stopped(trainer, step.stop)
        every = self._section.every_steps
        if step.save or (every is not None and trainer.global_step % every == 0):
            self.save(trainer)

    def before_training(self, trainer: LoopState) -> None:
        self._trainer = trainer

    def before_step(self, step: int) -> None:
        """Keeps where random numbers are, if code of the user's may fail in the step."""
        self._before = generators() if calls else None

    def enter_phase(self, phase: Phase, step: int) -> None:
        if phase is Phase.OPTIMIZER:
            self._before = None  # the weights are those of another step from here on

    def _save_last_step(self, error: BadInputError) -> None:
        """Saves the state before the step in which code of the user's failed on every rank; it may be mended."""
        if self._before is None or self._trainer.global_step in (0, self._saved_step):
            return
        set_generators(self._before)
        said = str(error)
        self._digests = {name: known for name, known in self._digests.items() if not said.startswith(f"{name}: ")}
        if self.save(self._trainer, wait=True):
            error.add_note(f"the state after step {self._trainer.global_step} is saved; the same command goes on there")

    def stopped(self, trainer: LoopState, reason: str) -> None:
        """Saves the state and ends the run. Collective.

        Raises:
            StoppedError: always.
        """
        if trainer.global_step == 0:
            raise StoppedError(f"stopped before the first step: {reason}", reason)
        saved = self.save(trainer, wait=True)
        why = f"{reason}; {SAVED if saved else 'its state was NOT saved'}"
        next_start = "; run the same command to resume there" if saved else ""
        raise StoppedError(f"stopped after step {trainer.global_step}: {why}{next_start}", why)

    def after_evaluation(self, trainer: LoopState, record: dict[str, Any]) -> None:
        """Saves once more after an evaluation that was left when the checkpoint was written, which lacks its merit."""
        if self._left_evaluation:
            self._left_evaluation, self._saved_step = False, -1
            self.save(trainer)

    def after_last_step(self) -> None:
        """Ends what the last step has begun. Collective.

        Raises:
            ToolkitError: if the step fails after all, ranks hold different copies of a tensor, or the folder is gone.
        """
        if (engine := engine_of(self._model)) is not None:
            engine.flush()
        require_alike(state_once(self._model), "at the end")  # without a save, or since the last one
        # On all ranks: inside a collective the others would time out while rank 0 waits for a full disk.
        require_output_dir(self._run)
        catch_up, warn, wait = self._metrics.catch_up, self._metrics.warn, self._heartbeat.wait
        ranks.on_first_rank(lambda: patiently(catch_up, "metrics.jsonl", warn, wait))

    def save(self, trainer: LoopState, wait: bool = False) -> bool:
        """Saves the state after the last step, unless that is done. Returns whether it is saved, as far as is known.

        Raises:
            TrainingError: if ranks hold different copies of a parameter.
        """
        trainer.enter_phase(Phase.SAVE)
        # The last step of a run can be due by `every_steps`, too.
        if self._saved_step == trainer.global_step:
            return self._checkpointer.wait() and (not wait or self._is_copied())
        require_output_dir(self._run)
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        scaler = self._accelerator.scaler
        step = trainer.global_step
        evals = [r for r in self._metrics.records if r["split"] == "eval" and r["step"] == step]
        merit = self._merit(step)
        samples = trainer.windows.samples_at(trainer.global_step)
        fields: dict[str, Any] = {name: self._digests.get(name) for name in DIGESTS}
        manifest = Manifest(
            step=trainer.global_step,
            samples=samples,
            world_size=ranks.world_size(),
            strategy=self._strategy,
            precision=self._accelerator.mixed_precision,
            recipe=self._recipe,
            **fields,
            named={name: known for name, known in self._digests.items() if known and name not in DIGESTS},
            stream=trainer.windows.state_at(samples),
            trainer=asdict(trainer.counters),
            scaler=scaler.state_dict() if scaler is not None else None,
            eval_loss=evals[-1].get("loss") if evals else None,
            merit=merit if math.isfinite(merit) else None,
            non_finite=_non_finite_step(trainer),
            **_merge(extension.state() for extension in trainer.extensions),
            date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            versions={package: version(package) for package in PACKAGES},
        )
        tensors = named_tensors(self._model, self._optimizer, _tensors_of(trainer))
        require_alike(tensors, f"after step {trainer.global_step}")
        parameters = [name for name, _ in self._model.named_parameters()]
        job = Save(manifest, tensors, parameters, random_states(), self._metrics.records)
        return self._checkpointer.save(job, wait) and (not wait or self._is_copied())

    def _merit(self, step: int) -> float:
        records, best_by = self._metrics.records, self._recipe["training"]["best_by"]
        return judged(records, best_by, self._section.every_steps or 1, at=step).get(step, -math.inf)

    def restore_best(self, trainer: LoopState) -> Manifest | None:
        """Puts the best checkpoint's weights into the model if they are better than the last ones. Collective.

        Returns:
            The manifest of that checkpoint, or None if the last weights stay.
        """
        self._checkpointer.wait()
        best = ranks.on_first_rank(lambda: best_of(list_checkpoints(self._run), self._recipe))
        if best is None or best[0] <= self._merit(trainer.global_step):
            return None
        manifest = best[1]
        folder = step_folder(self._run, manifest.step)
        if (problem := verify_together(folder, manifest)) is not None:
            self._metrics.warn(f"{folder.name}, the best checkpoint, is damaged ({problem}); the last weights are left")
            return None
        load_tensors(folder, manifest, self._model, self._optimizer, _tensors_of(trainer))
        return manifest

    def seconds_to_save(self) -> float | None:
        """Returns how long the longest save and the longest copy to the store took, or None before the first."""
        uploads = self._checkpointer.uploads
        parts = [self._checkpointer.seconds, *([] if uploads is None else [uploads.seconds])]
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None

    @property
    def missing(self) -> str | None:
        """Returns why the last checkpoint is not in the store, or None if it is, or if there is no store."""
        return self._checkpointer.uploads.missing if self._checkpointer.uploads is not None else None

    def _is_copied(self) -> bool:
        """Waits until the last checkpoint is in the store. Returns whether it is. Collective with a store."""
        if not self._has_store:
            return True
        missing = ranks.on_first_rank(self._finish_copies)
        if missing is not None:
            self._metrics.warn(f"{missing}; the same command copies it first, from {self._run}")
        return missing is None

    def _finish_copies(self) -> str | None:
        assert self._checkpointer.uploads is not None, "rank 0 has it"
        return self._checkpointer.uploads.finish(PATIENCE_SECONDS, self._wait_on)

    def _wait_on(self, what: str) -> None:
        self._heartbeat.wait()
        if time.monotonic() - self._told > TELL_SECONDS:
            self._told = time.monotonic()
            self._metrics.tell(what)

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._heartbeat.enter_phase(Phase.SAVE)
        if isinstance(error, BadInputError) and not ranks.fails_alone(error):
            self._save_last_step(error)
        # After an error, too: the next start may resume from the save that is still being written.
        self._checkpointer.wait()
        if error is None or not ranks.fails_alone(error):
            self._is_copied()
        elif self._checkpointer.uploads is not None:
            self._checkpointer.uploads.abandon(PARTING_SECONDS)

    def restore(self, folder: Path, manifest: Manifest, trainer: Trainer) -> None:
        """Restores a checkpoint: the state, the position in the data, the records and the random generators.

        If the number of ranks has changed, seeds the generators from the seed and the step.

        Args:
            folder: the folder of the checkpoint.
            manifest: its manifest.
            trainer: the trainer of this run.

        Raises:
            BadInputError: if the checkpoint's tensors do not fit the run's.
        """
        records = ranks.on_first_rank(lambda: read_records(folder))
        load_tensors(folder, manifest, self._model, self._optimizer, _tensors_of(trainer))
        # The schedule has no state in the checkpoint: it follows from the steps, without those that were skipped.
        for _ in range(manifest.step - manifest.trainer.get("skipped_steps", 0)):
            trainer.schedule.step()
        evaluated = any(record["split"] == "eval" and record["step"] == manifest.step for record in records)
        trainer.resume(manifest.trainer, manifest.samples, manifest.stream, evaluated)
        every = self._recipe["training"]["eval_every_steps"]
        self._left_evaluation = not evaluated and every is not None and manifest.step % every == 0
        for extension in trainer.extensions:
            extension.resume(vars(manifest))
        self._metrics.resume(records)
        if (told := changed_rate(trainer.schedule, records)) is not None:
            self._metrics.warn(told)
        if self._accelerator.scaler is not None and manifest.scaler is not None:
            self._accelerator.scaler.load_state_dict(manifest.scaler)
        # The generators last: what comes before may draw from them (a DataLoader did, docs/log/reliability.md).
        now, before = (values["sharding"].get("tensor", 1) for values in (self._recipe, manifest.recipe))
        if (manifest.world_size, before) == (ranks.world_size(), now):
            restore_random_states(read_random_states(folder))
        else:
            set_seed(self._recipe["training"]["seed"] + manifest.step + ranks.rank() // now)  # alike where rows are
        self._saved_step = manifest.step
        ranks.gather_objects(None)  # now every rank has read
        clear_incoming(self._run)


def require_output_dir(run: Path) -> None:
    """Checks that the output folder of the current run still exists. Collective.

    Raises:
        ToolkitError: on every rank, if it was deleted or renamed.
    """

    def look() -> None:
        if not (run / "recipe.yaml").exists():
            raise ToolkitError(
                f"training.output_dir: {str(run)!r} was deleted or renamed while the run went on, so nothing can be "
                "saved there; put it back, and start the same command again: it goes on from the last checkpoint"
            )

    ranks.on_first_rank(look)


def _merge(mappings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for mapping in mappings for key, value in mapping.items()}


def _tensors_of(trainer: LoopState) -> dict[str, torch.Tensor]:
    return _merge(extension.tensors() for extension in trainer.extensions)


def _non_finite_step(trainer: LoopState) -> str | None:
    if trainer.counters.non_finite_in_a_row == 0:
        return None
    return f"step {trainer.global_step} had no finite loss and gradient, and trained nothing"
