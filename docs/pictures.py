"""Draws the pictures of docs/: a step under each strategy, where the bytes live, offload, shared rows, and the rooms.

python docs/pictures.py
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.house import FILES, PACKAGE, imports, name_of, nodes_of

FOLDER = Path(__file__).parent / "pictures"
COLOURS = {"forward": "#2f6fd0", "backward": "#7a52c7", "gather": "#b35309", "reduce": "#12805c", "update": "#5b6470"}
"""White text has a contrast of 4.5 or more on each of them."""

# A viewer of its own (GitHub, a site's dark theme) may not tell the page's colours: the card has its own background.
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de }
  .text { fill: #1f2328 }
  .quiet { fill: #57606a }
  .line { stroke: #d0d7de }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b22; stroke: #3d444d }
    .text { fill: #e6edf3 }
    .quiet { fill: #9ea7b3 }
    .line { stroke: #3d444d }
  }
  text { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; font-size: 13px }
  .name { font-weight: 600 }
  .in { fill: #ffffff; text-anchor: middle }
"""
LANE, LEFT, CELL = 24, 190, 36
"""Height of a lane, width of its label, and width of a unit of time (pixels)."""


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n{body}\n</svg>\n'
    )


def text(x: float, y: float, words: str, kind: str = "text") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


def bar(x: float, y: float, width: float, colour: str, words: str = "", height: float = LANE - 4) -> str:
    label = text(x + width / 2, y + height / 2 + 4.5, words, "in") if words else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{colour}"/>{label}'


def cell(lane: float, start: float, kind: str, words: str, length: float = 1) -> str:
    """What happens in a lane (its top, pixels) from a unit of time on."""
    return bar(LEFT + start * CELL + 1, lane, length * CELL - 2, COLOURS[kind], words)


def legend(y: float, kinds: dict[str, str]) -> Iterator[str]:
    x = 100.0
    for kind, words in kinds.items():
        yield bar(x, y, 14, COLOURS[kind], height=14)
        yield text(x + 20, y + 12, words, "quiet")
        x += 40 + 7 * len(words)


STRATEGIES = {"ddp": (0, 1), "zero1": (1, 1), "zero2": (1, 2), "zero3": (2, 2)}
"""Strategy -> gathers (0: none, 1: once a step, 2: in every forward and backward), reductions (1: once, 2: each)."""


def step() -> str:
    """One optimizer step of three units and two micro-batches: compute, gathers and reductions."""
    parts = [text(20, 30, "One optimizer step: three units, two micro-batches", "text name")]
    top = 50.0
    for name, (gathers, reductions) in STRATEGIES.items():
        parts.append(text(20, top + LANE + 15, name, "text name"))
        for lane, words in enumerate(("compute", "gather", "reduce")):
            parts.append(text(100, top + lane * LANE + 15, words, "quiet"))
        parts += _step_of(top, gathers, reductions)
        top += 3 * LANE + 16
        parts.append(f'<line class="line" x1="20" x2="{LEFT + 16 * CELL}" y1="{top - 9:g}" y2="{top - 9:g}"/>')
    kinds = {"forward": "forward", "backward": "backward", "gather": "gather", "reduce": "reduce", "update": "update"}
    parts += legend(top + 4, kinds)
    return picture(
        LEFT + 16 * CELL + 20, int(top) + 34, "The schedule of one optimizer step under each strategy", parts
    )


def _step_of(top: float, gathers: int, reductions: int) -> Iterator[str]:
    """A strategy's cells: unit u computes at 1 + u and backward at 6 - u, in each micro-batch of six units of time."""
    for batch in range(2):
        start = 1 + 6 * batch
        for unit in range(3):
            yield cell(top, start + unit, "forward", f"F{unit + 1}")
            yield cell(top, start + 5 - unit, "backward", f"B{unit + 1}")
            if gathers == 2 or (gathers == 1 and batch == 0):
                yield cell(top + LANE, start + unit - 1, "gather", f"{unit + 1}")
            if gathers == 2 and unit < 2:  # the last unit stays gathered from forward to backward
                yield cell(top + LANE, start + 4 - unit, "gather", f"{unit + 1}")
            if reductions == 2 or batch == 1:
                yield cell(top + 2 * LANE, start + 6 - unit, "reduce", f"{unit + 1}")
    yield cell(top, 14, "update", "update", 2)


