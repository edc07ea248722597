"""Early stopping: whether the held-out loss still falls. Prechelt, "Early Stopping - But When?", 1998."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from toolkit import ranks
from toolkit.errors import counted
from toolkit.training.extension import Extension
from toolkit.training.metrics import Metrics

if TYPE_CHECKING:
    from toolkit.training.trainer import Trainer


class EarlyStopping(Extension):
    """Ends the run once the held-out loss falls no more. All ranks end alike, as after a last step.

    Args:
        patience: evaluations in a row without a lower held-out loss.
        save: saves the state of the trainer before the run ends.
    """

    def __init__(self, patience: int, metrics: Metrics, save: Callable[[Trainer], Any] = lambda trainer: None) -> None:
        self._patience = patience
        self._metrics = metrics
        self._save = save

    def ends_run(self, trainer: Trainer) -> bool:
        why = ranks.gather_objects(patience_is_over(self._metrics.records, self._patience))[0]
        if why is None:
            return False
        self._metrics.tell(f"ended after step {trainer.global_step}: {why}")
        self._save(trainer)
        return True


def patience_is_over(records: Iterable[dict[str, Any]], patience: int | None) -> str | None:
    """Why a run ends after its last evaluation; None: it goes on.

    The records alone decide, so a run that goes on from a checkpoint decides as if it had never ended.

    Args:
        records: of metrics.jsonl.
        patience: evaluations in a row without a lower held-out loss; None: no end.
    """
    if patience is None:
        return None
    best, best_step, since = math.inf, 0, 0
    for record in records:
        if record["split"] == "eval":
            loss = math.inf if record["loss"] is None else record["loss"]
            if loss < best:
                best, best_step, since = loss, record["step"], 0
            else:
                since += 1
    if since < patience:
        return None
    lowest = f"the lowest is {best:.4g}, at step {best_step:,}" if math.isfinite(best) else "none was finite"
    return f"no lower held-out loss in {counted(since, 'evaluation')} (training.patience); {lowest}"
