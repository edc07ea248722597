"""Tells what of a row a chat template leaves out: whatever of its messages and tools is not in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from toolkit.data.layouts.messages import SYSTEM
from toolkit.data.layouts.thoughts import THOUGHTS
from toolkit.data.rows.examples import Message
from toolkit.data.rows.image_places import PLACE

LEAVES_OUT = "the chat template leaves out "
NO_CALLS = f"{LEAVES_OUT}calls of tools"
NO_TOOLS = f"{LEAVES_OUT}tools"
WORDS = {
    **dict.fromkeys(SYSTEM, "the system prompt"),
    "user": "words of the user",
    "tool": "results of tools",
    "assistant": "words of the assistant",
}
"""Role -> the name of its words in a note."""


def left_out_of(messages: list[Message], text: str, tools: list[dict[str, Any]] | None = None) -> list[str]:
    """Returns a note for each kind of what is not in the text, as it is or in JSON; of tools the descriptions count."""
    described = (str((tool.get("function") or tool).get("description") or "").strip() for tool in tools or ())
    notes = dict.fromkeys([NO_TOOLS] if any(_found(words, text, 0) < 0 for words in described) else [])
    place = 0
    for message in messages:
        ends = [place]
        for what, piece in _pieces(message):
            found = _found(piece, text, place)
            # Calls come after what is before them: tools that the text lists have these names, too.
            if found < 0 or (found < place and what == NO_CALLS):
                notes[what] = None
            ends.append(found + len(piece))
        # A template may write a system prompt into the last user's turn.
        place = place if message["role"] in SYSTEM else max(ends)
    return list(notes)


def _pieces(message: Message) -> Iterator[tuple[str, str]]:
    """Yields all texts of a message, stripped and not empty, each with the note about it."""
    thought, closed, words = (message.get("content") or "").rpartition("</think>")
    is_answer = message["role"] == "assistant"
    if closed and not is_answer:
        thought, words = "", message["content"]
    pieces = [(f"{LEAVES_OUT}<think>", piece) for piece in re.split("</?think>", thought)]
    pieces.append((f"{LEAVES_OUT}{THOUGHTS}", message.get(THOUGHTS) or ""))
    pieces += [(LEAVES_OUT + WORDS[message["role"]], piece) for piece in words.split(PLACE)]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        pieces += [(NO_CALLS, piece) for piece in (str(function.get("name")), *_texts(function.get("arguments")))]
    yield from ((what, stripped) for what, piece in pieces if (stripped := piece.strip()))


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts in the arguments of a call."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _found(words: str, text: str, place: int) -> int:
    """Returns where words are in a text, as they are or in JSON, searched from a place on and then before it; or -1."""
    if (found := text.find(words, place)) >= 0:  # as nearly all are
        return found
    once = [json.dumps(words, ensure_ascii=plain)[1:-1] for plain in (False, True)]
    twice = [json.dumps(form, ensure_ascii=False)[1:-1] for form in once]
    places = (text.find(form, start) for start in (place, 0) for form in dict.fromkeys([words, *once, *twice]))
    return next((found for found in places if found >= 0), -1)
