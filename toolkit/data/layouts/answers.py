"""Reads the answer of a row to train on as what completions are compared with, for all that score."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.data.layouts.messages import messages_of
from toolkit.data.rows.examples import Message
from toolkit.data.rows.values import RowProblem, encodable, is_judged_bad

COMPLETIONS = ("completion", "chosen")
"""Columns in which training rows have the answer to a prompt, if they have no `answer`."""

LENGTH_SHOWN = 80
"""Characters of an answer that an error shows."""


def learned_answer(row: Mapping[str, Any], messages: Sequence[Message] = ()) -> str | None:
    """Returns the words or the calls that a row teaches, or None: for a row without an answer, or with a bad one.

    Args:
        messages: the row's conversation, if it has one.

    Raises:
        RowProblem: if its completion cannot be read.
    """
    found = next((row[name] for name in COMPLETIONS if row.get(name) is not None), None)
    if is_judged_bad(row) or found == []:
        return None
    if isinstance(found, list | dict):
        messages = messages_of(found if isinstance(found, list) else [found], "completion")
    elif found is not None:
        return str(found)
    is_answered = len(messages) > 0 and messages[-1]["role"] == "assistant"
    return answer_text(messages[-1]) if is_answered else None


def answer_text(message: Message) -> str | None:
    """Returns the words of an assistant's message, or its call in JSON, or the list of several calls."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if not calls:
        return message["content"]  # type: ignore[no-any-return]
    plain = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    return json.dumps(plain if len(plain) > 1 else plain[0], ensure_ascii=False)


def right_answers(value: Any) -> tuple[str, ...]:
    """Returns the right answers of a column `answer`: a text, a number, a message or its parts, or a list of these.

    Raises:
        RowProblem: if it holds none.
    """
    if isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part for part in value):
        value = {"role": "assistant", "content": value}
    answers = value if isinstance(value, list) else [value]
    if value is None or not answers:
        raise RowProblem("answer is missing; needed: a text or a number, or a list of those that are right")
    return tuple(map(_right_answer, answers))


def _right_answer(value: Any) -> str:
    if isinstance(value, dict) and "role" in value:
        value = answer_text(messages_of([value], "answer")[0])
    if isinstance(value, int | float) and not isinstance(value, bool):  # as JSON writes it; true and false are none
        value = json.dumps(value)
    if not isinstance(value, str):
        raise RowProblem(f"answer: {json.dumps(value)[:LENGTH_SHOWN]} is not a string; put it in quotes")
    if not value.strip():
        raise RowProblem("answer is empty; needed: a text, or a list of texts that are right")
    return encodable(value, "answer")
