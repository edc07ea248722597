"""Puts marks into messages, and cuts parts out of long conversations, to find words in what a chat template writes.

To find every answer of a conversation, its beginnings are rendered, one for each answer. Their length grows with the
conversation, so that the cost would grow with the square of its turns. Beyond `LONG` messages a part takes the place of
a beginning: the last messages of it behind the system prompt and the user's message before them, of which a template
makes the same text."""

from __future__ import annotations

import bisect
from typing import Any

from toolkit.data.layouts.messages import SYSTEM
from toolkit.data.rows.examples import Message
from toolkit.data.rows.values import RowProblem

NO_FUNCTION = "a tool call names no function"

LONG = 64
"""Beginnings of up to this many messages are rendered whole."""

STEP = 8
"""A part has at least this many messages before the one that is asked for."""


def first_of_part(messages: list[Message], count: int) -> int:
    """Returns the number of an assistant's message, at least `STEP` before `count`, that something else comes before.

    It is 0 if there is none.
    """
    for i in range(count - STEP, 0, -1):
        if messages[i]["role"] == "assistant" and messages[i - 1]["role"] != "assistant":
            return i
    return 0


def head_of(messages: list[Message], first: int, users: list[int]) -> list[Message]:
    """Returns what a part from message `first` on needs before it: the system prompt and the user's last message.

    Args:
        users: numbers of the user's messages, rising.
    """
    start = next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM), 0)
    last = bisect.bisect_left(users, first)
    before = users[max(0, last - 1) : last]
    return [*messages[:start], *(messages[i] for i in before)]


def next_of(messages: list[Message], index: int, users: list[int]) -> list[Message]:
    """Returns what a part up to message `index` needs behind it: some messages, and the user's next one."""
    end = index + 1 + STEP
    following = bisect.bisect_right(users, index)
    asked = [i for i in users[following : following + 1] if i >= end]
    return [*messages[index + 1 : end], *(messages[i] for i in asked)]


def all_marked(messages: list[Message], mark: str) -> list[Message]:
    """Returns the messages with a mark of its own in each that has a place for one: its number in the mark."""
    return [mark_end(message, numbered(mark, i)) or message for i, message in enumerate(messages)]


def numbered(mark: str, index: int) -> str:
    return f"{mark[:-1]}.{index}{mark[-1]}"


def places_of_marks(text: str, mark: str, whole: str) -> dict[int, list[int]]:
    """Returns where the marks of messages would stand in the whole text (characters), by the messages' numbers.

    There are none if the text without marks is not the whole text.
    """
    first, *rest = text.split(mark[:-1] + ".")
    places: dict[int, list[int]] = {}
    pieces, length = [first], len(first)
    for piece in rest:
        number, closed, words = piece.partition(mark[-1])
        if not closed or not number.isdecimal():
            return {}
        places.setdefault(int(number), []).append(length)
        pieces.append(words)
        length += len(words)
    return places if "".join(pieces) == whole else {}


def stands_in(message: Message, text: str) -> bool:
    """Returns whether the text holds the message's words and the names of the functions it calls."""
    return words_of(message) in text and all(name in text for name in called_functions(message))


def words_of(message: Message) -> str:
    """Returns the message's text without whitespace around it, or an empty text if it has none."""
    content = message.get("content")
    return content.strip() if isinstance(content, str) else ""


def called_functions(message: Message) -> list[str]:
    """Returns the names of the functions that the message calls; raises RowProblem if a call has none."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RowProblem(NO_FUNCTION)
    return [_function(call)["name"] for call in calls]


def _function(call: object) -> dict[str, Any]:
    """Returns the function of a tool call: it is under `function`, or is the call itself."""
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowProblem(NO_FUNCTION)
    return function


def mark_end(message: Message, mark: str) -> Message | None:
    """Returns the message with a mark behind its words or in its last tool call, or None if it has neither."""
    calls = message.get("tool_calls")
    if calls:
        return {**message, "tool_calls": [*calls[:-1], _mark_call(calls[-1], mark)]}
    return _mark_at(message, mark, _text_end(message))


def _mark_call(call: dict[str, Any], mark: str) -> dict[str, Any]:
    """Returns the tool call with a mark behind its function's name, which is text in every format."""
    function = _function(call)
    marked = {**function, "name": function["name"] + mark}
    return marked if function is call else {**call, "function": marked}


def mark_middle(message: Message, mark: str) -> Message:
    """Returns the message with a mark amid its words, because templates look at the beginning and end of a text."""
    return _mark_at(message, mark, _text_end(message) - (len(words_of(message)) + 1) // 2) or message


def _mark_at(message: Message, mark: str, place: int) -> Message | None:
    content = message.get("content")
    if not isinstance(content, str):
        return None
    return {**message, "content": content[:place] + mark + content[place:]}


def _text_end(message: Message) -> int:
    """Returns the end of the message's text without trailing whitespace (characters)."""
    content = message.get("content")
    return len(content.rstrip()) if isinstance(content, str) else 0


def absent_mark(text: str) -> str:
    """Returns a mark that the text does not hold.

    Its characters survive JSON, upper case and stripping, and its ends differ: put anywhere, it appears once.
    """
    # The number is raised until the text does not hold it.
    number = 7413
    while (mark := f"⟦{number}⟧") in text:
        number += 1
    return mark
