"""Draws with matplotlib as inline SVG whose colours are CSS variables, so that they follow the light or dark theme."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

WIDE_PX, NARROW_PX, SMALL_PX = (860, 264), (360, 240), (400, 180)
"""Width and height at which charts are drawn (CSS pixels); the browser scales them to their card."""

MARGINS_PX = (46, 12, 8, 36)
"""Left, right, top, bottom of the plotting area: fixed, so that the axes of all charts line up (CSS pixels)."""

INK = {
    "#010101": "chart-1",
    "#020202": "chart-2",
    "#060606": "chart-3",
    "#070707": "chart-4",
    "#080808": "chart-5",
    "#090909": "chart-6",
    "#0a0a0a": "chart-7",
    "#0b0b0b": "chart-8",
    "#030303": "muted",
    "#040404": "grid",
    "#050505": "warn",
}
"""Stand-in colours given to matplotlib, each replaced by the CSS variable of that name in the SVG."""

COLOR_OF = {variable: color for color, variable in INK.items()}


@dataclass(frozen=True)
class Drawing:
    """A drawing of `size` CSS pixels; `kind` is the windows that show it: any, wide or narrow."""

    size: tuple[int, int]
    elements: str
    kind: str = "any"


def draw_svg(name: str, size: tuple[int, int], paint: Callable[[Any], None], kind: str = "any") -> Drawing:
    """Returns what `paint` draws on matplotlib axes of `size` CSS pixels.

    `name` must differ between the charts of one page. Uses neither pyplot nor a GUI backend. No text of a user may be
    drawn: matplotlib would read a formula between two `$`.
    """
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    # The chart's name as salt makes ids of markers and clip paths reproducible, and different within a page.
    # Text stays text (fonttype none), in the page's own font.
    options = {"svg.fonttype": "none", "svg.hashsalt": f"{name}-{size[0]}", "font.size": 11.0}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's matplotlibrc could ask for LaTeX, or for a style with its own colours
        matplotlib.rcParams.update(options)
        width, height = size
        figure = Figure(figsize=(width / 72, height / 72))  # an SVG has 72 units to the inch: one unit is one pixel
        left, right, top, bottom = MARGINS_PX
        paint(figure.add_axes((left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)))
        # Transparent: the card below it changes its colour between light and dark.
        figure.savefig(buffer, format="svg", transparent=True)
    return Drawing(size, _inline_svg(buffer.getvalue()), kind)


def style_axes(axes: Any, x_label: str) -> None:
    """Styles axes with horizontal grid lines, no frame but the lower edge, and muted labels."""
    axes.set_xlabel(x_label, color=COLOR_OF["muted"])
    axes.grid(axis="y", color=COLOR_OF["grid"], linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=COLOR_OF["muted"], length=0, pad=6)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(COLOR_OF["grid"])


def draw_marks(axes: Any, xs: Sequence[float]) -> None:
    """Draws dashed vertical lines over the whole height at `xs`, in the colour of warnings."""
    dashes = {"colors": COLOR_OF["warn"], "linewidth": 1, "linestyles": (0, (3, 3))}
    axes.vlines(xs, 0, 1, transform=axes.get_xaxis_transform(), **dashes)


def _inline_svg(document: str) -> str:
    """Returns the content of matplotlib's SVG file for an `<svg>` element of an HTML page.

    It drops the XML prologue and metadata (they name outside addresses), a style sheet for `*` that would apply to the
    whole page, and the ids of groups, which repeat from chart to chart. Markers and clip paths keep theirs.
    """
    body = document[document.index("<svg") : document.rindex("</svg>")]
    body = body[body.index(">") + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
    for color, variable in INK.items():
        body = body.replace(color, f"var(--{variable})")
    return re.sub(r"\s*\n\s*", "\n", body)
