"""Reads a row's flags: which messages are learned, and what of it is ignored.

Each tool has its own flags on a message: OpenAI `weight`, axolotl `train`, ms-swift `loss` and
`loss_scale`; others `mask`. They mean the same here. If two of them contradict each other, or one has a value that is
neither yes nor no, the row is dropped by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.data.rows.values import RowProblem, is_empty, key_shown, yes_or_no

FLAGS = ("weight", "train", "training", "loss", "loss_scale", "mask")
"""Flags that say whether a message is learned; `mask` says that it is not."""

PARTS = "train_detail"
"""axolotl's key for the characters of a message that are learned. Whole messages are learned here, or not."""

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
        RowProblem: if a flag is neither yes nor no, or two contradict each other, or parts of it are flagged.
    """
    if not is_empty(fields.get(PARTS)):
        raise RowProblem(f"a message has {PARTS}, and whole messages are learned or not; flag it by train alone")
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
