"""Finds the places of images in a conversation: parts of messages, or `<image>` in their words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.data.rows.examples import Message
from toolkit.data.rows.values import RowProblem, is_absent, is_empty

PLACE = "\ufffc"
"""Stands for an image in a message's words: Unicode's object replacement character."""

WITH_IMAGES = "pictured"
"""Key of every message of a conversation with images: the word that stands for one in the chat template."""

OF_REJECTED = "rejected_images"
"""Column of the images that the rejected completion of a pair sees, if they differ from the chosen one's."""

COLUMNS = ("images", "image", "image_paths", "image_path", "image_urls", "image_url")
"""Columns of a row's images: one image or a list, in the order of their places."""

MARK = "<image>"
"""Place for an image of the row's column in a text, as in LLaVA, ShareGPT, LLaMA-Factory and ms-swift."""

OF_ROW = object()
"""A place for the next image of the row's column."""

BEFORE_ALL = "the row's images are put before the first words of the user, because the text has no image placeholder"

_PARTS = {"image", "image_url", "input_image"}


def is_image(part: Any) -> bool:
    """Returns whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and (part.get("type") in _PARTS or (part.get("type") is None and "image" in part))


def reference_of(part: Mapping[str, Any]) -> Any:
    """Returns the reference of a part to its image: a path, URI, bytes or mapping, or `OF_ROW` if it has none."""
    for key in ("image", "image_url", "path", "url", "base64"):
        if not is_absent(part.get(key)):
            return {"base64": part[key]} if key == "base64" else part[key]
    return OF_ROW


def column_of(row: Mapping[str, Any], names: Sequence[str] = COLUMNS) -> list[Any]:
    """Returns the images of a row's own column, which has one of these names.

    Raises:
        RowProblem: if several columns have some.
    """
    found = [name for name in names if not is_empty(row.get(name))]
    if len(found) > 1:
        raise RowProblem(f"both {found[0]} and {found[1]} hold images")
    value = row[found[0]] if found else []
    return list(value) if isinstance(value, list) else [value]


def placed(messages: list[Message], of_row: list[Any]) -> tuple[list[Message], list[Any], list[str]]:
    """Returns the messages with a `PLACE` for every image, the images in the order of their places, and notes.

    Args:
        messages: with the references of their parts to images under `WITH_IMAGES`.
        of_row: the images of the row's column.

    Raises:
        RowProblem: if there are more or fewer places than images, or an image is in the assistant's words.
    """
    notes: list[str] = []
    if of_row and not any(OF_ROW in message.get(WITH_IMAGES, ()) for message in messages):
        messages = [_with_marks(message) for message in messages]
        if not any(OF_ROW in message.get(WITH_IMAGES, ()) for message in messages):
            messages, notes = _put_before_user_words(messages, len(of_row)), [BEFORE_ALL]
    named = [reference for message in messages for reference in message.get(WITH_IMAGES, ())]
    places = sum(reference is OF_ROW for reference in named)
    if places != len(of_row):
        raise RowProblem("the row has more images than places for them" if places < len(of_row) else NO_IMAGE)
    rest = iter(of_row)
    found = [next(rest) if reference is OF_ROW else reference for reference in named]
    if any(message["role"] == "assistant" and message.get(WITH_IMAGES) for message in messages):
        raise RowProblem("an image is in what the assistant says")
    return messages, found, notes


NO_IMAGE = "the messages have more places for images than the row has images"


def _with_marks(message: Message) -> Message:
    """Returns the message with a place for each `<image>` in its words."""
    words = message.get("content")
    if not isinstance(words, str) or MARK not in words or message["role"] == "assistant":
        return message
    if message.get(WITH_IMAGES):
        raise RowProblem(f"a message has images of its own next to {MARK} in its words")
    return {**message, "content": words.replace(MARK, PLACE), WITH_IMAGES: [OF_ROW] * words.count(MARK)}


def _put_before_user_words(messages: list[Message], count: int) -> list[Message]:
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise RowProblem("the row has images, and no message of the user for them to stand in")
    message = messages[first]
    before = [OF_ROW] * count
    changed = {
        **message,
        "content": PLACE * count + message["content"],
        WITH_IMAGES: [*before, *message.get(WITH_IMAGES, ())],
    }
    return [*messages[:first], changed, *messages[first + 1 :]]


def for_template(messages: list[Message], template: str) -> list[Message]:
    """Returns the messages as a chat template takes images: in parts, or as a word if it knows no image parts.

    In a conversation with images every message has parts, as transformers' processors pass them to templates.
    """
    if not any(WITH_IMAGES in message for message in messages):
        return messages
    knows_parts = '"image"' in template or "'image'" in template
    return [_in_parts(message) if knows_parts else _in_words(message) for message in messages]


def _in_words(message: Message) -> Message:
    plain = {key: value for key, value in message.items() if key != WITH_IMAGES}
    words = plain.get("content")
    return {**plain, "content": words.replace(PLACE, message[WITH_IMAGES])} if isinstance(words, str) else plain


def _in_parts(message: Message) -> Message:
    plain = {key: value for key, value in message.items() if key != WITH_IMAGES}
    words = plain.get("content")
    if not isinstance(words, str):
        return plain
    parts: list[dict[str, str]] = []
    for number, text in enumerate(words.split(PLACE)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**plain, "content": parts}
