"""Early stopping: whether the held-out loss still falls. Prechelt, "Early Stopping - But When?", 1998."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from toolkit.errors import counted


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
