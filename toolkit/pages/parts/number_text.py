"""Formats numbers, names and times for pages and consoles."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from toolkit.terminal import three_digits

MISSING = "\N{EN DASH}"
"""Shown for a value that a run does not have."""


def number(value: Any) -> float:
    """Returns `value` as a finite float, or NaN for null, missing values and what JSON cannot express."""
    # bool first: in Python True is an int.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return float(value)


def finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def format_count(value: Any) -> str:
    """Formats a whole number with a comma at every thousand, or as `MISSING` if it is not finite."""
    count = number(value)
    return f"{count:,.0f}" if math.isfinite(count) else MISSING


def format_percent(share: Any) -> str:
    """Formats a share of 1 in percent; a small one that rounds to 0 becomes less than 0.1 %."""
    value = number(share)
    if not math.isfinite(value):
        return MISSING
    return "< 0.1 %" if 0 < value < 0.0005 else f"{100 * value:,.1f} %"


def format_short(value: float) -> str:
    """Formats with three digits, and k, M, G or T for large values; whole numbers below 10,000 stay as they are."""
    if not math.isfinite(value):
        return MISSING
    if abs(value) >= 1e15:
        return f"{value:.2e}"
    for start, scale, suffix in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= start:
            return f"{three_digits(value / scale)} {suffix}"
    return f"{value:,.0f}" if value == int(value) else three_digits(value)


def format_tick(value: float, _position: int | None = None) -> str:
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.10g}{suffix}"
    if 0 < abs(value) < 1e-2:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def format_seconds(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.3g} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"
