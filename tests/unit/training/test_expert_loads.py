"""toolkit.run.parts.experts: what records say of loads, and the warning of a router that collapses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.run.parts.experts import ExpertLoads, entropy


def watched(top_k: int = 2) -> tuple[ExpertLoads, list[str]]:
    told: list[str] = []
    balance: Any = SimpleNamespace(
        routers=[SimpleNamespace(path="layers.0.gate"), SimpleNamespace(path="layers.1.gate")],
        experts_of_a_token=lambda number: top_k,
    )
    metrics: Any = SimpleNamespace(warn=told.append)
    return ExpertLoads(balance, metrics), told


def after(loads: ExpertLoads, step: int, layers: list[list[float]], loss: float = 2.0) -> dict[str, Any]:
    """What the record of a step with these loads says."""
    balance: Any = loads.balance
    balance.loads = lambda: (layers, loss)
    loads.before_update()
    return loads.after_update(step, skipped=False)


EVEN, LONE = [0.125] * 8, [0.5, 0.5, 0, 0, 0, 0, 0, 0]


def test_a_record_says_how_evenly_experts_are_used() -> None:
    loads, told = watched()
    record = after(loads, 1, [EVEN, LONE], 2.5)
    assert record == {
        "balance_loss": 2.5,
        "expert_entropy": pytest.approx((1 + 1 / 3) / 2),
        "dead_experts": 6,
        "max_expert_load": 4.0,
        "expert_load": [EVEN, LONE],
    }
    assert len(told) == 1
    assert told[0].startswith("step 1: the router layers.1.gate has collapsed: its tokens go to 2.0 of 8 experts, 50%")


def test_a_collapse_is_told_once() -> None:
    loads, told = watched()
    for step in range(1, 31):
        record = after(loads, step, [EVEN, LONE], 2.5)
        assert ("expert_load" in record) == (step in (1, 10, 20, 30))
    assert len(told) == 1


def test_where_a_token_has_half_of_the_experts_few_are_no_collapse() -> None:
    loads, told = watched(top_k=4)
    after(loads, 1, [EVEN, LONE], 2.5)
    assert told == []


def test_a_model_without_experts_records_nothing() -> None:
    loads, _ = watched()
    assert after(loads, 1, [], 0.0) == {}


def test_entropy_is_a_share_of_the_even_loads() -> None:
    assert entropy(EVEN) == pytest.approx(1.0)
    assert entropy([1.0, 0.0]) == 0.0
    assert entropy([1.0]) == 1.0
