"""Curves: what is smoothed, against means written out here."""

from __future__ import annotations

import dataclasses

from toolkit.pages.parts.charts import Series, smoothed


def test_a_smooth_curve_averages_the_middle_half_of_a_thirtieth_to_each_side() -> None:
    """120 points: 4 to each side, 9 in all, of which the 2 lowest and the 2 highest are left out."""
    ys = [float(number * number) for number in range(120)]
    faint, smooth = smoothed(Series("loss", list(range(120)), ys, "loss"))
    assert (faint.ys, smooth.name) == (ys, "smoothed over 9")
    assert smooth.ys[smooth.xs.index(60)] == sum(number * number for number in range(58, 63)) / 5
    # At the start the window narrows: one point, then three, of which none is left out.
    assert smooth.ys[:2] == [0.0, (0 + 1 + 4) / 3]


def test_a_short_curve_has_a_window_of_five_and_a_very_short_one_none() -> None:
    series = Series("loss", list(range(10)), [float(number) ** 3 for number in range(10)], "loss")
    assert smoothed(series)[1].name == "smoothed over 5"
    # Of 1, 8, 27, 64, 125 the lowest and the highest are left out.
    assert smoothed(series)[1].ys[3] == (8 + 27 + 64) / 3
    short = dataclasses.replace(series, xs=series.xs[:9], ys=series.ys[:9])
    assert smoothed(short) == [short]
