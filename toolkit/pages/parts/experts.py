"""Shows on the page of a run how the experts are used: each one's share of the choices, a row for each router."""

from __future__ import annotations

from typing import Any

from toolkit.errors import counted
from toolkit.pages.parts.run_metrics import Metrics

BRIGHTEST = 2.0
"""Factor on the even share from which a cell has its strongest colour."""


def expert_loads(train: Metrics) -> dict[str, Any] | None:
    """Returns the last recorded loads, as `experts.html.jinja` takes them, or None if the model has no experts."""
    line = next((line for line in reversed(train) if line.get("expert_load")), None)
    if line is None:
        return None
    loads: list[list[float]] = line["expert_load"]
    dead = sum(share == 0 for layer in loads for share in layer)
    told = f"{counted(len(loads), 'router')} of {counted(len(loads[0]), 'expert')}; {dead or 'none'} without a token"
    return {"loads": loads, "step": line["step"], "told": told, "brightest": BRIGHTEST}
