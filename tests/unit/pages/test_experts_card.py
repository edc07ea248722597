"""toolkit.pages.experts: the last recorded loads as a table."""

from __future__ import annotations

from toolkit.pages.experts import experts_card


def test_the_last_loads_are_shown_and_dead_experts_are_marked() -> None:
    train = [{"step": 1, "expert_load": [[1.0, 0.0]]}, {"step": 10, "expert_load": [[0.75, 0.25], [1.0, 0.0]]}]
    shown = experts_card([*train, {"step": 11}])
    assert "steps up to 10" in shown
    assert "2 routers of 2 experts; 1 without a token" in shown
    assert ">75%<" in shown
    assert shown.count('class="dead"') == 1
    assert experts_card([{"step": 1}]) == ""
