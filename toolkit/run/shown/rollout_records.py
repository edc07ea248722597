"""Records what a run has sampled itself, shows it in the report, and warns where the rewards mislead."""

from __future__ import annotations

from typing import Any

from toolkit.run.shown.loss_warnings import gamed
from toolkit.run.stages.rollouts import Rollouts
from toolkit.run.stages.stages import ReportExtras
from toolkit.training.extension import Extension
from toolkit.training.loop_state import LoopState
from toolkit.training.metrics import Metrics


class RolloutRecords(Extension):
    """Puts the figures of each rollout into the record of its step, and its samples into the report.

    It comes behind the extension that writes records, which it looks at after each evaluation.
    """

    def __init__(self, rollouts: Rollouts, metrics: Metrics, shown: ReportExtras) -> None:
        self._rollouts, self._metrics, self._shown = rollouts, metrics, shown
        self._has_warned = False

    def after_update(self, step: int, skipped: bool) -> dict[str, Any]:
        self._shown.sampled = (step, self._rollouts.shown())
        return self._rollouts.figures

    def after_evaluation(self, trainer: LoopState, record: dict[str, Any]) -> None:
        told = None if self._has_warned else gamed(self._metrics.records)
        if told is not None:
            self._has_warned = True
            self._metrics.warn(told)

    def close(self) -> None:
        self._rollouts.close()
