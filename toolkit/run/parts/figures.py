"""The records of steps and evaluations, the end of a run that trains nothing, and a trace of some steps."""

from __future__ import annotations

import math
from typing import Any

import torch

from toolkit.errors import TrainingError, counted
from toolkit.planning.hardware import peak_flops_of
from toolkit.run.stages.part import Loop, RunPart
from toolkit.training.extension import Extension
from toolkit.training.loop_state import LoopState
from toolkit.training.metrics import Metrics
from toolkit.training.profile import StepProfile
from toolkit.training.step import Step, with_figures
from toolkit.training.usage import ModelFlops, model_flops


class Figures(RunPart):
    def extension(self, loop: Loop) -> Extension | None:
        accelerator, peak = self.opened.accelerator, None
        if accelerator.device.type == "cuda":
            peak = peak_flops_of(torch.cuda.get_device_name(accelerator.device), accelerator.mixed_precision)
        # No MFU for a device whose peak is not known, rather than a guess.
        return Records(loop.metrics, None if peak is None else (model_flops(loop.run.inner), peak))


class NonFinitePart(RunPart):
    """Steps without a finite loss and gradient (`training.max_non_finite_steps`)."""

    def extension(self, loop: Loop) -> Extension | None:
        return NonFiniteSteps(loop.metrics, self.recipe.training.max_non_finite_steps)


class Profile(RunPart):
    """A trace of some steps (`training.profile_steps`)."""

    def extension(self, loop: Loop) -> Extension | None:
        if (steps := self.recipe.training.profile_steps) is None:
            return None
        return StepProfile(self.opened.accelerator, steps[0], steps[1], self.opened.output_dir)


class Records(Extension):
    """Writes a record of each step and each evaluation.

    Args:
        flops: the model's FLOPs and the peak of one device (FLOP/s), for the MFU; None if one is unknown.
    """

    def __init__(self, metrics: Metrics, flops: tuple[ModelFlops, float] | None = None) -> None:
        self._metrics = metrics
        self._flops = flops

    def after_step(self, trainer: LoopState, step: Step) -> None:
        counts, number, unit = step.counts, trainer.global_step, trainer.objective.unit
        windows, samples = trainer.windows, trainer.windows.samples_at(number)
        with_figures({"rate_factor": 1}, step.metrics)  # no figure has this name where it is 1 either
        self._metrics.train(
            with_figures(
                {
                    "step": number,
                    "epoch": windows.epoch_at(number),
                    "samples": samples,
                    "tokens": trainer.counters.tokens,
                    "target_tokens" if unit == "targets" else unit: trainer.counters.target_tokens,
                    "loss": step.loss,
                    **trainer.objective.training_record(step.figures),
                    **({} if step.rate_factor == 1 else {"rate_factor": step.rate_factor}),
                    "grad_norm": step.grad_norm,
                    "learning_rate": step.learning_rate,
                    "tokens_per_second": counts.tokens / step.seconds,
                    "padded_tokens_per_second": counts.padded_tokens / step.seconds,
                    f"{unit}_per_second": counts.targets / step.seconds,
                    "samples_per_second": (samples - windows.samples_at(number - 1)) / step.seconds,
                    "step_seconds": step.seconds,
                    "peak_device_bytes": step.peak_device_bytes or None,
                    "peak_host_bytes": step.peak_host_bytes,
                    "mfu": self._model_flops_utilisation(step, trainer.accelerator.num_processes),
                },
                step.metrics,
            )
        )

    def _model_flops_utilisation(self, step: Step, num_ranks: int) -> float | None:
        if self._flops is None:
            return None
        flops, peak = self._flops
        return flops.of(step.counts) / (step.seconds * peak * num_ranks)

    def after_evaluation(self, trainer: LoopState, record: dict[str, Any]) -> None:
        self._metrics.evaluation(record)


class NonFiniteSteps(Extension):
    """Warns of each such step, and ends the run with a TrainingError after `limit` of them in a row."""

    def __init__(self, metrics: Metrics, limit: int) -> None:
        self._metrics = metrics
        self._limit = limit

    def before_training(self, trainer: LoopState) -> None:
        self._trainer = trainer

    def after_last_step(self) -> None:
        """Raises TrainingError if every step was skipped, so that the model is what it was before."""
        counters = self._trainer.counters
        if 0 < counters.global_step == counters.skipped_steps:
            raise TrainingError(
                f"each of the {counted(counters.global_step, 'step')} of this run was skipped, as its loss or gradient "
                "was not finite: nothing was learned, and nothing is exported; lower optimizer.learning_rate, look at "
                "the data, or, with fp16, set training.mixed_precision=bf16 or take more steps"
            )

    def after_step(self, trainer: LoopState, step: Step) -> None:
        counters = trainer.counters
        if math.isfinite(step.loss) and not step.skipped:
            counters.non_finite_in_a_row = 0
            return
        where = f" on rank {', '.join(map(str, step.non_finite_ranks))}" if step.non_finite_ranks else ""
        what = "loss" if not math.isfinite(step.loss) else "gradient norm"
        message = (
            f"step {trainer.global_step}: non-finite {what}{where} (loss {step.loss}, gradient norm {step.grad_norm}, "
            f"learning rate {step.learning_rate:.3e}); the optimizer step was skipped, {counters.skipped_steps} so far"
        )
        scaler = trainer.accelerator.scaler
        if scaler is not None and math.isfinite(step.loss) and scaler.get_scale() >= 1:
            # A scale is found by overflows, from 2^16 down: the run is broken only if none is left to try.
            self._metrics.warn(f"{message}; fp16 overflowed, and its loss scale is now {scaler.get_scale():g}")
            return
        self._metrics.warn(message)
        counters.non_finite_in_a_row += 1
        if counters.non_finite_in_a_row >= self._limit:
            raise TrainingError(
                f"{message}. That makes {counters.non_finite_in_a_row} in a row (training.max_non_finite_steps); "
                "lower optimizer.learning_rate, lengthen the warm-up or look at the data of these steps"
            )
