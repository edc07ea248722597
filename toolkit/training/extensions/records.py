"""Makes the record of each step and each evaluation of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.training.extension import Extension
from toolkit.training.metrics import Metrics
from toolkit.training.step import Step, with_figures
from toolkit.training.usage import ModelFlops

if TYPE_CHECKING:
    from toolkit.training.loop_state import LoopState


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
