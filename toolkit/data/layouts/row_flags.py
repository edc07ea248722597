"""Reads a row's flags: which messages and parts of them are learned, and what of it is ignored.

Each tool has its own flags on a message: OpenAI `weight`, axolotl `train` and `train_detail`, ms-swift `loss` and
`loss_scale`; others `mask`. They mean the same here. If two of them contradict each other, or one has a value that is
neither yes nor no, the row is dropped by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.data.rows.values import RowProblem, is_empty, key_shown, yes_or_no

Span = tuple[int, int]

FLAGS = ("weight", "train", "training", "loss", "loss_scale", "mask")
"""Flags that say whether a message is learned; `mask` says that it is not."""

PARTS = "train_detail"
"""Key for the characters of a message that are learned: a list of inclusive begin_offset and end_offset, `train`."""

IN_PARTS = f"parts of a message are not learned ({PARTS})"
"""Note of the report about such a message."""

MEDIA = tuple(
    name
    for kind in ("image", "video", "audio")
    for name in (kind, f"{kind}s", f"{kind}_url", f"{kind}_urls", f"{kind}_path", f"{kind}_paths", f"rejected_{kind}s")
)
"""Columns and keys of values that are not text."""


class UnreadMedium(RowProblem):
    """A row holds an image, a video or sound. `Layout` completes its sentence: why that is not read, and what to do.

    Args:
        whose: `the row` or `a message`.
        place: the column, key or type of part that holds it.
    """

    def __init__(self, whose: str, place: str) -> None:
        self.is_image = "image" in place
        what = "an image" if self.is_image else "a video" if "video" in place else "sound"
        super().__init__(f"{whose} has {what} ({place})")


def refuse_media(values: Mapping[str, Any], whose: str) -> None:
    """Refuses images, sound and video in a row or message, because only its text would be learned.

    Raises:
        UnreadMedium: if there are any.
    """
    for name in MEDIA:
        if not is_empty(values.get(name)):
            raise UnreadMedium(whose, name)


def refuse_parts(parts: list[Any]) -> None:
    """Refuses parts of a message's content that are not text.

    Raises:
        RowProblem: if there are any; `UnreadMedium` for an image, sound or video.
    """
    for part in parts:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            continue
        found = str(part.get("type") or next(iter(part), "")) if isinstance(part, dict) else ""
        if any(medium in found for medium in ("image", "video", "audio")):
            raise UnreadMedium("a message", key_shown(found))
        raise RowProblem("a message's content holds more than text")


def is_learned(fields: Mapping[str, Any]) -> bool | None:
    """Returns whether a message's flags say that it is learned, or None if it has none.

    Raises:
        RowProblem: if a flag is neither yes nor no, or two contradict each other.
    """
    said = {name: _yes_or_no(name, fields[name]) != (name == "mask") for name in FLAGS if name in fields}
    if len(set(said.values())) > 1:
        yes, no = (next(name for name, learned in said.items() if learned is wanted) for wanted in (True, False))
        raise RowProblem(f"a message's {yes} says that it is learned, and its {no} that it is not")
    return next(iter(said.values()), None)


def _yes_or_no(name: str, value: Any) -> bool:
    found = yes_or_no(value)
    if found is None:
        what = "0 nor 1" if name in ("weight", "loss_scale") else "true nor false"
        raise RowProblem(f"a message's {name} is neither {what}")
    return found


def unlearned_parts(fields: Mapping[str, Any], text: str) -> tuple[Span, ...]:
    """Returns the characters of a message that are not learned, by axolotl's `train_detail`, sorted.

    Raises:
        RowProblem: if it is not a list of parts of the text.
    """
    parts = fields.get(PARTS)
    if is_empty(parts):
        return ()
    spans = []
    for part in parts if isinstance(parts, list) else [parts]:
        found = part if isinstance(part, dict) else {}
        begin, end, train = (found.get(name) for name in ("begin_offset", "end_offset", "train"))
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < len(text):
            raise RowProblem(f"a message's {PARTS} names no parts of its text (begin_offset, end_offset, train)")
        if not _yes_or_no(PARTS, train):
            spans.append((begin, end + 1))
    return tuple(sorted(spans))


def without(spans: list[Span], cuts: list[Span]) -> list[Span]:
    """Returns the spans, sorted and disjoint, without the characters of `cuts`."""
    for first, last in cuts:
        spans = [
            piece
            for start, end in spans
            for piece in ((start, min(end, first)), (max(start, last), end))
            if piece[0] < piece[1]
        ]
    return spans
