"""The checkpoints of one run: when they are due, what goes into them, and going on from one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from toolkit import ranks
from toolkit.checkpoint import reader, upload
from toolkit.checkpoint.fetch import clear_incoming
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.state import named_tensors, random_states, restore_random_states
from toolkit.checkpoint.store import StorePath
from toolkit.checkpoint.writer import Checkpointer, Job, clear_unfinished
from toolkit.errors import BadInputError, StoppedError, ToolkitError, first_line
from toolkit.model.adapters import base_fingerprint
from toolkit.model.weights import fit_of
from toolkit.recipe.schema import CheckpointSection
from toolkit.training.durable_writes import PATIENCE_SECONDS
from toolkit.training.early_stopping import merit_of
from toolkit.training.extension import Extension
from toolkit.training.heartbeat import Heartbeat
from toolkit.training.metrics import Metrics
from toolkit.training.phase import Phase
from toolkit.training.step import Step
from toolkit.training.trainer import Trainer

TELL_SECONDS = 10.0
"""Between two lines about a copy that the end of a run waits for."""

PARTING_SECONDS = 20.0
"""A rank that ends alone waits no longer for its copy to a store: the others are to hear of it within a minute."""

PACKAGES = ("torch", "accelerate", "transformers", "datasets")


@dataclass(frozen=True)
class RunIdentity:
    """What a run writes into its checkpoints, by which it is known again.

    Attributes:
        recipe: resolved, as plain JSON.
        strategy: as an Accelerate config would say it; for people.
        data: identifies the tokenised data.
        content: identifies the files of a stream; None if there is none.
        teacher: fingerprint of the model that is learned from, which is not saved; None if there is none.
    """

    recipe: dict[str, Any]
    seed: int
    strategy: str
    data: str
    content: str | None
    teacher: str | None


class RunCheckpoints(Extension):
    """Saves the state of a run, and restores it. As a block it waits at its end for what is written and copied.

    Args:
        run: the output folder.
        store: where the checkpoints are kept instead; None: in the output folder.
        heartbeat: beats while this rank waits.
        model: as `accelerator.prepare` gave it.
        optimizer: torch's own.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        run: Path,
        section: CheckpointSection,
        identity: RunIdentity,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        metrics: Metrics,
        store: StorePath | None,
        heartbeat: Heartbeat,
    ) -> None:
        self._accelerator = accelerator
        self._section = section
        self._identity = identity
        self._model = accelerator.unwrap_model(model)
        self._optimizer = optimizer
        self._metrics = metrics
        self._run = run
        self._heartbeat = heartbeat
        ranks.on_first_rank(lambda: clear_unfinished(run))
        if store is not None:
            ranks.on_first_rank(lambda: upload.clear_unfinished(store))
        self._checkpointer = Checkpointer(run, section, metrics.warn, store)
        self._told = time.monotonic()
        self._saved_step = -1
        self._saved_at = time.monotonic()

    def wants_save(self) -> bool:
        """Tells whether it is time for a save by `every_minutes`; the clock of rank 0 decides for all."""
        minutes = self._section.minutes
        return ranks.rank() == 0 and minutes is not None and time.monotonic() - self._saved_at > 60 * minutes

    def between_steps(self, trainer: Trainer, step: Step) -> None:
        """Saves the state if a checkpoint is due or asked for.

        Raises:
            StoppedError: a rank was asked to end; the state is saved, if it could be.
        """
        # Before what is due: one save, which the end waits for.
        if step.stop is not None:
            saved = self.save(trainer, wait=True)
            what = "its state is saved; the same command goes on from there" if saved else "its state was NOT saved"
            raise StoppedError(f"stopped after step {trainer.global_step}: {step.stop}; {what}")
        every = self._section.every_steps
        if step.save or (every is not None and trainer.global_step % every == 0):
            self.save(trainer)

    def save(self, trainer: Trainer, wait: bool = False) -> bool:
        """Saves the state after the trainer's last step, unless that is done; whether it is, as far as is known."""
        trainer.enter_phase(Phase.SAVE)
        # The last step of a run can be due by `every_steps`, too.
        if self._saved_step == trainer.global_step:
            return self._checkpointer.wait() and (not wait or self._is_copied())
        require_output_dir(self._run)
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        scaler = self._accelerator.scaler
        step = trainer.global_step
        evals = [r for r in self._metrics.records if r["split"] == "eval" and r["step"] == step]
        merit = merit_of(evals[-1], self._identity.recipe["training"]["best_by"]) if evals else -math.inf
        samples = trainer.windows.samples_at(trainer.global_step)
        manifest = Manifest(
            step=trainer.global_step,
            samples=samples,
            world_size=ranks.world_size(),
            strategy=self._identity.strategy,
            precision=self._accelerator.mixed_precision,
            recipe=self._identity.recipe,
            data=self._identity.data,
            content=self._identity.content,
            base=base_fingerprint(self._model),
            teacher=self._identity.teacher,
            adapter=fit_of(self._model).adapter,
            stream=trainer.windows.state_at(samples),
            trainer=asdict(trainer.counters),
            scaler=scaler.state_dict() if scaler is not None else None,
            eval_loss=evals[-1]["loss"] if evals else None,
            merit=merit if math.isfinite(merit) else None,
            non_finite=_non_finite_step(trainer),
            **_merged(extension.state() for extension in trainer.extensions),
            date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            versions={package: version(package) for package in PACKAGES},
        )
        tensors = named_tensors(self._model, self._optimizer, _tensors_of(trainer))
        parameters = [name for name, _ in self._model.named_parameters()]
        job = Job(manifest, tensors, parameters, random_states(), self._metrics.records)
        return self._checkpointer.save(job, wait) and (not wait or self._is_copied())

    @property
    def missing(self) -> str | None:
        """Why the last checkpoint is not in the store; None: it is, or there is no store."""
        return self._checkpointer.uploads.missing if self._checkpointer.uploads is not None else None

    def _is_copied(self) -> bool:
        """Waits until the last checkpoint is in the store, if there is one; whether it is."""
        if self._checkpointer.uploads is None:
            return True
        missing = self._checkpointer.uploads.finish(PATIENCE_SECONDS, self._wait_on)
        if missing is not None:
            self._metrics.warn(f"{missing}; the same command copies it first, from {self._run}")
        return missing is None

    def _wait_on(self, what: str) -> None:
        self._heartbeat.enter_phase(Phase.SAVE)
        if time.monotonic() - self._told > TELL_SECONDS:
            self._told = time.monotonic()
            self._metrics.tell(what)

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._heartbeat.enter_phase(Phase.SAVE)
        # After an error, too: the save under way may be what the next start goes on from.
        self._checkpointer.wait()
        if error is not None and ranks.fails_alone(error) and self._checkpointer.uploads is not None:
            self._checkpointer.uploads.abandon(PARTING_SECONDS)
        elif error is None:
            self._is_copied()
        elif self._checkpointer.uploads is not None:
            self._checkpointer.uploads.finish(PATIENCE_SECONDS, self._wait_on)

    def restore(
        self, folder: Path, manifest: Manifest, trainer: Trainer, schedule: LambdaLR, num_positions: int
    ) -> None:
        """Goes on from a checkpoint: the state, the position in the data, the records, the generators.

        On another number of ranks the generators are seeded anew, from the seed and the step.

        Args:
            num_positions: samples of the whole run.
        """
        is_other_stream = manifest.content not in (None, self._identity.content)
        if manifest.data != self._identity.data or is_other_stream:
            raise BadInputError(
                f"{str(folder)!r}: the content of data.train, or the tokenizer, has changed since, or another version "
                "of the toolkit reads the rows otherwise; undo that, or start anew with another training.output_dir"
            )
        if manifest.base is not None and manifest.base != base_fingerprint(self._model):
            raise BadInputError(
                f"{str(folder)!r}: the adapters were trained on other weights than those of model.name_or_path as they "
                "are now; name that base, or start anew with another training.output_dir"
            )
        if manifest.teacher != self._identity.teacher:
            raise BadInputError(
                f"{str(folder)!r}: its run learned from other weights than those of objective.teacher as they are now; "
                "name that teacher, or start anew with another training.output_dir"
            )
        try:
            self._restore(folder, manifest, trainer, schedule, num_positions)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            # Its checksums fit: it was written by somebody, or something, else.
            raise BadInputError(
                f"{str(folder)!r} holds something else than a run's state: {type(error).__name__}: "
                f"{first_line(error)}; move it elsewhere, and the run goes on from the checkpoint before it"
            ) from error

    def _restore(
        self, folder: Path, manifest: Manifest, trainer: Trainer, schedule: LambdaLR, num_positions: int
    ) -> None:
        records = ranks.on_first_rank(lambda: reader.read_records(folder))
        reader.require_consistent(manifest, records)
        reader.load_tensors(folder, manifest, self._model, self._optimizer, _tensors_of(trainer))
        # The schedule has no state in the checkpoint: it follows from the steps, and waits in those that are skipped.
        for _ in range(manifest.step - manifest.trainer.get("skipped_steps", 0)):
            schedule.step()
        trainer.resume(manifest.trainer, manifest.samples, num_positions, manifest.stream)
        for extension in trainer.extensions:
            extension.resume(vars(manifest))
        self._metrics.resume(records)
        if self._accelerator.scaler is not None and manifest.scaler is not None:
            self._accelerator.scaler.load_state_dict(manifest.scaler)
        # The generators last: what comes before may draw from them (a DataLoader did, docs/log.md, Checkpoints).
        if manifest.world_size == ranks.world_size():
            restore_random_states(reader.read_random_states(folder))
        else:
            set_seed(self._identity.seed + manifest.step, device_specific=True)
        self._saved_step = manifest.step
        ranks.gather_objects(None)  # every rank has read
        clear_incoming(self._run)


def require_output_dir(run: Path) -> None:
    """Raises ToolkitError on every rank if the folder of a run that goes on was deleted or renamed. Collective."""

    def look() -> None:
        if not (run / "recipe.yaml").exists():
            raise ToolkitError(
                f"training.output_dir: {str(run)!r} was deleted or renamed while the run went on, so nothing can be "
                "saved there; put it back, and start the same command again: it goes on from the last checkpoint"
            )

    ranks.on_first_rank(look)


def _merged(mappings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for mapping in mappings for key, value in mapping.items()}


def _tensors_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return _merged(extension.tensors() for extension in trainer.extensions)


def _non_finite_step(trainer: Trainer) -> str | None:
    if trainer.counters.non_finite_in_a_row == 0:
        return None
    return f"step {trainer.global_step} had no finite loss and gradient, and trained nothing"