BYTES = {
    "ddp": {"master": 4, "moments": 8, "gradients": 4},
    "zero1": {"master": 1, "moments": 2, "gradients": 4, "gathered": 2},
    "zero2": {"master": 1, "moments": 2, "gradients": 1, "gathered": 2},
    "zero3": {"master": 1, "moments": 2, "gradients": 1},
    "zero3+offload": {"weights": 0.5},
    "its host": {"master": 1, "moments": 2, "gradients": 1},
}
"""Bytes a parameter on each of four ranks inside an accumulation window, compute in bf16 (docs/strategies.md)."""

KINDS = {"master": "update", "moments": "backward", "gradients": "reduce", "gathered": "gather", "weights": "forward"}


def memory() -> str:
    """Where the bytes of a parameter live, for each strategy on four ranks."""
    parts = [text(20, 30, "Bytes per parameter on each of 4 ranks", "text name")]
    top, scale = 50.0, 34
    for name, kinds in BYTES.items():
        x = float(LEFT)
        parts.append(text(20, top + 16, name, "quiet" if name == "its host" else "text name"))
        for kind, size in kinds.items():
            parts.append(bar(x, top, size * scale - 1, COLOURS[KINDS[kind]], f"{size:g}" if size >= 1 else "", 24))
            x += size * scale
        parts.append(text(x + 8, top + 16, f"{sum(kinds.values()):g}", "text name"))
        top += 34
    words = {
        "update": "weights, float32",
        "backward": "moments",
        "reduce": "gradients",
        "gather": "gathered, bf16",
        "forward": "shard, bf16",
    }
    parts += legend(top + 6, words)
    return picture(LEFT + 17 * scale, int(top) + 36, "Bytes per parameter on each of four ranks, by strategy", parts)


def offload() -> str:
    """A step and the next forward: gradients leave, the host steps, weights come back, each unit waits for its own."""
    parts = [text(20, 30, "Offload: the host steps behind the next forward", "text name")]
    lanes = ["device: compute", "device to host", "host: update", "host to device"]
    tops = [50.0 + lane * (LANE + 8) for lane in range(4)]
    parts += [text(20, top + 15, words, "quiet") for top, words in zip(tops, lanes, strict=True)]
    for unit in range(4):
        parts.append(cell(tops[0], unit, "forward", f"F{unit + 1}"))
        parts.append(cell(tops[0], 4 + (3 - unit) * 1.5, "backward", f"B{unit + 1}", 1.5))
        parts.append(cell(tops[1], 5.5 + (3 - unit) * 1.5, "reduce", f"G{unit + 1}", 0.8))
        parts.append(cell(tops[2], 11 + unit * 0.9, "update", f"U{unit + 1}", 0.9))
        parts.append(cell(tops[3], 11.9 + unit * 0.9, "gather", f"W{unit + 1}", 0.8))
        parts.append(cell(tops[0], 12.8 + unit, "forward", f"F{unit + 1}"))
    x = LEFT + 10.9 * CELL
    parts.append(f'<line class="line" x1="{x:g}" x2="{x:g}" y1="44" y2="{tops[3] + LANE:g}" stroke-dasharray="4 3"/>')
    parts.append(text(x - 88, tops[3] + 16, "global norm", "quiet"))
    bottom = tops[3] + LANE + 22
    parts.append(
        text(20, bottom, "F forward, B backward, G gradients, U update, W new weights. A unit's F waits", "quiet")
    )
    parts.append(text(20, bottom + 18, "for its own W alone. Only G1, U1 and W1 do not hide behind compute.", "quiet"))
    return picture(LEFT + 17 * CELL + 10, int(bottom) + 34, "The timeline of offloaded optimizer steps", parts)


