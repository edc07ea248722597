"""Draws the loss and the held-out answers of a run's report as one SVG, for pages that show pictures alone.

python docs/picture_of_report.py outputs/calls/report.html docs/pictures/real_model.svg [--prompts 2]
"""

from __future__ import annotations

import argparse
import re
import textwrap
from html import escape, unescape
from pathlib import Path

WIDTH, MARGIN, LINE, COLUMNS = 900, 20, 17, 34
SHOWN = ("Before training", "After training", "In the data")
STYLE = """
text { font: 13px system-ui, sans-serif; fill: var(--ink); }
.title { font-size: 19px; font-weight: 600; }
.soft { fill: var(--muted); }
.code { font: 12px ui-monospace, Menlo, Consolas, monospace; white-space: pre; }
.loss text { font-size: 11px; }
"""


def found(pattern: str, page: str) -> str:
    """Returns the first group. Raises SystemExit if the page has nothing of the kind."""
    match = re.search(pattern, page, re.DOTALL)
    if match is None:
        raise SystemExit(f"the report has no {pattern}")
    return match[1]


def plain(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", html)).strip()


def answers(page: str) -> list[tuple[str, dict[str, str]]]:
    """Returns the requests, as users wrote them, with the texts below their titles."""
    section = found(r'<section class="card" id="side-by-side">(.*?)</section>', page)
    prompts = []
    for part in re.split(r'<dl class="turns">|<div class="sample prompt-alone">', section)[1:]:
        asked = plain(part.partition("</div>")[0])
        request = [plain(text) for text in re.findall(r'<dt>user</dt><dd class="sample">(.*?)</dd>', part, re.DOTALL)]
        texts = re.findall(
            r'<p class="label">(.*?)</p>\s*<(?:div class="sample"|p class="note")>(.*?)</(?:div|p)>', part, re.DOTALL
        )
        prompts.append((request[-1] if request else asked, {plain(title): plain(text) for title, text in texts}))
    return prompts


def line(x: int, y: int, text: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>'


def draw(page: str, prompts: int) -> str:
    chart = found(r'id="chart-loss".*?<div class="chart wide">\s*<svg[^>]*>(.*?)</svg></div>', page)
    rows = [line(MARGIN, 36, plain(found(r"<h1>(.*?)</h1>", page)), "title")]
    rows.append(line(MARGIN, 58, plain(found(r'<p class="lead">(.*?)</p>', page)), "soft"))
    rows.append(f'<g class="loss" transform="translate({MARGIN} 78)">{chart}</g>')
    rows.append(line(WIDTH - 210, 96, "● training", "first") + line(WIDTH - 120, 96, "● held-out", "second"))
    y = 376
    for request, texts in answers(page)[:prompts]:
        rows.append(line(MARGIN, y, request))
        bottom = y
        for column, title in enumerate(SHOWN):
            x = MARGIN + column * (WIDTH - 2 * MARGIN) // len(SHOWN)
            rows.append(line(x, y + 22, title, "soft"))
            for number, words in enumerate(textwrap.wrap(texts[title], COLUMNS)[:6]):
                bottom = max(bottom, y + 42 + number * LINE)
                rows.append(line(x, y + 42 + number * LINE, words, "code"))
        y = bottom + 36
    light, dark = re.findall(r":root \{(.*?)\}", page, re.DOTALL)[:2]
    colours = f":root {{{light}}} @media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}"
    legend = ".first { fill: var(--chart-1); } .second { fill: var(--chart-2); }"
    back = f'<rect width="{WIDTH}" height="{y}" rx="12" fill="var(--card)"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img">'
    return f"{head}<style>{colours}{STYLE}{legend}</style>{back}\n" + "\n".join(rows) + "\n</svg>\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--prompts", type=int, default=2)
    arguments = parser.parse_args()
    drawn = draw(arguments.report.read_text(encoding="utf-8"), arguments.prompts)
    arguments.output.write_text(drawn, encoding="utf-8")
