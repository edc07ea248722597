"""Early stopping: ends a run when its evaluations stop improving. Prechelt, "Early Stopping - But When?", 1998."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from toolkit import ranks
from toolkit.errors import counted
from toolkit.recipe.schema import TrainingSection
from toolkit.training.extension import Extension
from toolkit.training.metrics import Metrics

if TYPE_CHECKING:
    from toolkit.training.loop_state import LoopState


class EarlyStopping(Extension):
    """Ends the run when its evaluations stop improving. All ranks end alike, as after a last step.

    Args:
        settings: the run's, with a patience.
        save: saves the state of the trainer before the run ends.
    """

    def __init__(
        self, settings: TrainingSection, metrics: Metrics, save: Callable[[LoopState], Any] = lambda trainer: None
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._save = save

    def ends_run(self, trainer: LoopState) -> bool:
        why = ranks.gather_objects(patience_is_over(self._metrics.records, self._settings))[0]
        if why is None:
            return False
        self._metrics.tell(f"ended after step {trainer.global_step}: {why}")
        self._save(trainer)
        return True


def patience_is_over(records: Iterable[dict[str, Any]], settings: TrainingSection) -> str | None:
    """Returns why a run ends after its last evaluation, or None if it goes on.

    Only the records decide, so a resumed run decides as if it had never stopped.

    Args:
        records: those of metrics.jsonl.
        settings: `patience` is the number of evaluations in a row without a better figure (`best_by`) after which a
            run ends, or None.
    """
    if settings.patience is None:
        return None
    best, best_step, since = -math.inf, 0, 0
    for record in records:
        if record["split"] == "eval":
            merit = merit_of(record, settings.best_by)
            if merit > best:
                best, best_step, since = merit, record["step"], 0
            else:
                since += 1
    if since < settings.patience:
        return None
    what = f"in {counted(since, 'evaluation')} (training.patience); "
    if settings.best_by == "answers":
        return f"no larger share of right answers {what}the largest is {best:.1%}, at step {best_step:,}"
    lowest = f"the lowest is {-best:.4g}, at step {best_step:,}" if math.isfinite(best) else "none was finite"
    return f"no lower held-out loss {what}{lowest}"


def merit_of(record: dict[str, Any], best_by: str) -> float:
    """Returns a figure that is larger for better evaluations: the share of right answers, or minus the loss."""
    value = record.get("answer_accuracy" if best_by == "answers" else "loss")
    if value is None:
        return -math.inf
    return float(value) if best_by == "answers" else -float(value)
