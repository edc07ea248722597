"""What the script of a page draws its curves from, against values written out here."""

from __future__ import annotations

import json
import math
from itertools import accumulate
from typing import Any

from support.html_page import HOSTILE, Page

from toolkit.pages.parts.charts import Chart, Series, curve_data, polylines, smoothed
from toolkit.pages.parts.page import TEMPLATES, script
from toolkit.pages.run_page import RunSummary, render_report


def data_of(series: list[Series], **changes: Any) -> dict[str, Any]:
    settings = {"gaps": [], "x_range": (0, 100), **changes}
    found: dict[str, Any] = json.loads(curve_data(Chart("loss", "Loss", series, **settings)))
    return found


def points(curve: dict[str, Any]) -> list[tuple[int, float | None]]:
    return list(zip(accumulate(curve["steps"]), curve["values"], strict=True))


def test_a_curve_has_its_own_steps_and_values_and_null_in_gaps() -> None:
    found = data_of([Series("held out", [3, 5, 9], [1.234567, math.nan, 2e-7], "chart-2", "points")], gaps=[5])
    (curve,) = found["curves"]
    assert points(curve) == [(3, 1.2346), (5, None), (9, 2e-7)]
    assert (curve["name"], curve["color"], curve["kind"], curve["level"]) == ("held out", "chart-2", "points", None)
    assert (found["gaps"], found["x"], found["log"], found["zero"]) == ([5], [0, 100], False, True)


def test_a_curve_is_smoothed_from_the_raw_values() -> None:
    """200 points: a mean over 6 to each side, without a quarter at each end."""
    ys = [float(number * number % 37) for number in range(200)]
    found = data_of(smoothed(Series("loss", list(range(200)), ys, "chart-1")))
    assert [curve["level"] for curve in found["curves"]] == [None, "on"]
    assert dict(points(found["curves"][0])) == dict(enumerate(ys))
    curve = found["curves"][1]
    assert curve["name"] == "smoothed over 13"
    window = sorted(ys[94:107])
    kept = window[len(window) // 4 : len(window) - len(window) // 4]
    assert dict(points(curve))[100] == float(f"{sum(kept) / len(kept):.5g}")


def test_a_long_run_has_as_many_points_as_are_drawn() -> None:
    ys = [1.0 + number % 7 for number in range(20_000)]
    found = data_of(smoothed(Series("loss", list(range(20_000)), ys, "chart-1")))
    counts = {curve["level"]: len(curve["values"]) for curve in found["curves"]}
    assert all(780 <= counts[level] <= 850 for level in (None, "on")), counts


def test_pictures_without_scripts_have_pieces_between_gaps() -> None:
    """In a picture of 200 x 100 pixels: the first step at its left edge, the largest value at its top."""
    series = Series("loss", [0, 50, 60, 80, 100], [5.0, 3.0, math.nan, 2.0, 1.0], "chart-1")
    chart = Chart("loss", "Loss", [series], [60], (0, 100))
    assert polylines(chart, series, (200, 100)) == [[(0, 0), (100, 50)], [(160, 75), (200, 100)]]
    flat = Series("loss", [7], [3.0], "chart-1")
    assert polylines(Chart("loss", "Loss", [flat], [], (7, 7)), flat, (200, 100)) == [[(0, 0)]]


def test_the_names_of_sources_are_data_and_nothing_else() -> None:
    lines = [{"split": "eval", "step": step, "loss": 1.0, f"loss/{HOSTILE}": 2.0} for step in (0, 1)]
    text = render_report(RunSummary("t", "", lines, {}, [], {}, {}))
    page = Page(text)
    assert HOSTILE not in text
    assert page.elements["script"] == 1
    titles = [json.loads(value)["title"] for _, name, value in page.attributes if name == "data-curves"]
    assert f"Loss of {HOSTILE}" in titles


def test_the_script_writes_text_alone_and_asks_nobody() -> None:
    """What it shows comes from users: it must be set as text, never as HTML."""
    text = script("curves.js")
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval", "Function(", "fetch", "//"):
        assert forbidden not in text, forbidden
    assert "</" not in text
    assert (TEMPLATES / "curves.js").stat().st_size < 16_000
