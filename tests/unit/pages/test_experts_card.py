"""toolkit.pages.run_page: the last recorded loads as a table."""

from __future__ import annotations

import re

from toolkit.pages.run_page import RunSummary, expert_loads, render_report


def test_the_last_loads_are_shown_and_dead_experts_are_marked() -> None:
    train = [{"step": 1, "expert_load": [[1.0, 0.0]]}, {"step": 10, "expert_load": [[0.75, 0.25], [1.0, 0.0]]}]
    metrics = [{"split": "train", "loss": 1.0, **line} for line in [*train, {"step": 11}]]
    page = render_report(RunSummary("t", "", metrics, {}, [], {}, {}))
    shown = page.partition('id="experts"')[2].partition("</section>")[0]
    assert "steps up to 10" in shown
    assert "2 routers of 2 experts; 1 without a token" in shown
    assert re.findall(r'<th scope="(\w+)">(\w+)</th>', shown) == [
        ("col", "Router"),
        ("col", "0"),
        ("col", "1"),
        ("row", "0"),
        ("row", "1"),
    ]
    # Twice the even share of a half is as strong as can be, 70 %: three quarters are 0.75 of that, a quarter 0.25.
    assert re.findall(r"chart-1\) (\d+)%.*?>(\d+%)<", shown) == [("52", "75%"), ("18", "25%"), ("70", "100%")]
    assert shown.count('class="dead"') == 1
    assert expert_loads([{"step": 1}]) is None