def sequence(ranks: int = 2, tokens: int = 8, heads: int = 4) -> str:
    """What each rank has of a row, tokens across and heads down: its tokens, its heads in attention, its tokens."""
    size, gap = 18, 70
    colours = (COLOURS["forward"], COLOURS["reduce"])
    titles = ("norms, products, loss", "attention", "norms, products, loss")
    width, top = tokens * size, 66.0
    parts = [text(20, 30, f"A row of {tokens} tokens and {heads} heads on {ranks} ranks", "text name")]
    for stage, title in enumerate(titles):
        left = 20 + stage * (width + gap)
        parts.append(text(left, top - 12, title, "quiet"))
        for token in range(tokens):
            for head in range(heads):
                owner = head * ranks // heads if stage == 1 else token * ranks // tokens
                parts.append(bar(left + token * size, top + head * size, size - 2, colours[owner], height=size - 2))
        if stage < len(titles) - 1:
            parts.append(text(left + width + 4, top + heads * size / 2, "exchange", "quiet"))
    bottom = top + heads * size + 24
    for rank in range(ranks):
        parts.append(bar(20 + rank * 90, bottom, 14, colours[rank], height=14))
        parts.append(text(40 + rank * 90, bottom + 12, f"rank {rank}", "quiet"))
    return picture(20 + 3 * width + 2 * gap + 20, int(bottom) + 34, "What each rank has of a shared row", parts)


def imported_rooms() -> dict[str, set[str]]:
    """Room of toolkit/ -> the rooms that its files import, without those that another one imports for it."""
    rooms = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    found: dict[str, set[str]] = {room: set() for room in rooms}
    for path in FILES:
        room = name_of(path).partition("/")[0]
        if room in found:
            read = {other.partition("/")[0] for _, other in imports(nodes_of(path))}
            found[room] |= read & found.keys() - {room}
    below = {room: _all_below(room, found) for room in rooms}
    return {room: {x for x in reads if not any(x in below[other] for other in reads)} for room, reads in found.items()}


def _all_below(room: str, reads: dict[str, set[str]]) -> set[str]:
    return reads[room].union(*(_all_below(other, reads) for other in reads[room]))


def rooms(width: int = 200, height: int = 84, gap: int = 36) -> str:
    """The rooms of the package by floors, their folders, and which rooms each one imports directly."""
    reads = imported_rooms()
    floors: dict[str, int] = {}
    while len(floors) < len(reads):
        ready = [room for room in reads if room not in floors and reads[room] <= floors.keys()]
        floors |= {room: 1 + max((floors[other] for other in reads[room]), default=-1) for room in ready}
    rows = [sorted(room for room in reads if floors[room] == floor) for floor in range(max(floors.values()) + 1)][::-1]
    wide = 40 + max(map(len, rows)) * (width + gap) - gap
    places = {}
    for number, row in enumerate(rows):
        left = (wide - len(row) * (width + gap) + gap) / 2
        places |= {room: (left + i * (width + gap), 20 + number * (height + gap)) for i, room in enumerate(row)}
    parts = []
    for room, others in reads.items():
        x, y = places[room]
        for other in sorted(others):
            ends = (x + width / 2, y + height, places[other][0] + width / 2, places[other][1])
            parts.append('<line class="line" x1="{:g}" y1="{:g}" x2="{:g}" y2="{:g}" stroke-width="2"/>'.format(*ends))
    for room, (x, y) in places.items():
        parts.append(f'<rect class="card" x="{x:g}" y="{y:g}" width="{width}" height="{height}" rx="6"/>')
        parts.append(text(x + 10, y + 20, room, "text name"))
        inner = ", ".join(sorted(path.parent.name for path in (PACKAGE / room).glob("*/__init__.py")))
        parts += [text(x + 10, y + 40 + 17 * i, line, "quiet") for i, line in enumerate(textwrap.wrap(inner, 28))]
    return picture(
        wide, 20 + len(rows) * (height + gap), "The rooms of the package; lines lead to what is imported", parts
    )


PICTURES = {f"{draw.__name__}.svg": draw for draw in (step, memory, offload, sequence, rooms)}
"""File in docs/pictures/ -> what draws it."""

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
