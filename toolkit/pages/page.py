"""What the pages of a run share: frame and style, tiles, cards, tables, charts, and numbers as text.

A page is one file with nothing loaded from outside. Charts are drawn by matplotlib as SVG and inlined; their colours
are CSS variables, so that a page follows the reader's light or dark setting.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from toolkit.paths import atomic_write
from toolkit.terminal import harmless

WIDE_PX, NARROW_PX, SMALL_PX = (860, 264), (360, 240), (400, 180)
"""Width and height at which charts are drawn (CSS pixels); the browser scales them to their card."""

MARGINS_PX = (46, 12, 8, 36)
"""Left, right, top, bottom of the plotting area: fixed, so that the axes of all charts line up (CSS pixels)."""

INK = {"#010101": "chart-1", "#020202": "chart-2", "#030303": "muted", "#040404": "grid", "#050505": "warn"}
"""Stand-in colours given to matplotlib, each replaced by the CSS variable of that name in the SVG."""

COLOR_OF = {variable: color for color, variable in INK.items()}

MISSING = "\N{EN DASH}"
"""Shown for a value that a run does not have."""


# ---- the page as a whole ----


def render_page(title: str, sections: Iterable[str], style: str = "", head: str = "", policy: str = "") -> str:
    """The whole page as HTML text; empty sections are left out.

    Args:
        style: rules besides those of all pages.
        head: elements at the beginning of the head, as HTML.
        policy: what the browser may do besides; see `_PAGE`.
    """
    body = "\n".join(filter(None, sections))
    policy = f"; {policy}" if policy else ""
    return _PAGE.format(head=head, policy=policy, title=escaped(title), style=_STYLE + style, body=body)


def write_page(path: Path, text: str) -> None:
    """Write a page to `path`; a reader sees the old file or the new one, never a part."""
    # Generated text can hold half of a surrogate pair, which UTF-8 cannot encode.
    atomic_write(path, text, errors="xmlcharrefreplace")


# ---- parts of a page ----


def header(eyebrow: str, title: str, facts: Iterable[tuple[str, str]]) -> str:
    """The title below a small line that says what kind of page this is, and facts as chips; all plain text."""
    chips = "".join(f"<li><span>{escaped(name)}</span> {escaped(value)}</li>" for name, value in facts)
    listed = f'<ul class="chips">{chips}</ul>' if chips else ""
    return f'<header><p class="eyebrow">{escaped(eyebrow)}</p><h1>{escaped(title)}</h1>{listed}</header>'


def tiles(items: Iterable[str]) -> str:
    """Tiles in a row; empty ones are left out."""
    return f'<section class="tiles" aria-label="Headline numbers">{"".join(filter(None, items))}</section>'


def tile(name: str, label: str, value: str, note: str, delta: str = "") -> str:
    """`value` and `delta` are HTML, `label` and `note` plain text."""
    return (
        f'<div class="tile" id="{name}"><p class="label">{escaped(label)}{delta}</p>'
        f'<p class="value">{value}</p><p class="note">{escaped(note)}</p></div>'
    )


def warning(name: str, lead: str, text: str, items: Iterable[str]) -> str:
    """A box that stands out: `lead` in bold, a sentence after it, and a list; all plain text."""
    listed = "".join(f"<li>{escaped(item)}</li>" for item in items)
    return (
        f'<section class="warning" id="{name}" role="note"><strong>{escaped(lead)}'
        f"</strong>{escaped(text)}<ul>{listed}</ul></section>"
    )


def card(name: str, body: str) -> str:
    """A section with a frame; `body` is HTML."""
    return f'<section class="card" id="{name}">{body}</section>'


def heading(title: str, remark: str = "") -> str:
    """The title of a card and a muted remark after it, both plain text."""
    tail = f'<span class="muted"> {escaped(remark)}</span>' if remark else ""
    return f"<h2>{escaped(title)}{tail}</h2>"


def card_head(title: str, keys: str = "", remark: str = "") -> str:
    """A heading with a legend at the right; `keys` is HTML, the others plain text."""
    return f'<div class="chart-head">{heading(title, remark)}{keys}</div>'


def legend(keys: Iterable[tuple[str, str, str]]) -> str:
    """Keys of kind, CSS variable and name as a list; a nameless key is left out, and nothing remains without keys."""
    items = [
        f'<li><i class="{kind}" style="color:var(--{variable})"></i>{escaped(name)}</li>'
        for kind, variable, name in keys
        if name
    ]
    return f'<ul class="legend">{"".join(items)}</ul>' if items else ""


def columns(items: Iterable[str]) -> str:
    """Cards of tables in two columns of about one height where the window is wide enough; nothing without any."""
    shown: tuple[list[str], list[str]] = ([], [])
    for item in filter(None, items):
        min(shown, key=_num_lines).append(item)
    return grid(f"<div>{''.join(column)}</div>" for column in shown if column)


def _num_lines(cards: list[str]) -> int:
    """About how high a column is: rows, and what a card has besides."""
    return sum(card.count("<tr") + card.count("<p") + CARD_LINES for card in cards)


CARD_LINES = 2
"""Height of a card's title and margins, in rows of a table."""


