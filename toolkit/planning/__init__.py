"""Plans a run before it starts: whether it fits, which setup to pick and what it sends.

    from toolkit.planning import hardware_of, plan
    found = plan(Recipe.load("quickstart"), hardware_of("h100_sxm"), 8)

Names are loaded on first use: hardware needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.planning.hardware import Hardware, hardware_of
    from toolkit.planning.planner import PlanRow
    from toolkit.planning.setup import Setup
    from toolkit.planning.table import Plan, plan

_HOMES = {
    "Hardware": "toolkit.planning.hardware",
    "hardware_of": "toolkit.planning.hardware",
    "Plan": "toolkit.planning.table",
    "PlanRow": "toolkit.planning.planner",
    "Setup": "toolkit.planning.setup",
    "plan": "toolkit.planning.table",
}

__all__ = ["Hardware", "Plan", "PlanRow", "Setup", "hardware_of", "plan"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'toolkit.planning' has no attribute {name!r}")
