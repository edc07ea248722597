"""Units of one parameter, for tests of the planner's traffic."""

from __future__ import annotations

from toolkit.planning.workload.unit_shapes import ParameterShape, UnitShape
from toolkit.sharding.plan.unit_plan import UnitKind


def unit(kind: UnitKind, numel: int, trainable: bool = True) -> UnitShape:
    """A unit of one parameter with a row for every element."""
    parameters = (ParameterShape((numel,), trainable, held=4),) if numel else ()
    return UnitShape(kind, kind, kind in ("embeddings", "block"), parameters)