def grid(items: Iterable[str]) -> str:
    """Cards side by side where the window is wide enough; nothing without any."""
    body = "".join(items)
    return f'<div class="grid">{body}</div>' if body else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table of plain text, or nothing without rows.

    `kind` is `numbers` (all but the first column aligned to the right), `names` (nothing aligned to the right), or
    empty (the last column aligned to the right).
    """
    if not rows:
        return ""
    titles = f"<thead>{_row('th', head)}</thead>" if head else ""
    body = "".join(_row("td", row) for row in rows)
    tag = f'<table class="{kind}">' if kind else "<table>"
    return f'<div class="scroll">{tag}{titles}<tbody>{body}</tbody></table></div>'


def table_card(
    name: str, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "", remark: str = ""
) -> str:
    """A table in a card, or nothing without rows; all plain text, and `kind` is that of `table`."""
    return card(name, f"{heading(title, remark)}{table(head, rows, kind)}") if rows else ""


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(_cell(tag, cell) for cell in cells)}</tr>"


def _cell(tag: str, cell: str) -> str:
    """A number stays in one line; the name of a row may be broken before its number."""
    kind = ' class="number"' if tag == "td" and _NUMBER.fullmatch(cell) else ""
    return f"<{tag}{kind}>{_ROW_NUMBER.sub(':<wbr>', escaped(cell))}</{tag}>"


_NUMBER = re.compile(r"[<>]? ?[-\N{MINUS SIGN}]?\d[\d.,]*(e[-+]?\d+)?( ?[%a-zA-Z]{1,3})?")
_ROW_NUMBER = re.compile(r":(?=\d+\)?$)")


# ---- charts ----


def draw_svg(name: str, label: str, size: tuple[int, int], paint: Callable[[Any], None]) -> str:
    """What `paint` draws on matplotlib axes, as an `<svg>` element of `size` CSS pixels.

    `name` must differ between the charts of one page; `label` is read out where the chart is not seen. Uses neither
    pyplot nor a GUI backend. No text of a user may be drawn: matplotlib would read a formula between two `$`.
    """
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    # Salted by the chart, ids of markers and clip paths are reproducible, and differ between charts of one page.
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
    return _inline_svg(buffer.getvalue(), label, size)


def style_axes(axes: Any, x_label: str) -> None:
    """Horizontal grid lines, no frame but the lower edge, and muted labels."""
    axes.set_xlabel(x_label, color=COLOR_OF["muted"])
    axes.grid(axis="y", color=COLOR_OF["grid"], linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=COLOR_OF["muted"], length=0, pad=6)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(COLOR_OF["grid"])


def draw_marks(axes: Any, xs: Sequence[float]) -> None:
    """Dashed vertical lines over the whole height at `xs`, in the colour of warnings."""
    dashes = {"colors": COLOR_OF["warn"], "linewidth": 1, "linestyles": (0, (3, 3))}
    axes.vlines(xs, 0, 1, transform=axes.get_xaxis_transform(), **dashes)


def _inline_svg(document: str, label: str, size: tuple[int, int]) -> str:
    """matplotlib's SVG file as an element of an HTML page.

    Dropped: the XML prologue and metadata (they name outside addresses), a style sheet for `*` that would hold for
    the whole page, and the ids of groups, which repeat from chart to chart. Markers and clip paths keep theirs.
    """
    body = document[document.index("<svg") : document.rindex("</svg>")]
    body = body[body.index(">") + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
    for color, variable in INK.items():
        body = body.replace(color, f"var(--{variable})")
    body = re.sub(r"\s*\n\s*", "\n", body)
    return f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escaped(label)}">{body}</svg>'


# ---- numbers and plain values as text ----


def escaped(value: object) -> str:
    """Escaped for HTML text and attributes, without codes that steer a terminal or turn the direction of text.

    NUL, which HTML forbids, becomes the replacement character.
    """
    return html.escape(harmless(str(value).replace("\0", "\ufffd")))


def number(value: Any) -> float:
    """`value` as a finite float, or NaN: null, missing, and what JSON cannot say are all gaps."""
    # bool first: in Python True is an int.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return float(value)


def finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def format_count(value: Any) -> str:
    """A whole number with a comma at every thousand; `MISSING` for what is no finite number."""
    count = number(value)
    return f"{count:,.0f}" if math.isfinite(count) else MISSING


def format_percent(share: Any) -> str:
    """A share of 1 in percent; one that rounds to nothing, but is more, as less than 0.1 %."""
    value = number(share)
    if not math.isfinite(value):
        return MISSING
    return "< 0.1 %" if 0 < value < 0.0005 else f"{100 * value:,.1f} %"


def format_names(names: Sequence[object], count: int, limit: int) -> str:
    """The first `limit` names, and how many more of `count` there are; empty without names."""
    shown = [str(name) for name in names[:limit]]
    more = max(count, len(names)) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more and shown else "")


def format_short(value: float) -> str:
    """Three digits, with k, M, G or T for large values; whole numbers below 10,000 as they are."""
    if not math.isfinite(value):
        return MISSING
    if abs(value) >= 1e15:
        return f"{value:.2e}"
    for start, scale, suffix in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= start:
            return f"{three_digits(value / scale)} {suffix}"
    return f"{value:,.0f}" if value == int(value) else three_digits(value)


def three_digits(value: float) -> str:
    """Fixed point, unlike the format `.3g`, which writes 999.7 as 1e+03 and 30.0 as 30."""
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{decimals}f}"


def format_tick(value: float, _position: int | None = None) -> str:
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.10g}{suffix}"
    if 0 < abs(value) < 1e-2:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def format_bytes(value: float) -> str:
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{three_digits(value / scale)} {unit}"
    return f"{value:,.0f} B"


def format_seconds(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.3g} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


# ---- frame and style ----

# The policy makes the browser refuse whatever would come from outside, also if an escape were forgotten.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{head}<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root {
  --page: #f6f6f3; --card: #ffffff; --ink: #16181d; --soft: #4b505a; --muted: #71757f; --grid: #e6e6e1;
  --edge: #e4e4df; --chart-1: #2a6fdb; --chart-2: #e0602a; --warn: #b97a00; --warn-page: #fff7e3; --good: #12703f;
  --good-page: #e2f4e9; --bad: #b3261e; --bad-page: #fce8e6; --tint: #eef4fd;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #111316; --card: #1a1d21; --ink: #f1f2f4; --soft: #bfc3ca; --muted: #979ca6; --grid: #2d3136;
    --edge: #2a2e33; --chart-1: #5b9bf5; --chart-2: #f0834f; --warn: #e0a93a; --warn-page: #2a2313; --good: #6fd19b;
    --good-page: #16301f; --bad: #f2938c; --bad-page: #3a1d1b; --tint: #1b2738;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.02em; margin: 4px 0 16px; overflow-wrap: anywhere; }
h2 { font-size: 15px; font-weight: 600; margin: 0; }
h2 .muted { font-weight: 400; font-size: 13px; }
p { margin: 0; }
.eyebrow { color: var(--muted); font-size: 13px; }
.muted { color: var(--muted); }
ul { list-style: none; margin: 0; padding: 0; }
.chips { display: flex; flex-wrap: wrap; gap: 8px; }
.chips li {
  background: var(--card); border: 1px solid var(--edge); border-radius: 999px; padding: 3px 12px; font-size: 13px;
  overflow-wrap: anywhere;
}
.chips span { color: var(--muted); margin-right: 4px; }
.tiles { display: flex; flex-wrap: wrap; gap: 16px; margin-top: 24px; }
.card, .tile { background: var(--card); border: 1px solid var(--edge); border-radius: 12px; min-width: 0; }
.tile { padding: 16px 18px; flex: 1 1 30%; }
.label { color: var(--soft); font-size: 13px; display: flex; justify-content: space-between; gap: 8px; }
.value { font-size: 26px; line-height: 1.3; font-weight: 600; letter-spacing: -.02em; overflow-wrap: anywhere; }
.value .before, .value .arrow { color: var(--muted); font-weight: 400; }
.note { color: var(--muted); font-size: 13px; }
.delta {
  font-size: 12px; line-height: 20px; font-weight: 600; white-space: nowrap; border-radius: 999px; padding: 0 8px;
}
.delta.good { color: var(--good); background: var(--good-page); }
.delta.bad { color: var(--bad); background: var(--bad-page); }
.delta.same { color: var(--soft); background: var(--page); }
.warning {
  margin-top: 16px; padding: 12px 18px; border-radius: 12px; background: var(--warn-page); font-size: 14px;
  border: 1px solid var(--warn);
}
.warning ul { display: flex; flex-wrap: wrap; gap: 0 18px; color: var(--soft); }
.card { padding: 18px; margin-top: 16px; }
.chart-head { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 4px 16px; margin-bottom: 10px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; color: var(--soft); font-size: 13px; }
.legend li { display: flex; align-items: center; gap: 6px; }
.legend i { width: 16px; height: 0; border-top: 2px solid currentColor; }
.legend i.faint { opacity: .45; }
.legend i.gap { border-top-style: dashed; }
.legend i.points { width: 9px; height: 9px; border: 0; border-radius: 50%; background: currentColor; }
.chart svg { display: block; width: 100%; height: auto; overflow: visible; stroke-linejoin: round; }
.chart svg text { font-family: inherit !important; font-variant-numeric: tabular-nums; }
.chart.narrow { display: none; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 0 16px; }
.grid > div { min-width: 0; }
.scroll { overflow: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; margin-top: 8px; }
th { text-align: left; font-weight: 500; font-size: 13px; color: var(--muted); }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--edge); vertical-align: top; }
tbody tr:last-child td { border-bottom: 0; }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
td:first-child { color: var(--soft); overflow-wrap: normal; }
td.number { white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; text-align: right; }
.numbers th:nth-child(n+2), .numbers td:nth-child(n+2) { text-align: right; }
.names th:last-child, .names td:last-child { text-align: left; }
a { color: var(--chart-1); }
pre, .sample { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.sample { font-size: 14px; line-height: 1.65; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext; }
@media (max-width: 700px) {
  main { padding: 24px 14px 40px; }
  h1 { font-size: 24px; }
  .tiles { gap: 10px; }
  .tile { flex-basis: 40%; padding: 12px 14px; }
  .value { font-size: 22px; }
  .card { padding: 14px; margin-top: 10px; }
  table { font-size: 13px; }
  th, td { padding-right: 8px; }
  .chart.wide { display: none; }
  .chart.narrow { display: block; }
}
@media print { .card, .tile { break-inside: avoid; } }
"""
