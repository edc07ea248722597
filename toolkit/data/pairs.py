"""Reads pairs of completions, one preferred over the other."""

from __future__ import annotations

import math
import re
from typing import Any

from toolkit.data.examples import Answer, Conversation, Message, Pair
from toolkit.data.messages import answered_last, asked_of, conversation, messages_of, tools_of, with_system
from toolkit.data.values import RowProblem, is_absent, text_of, type_of

SIDES = ("chosen", "rejected")

_TURN = re.compile(r"\n\n(Human|Assistant):")
"""How hh-rlhf (arXiv 2204.05862) marks turns."""


def pair_of(values: dict[str, Any], columns: dict[str, str]) -> Pair:
    """Returns both completions behind their prompt, which may be the common beginning of two conversations.

    Raises:
        RowProblem: if the two are the same, or differ before the last message.
    """
    prompt = _prompt(values, columns)
    sides = [_completion(prompt, values, columns, side) for side in SIDES]
    chosen, rejected = sides
    if chosen == rejected:
        raise RowProblem(f"{columns['chosen']} and {columns['rejected']} are the same")
    before = [side.messages[:-1] for side in sides if isinstance(side, Conversation)]
    if before and before[0] != before[-1]:
        raise RowProblem(f"{columns['chosen']} and {columns['rejected']} differ before the last message")
    return Pair(chosen, rejected, _margin(values, columns))


def _margin(values: dict[str, Any], columns: dict[str, str]) -> float:
    value: Any = values.get("margin")
    if is_absent(value):
        return 0.0
    # A CSV file holds only text; in Python True is a number.
    try:
        margin = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise RowProblem(f"{columns['margin']} is {type_of(value)}, not a finite number")
    return margin


def _prompt(values: dict[str, Any], columns: dict[str, str]) -> str | list[Message]:
    """Returns the prompt as text or messages, or an empty list if both sides are whole conversations."""
    prompt = values.get("prompt")
    if isinstance(prompt, list):
        return messages_of(prompt, columns["prompt"]) if prompt else []
    if prompt is not None:
        return text_of(prompt, columns["prompt"])
    if values.get("messages") is not None:
        return messages_of(values["messages"], columns["messages"])
    if values.get("instruction") is not None:
        return asked_of(values, columns)
    return []


def _completion(
    prompt: str | list[Message], values: dict[str, Any], columns: dict[str, str], side: str
) -> Answer | Conversation:
    value, column = values[side], columns[side]
    if isinstance(prompt, str) and not isinstance(value, list | dict):
        return Answer(prompt, text_of(value, column))
    if isinstance(value, str) and not prompt:
        answered = _dialogue(value, columns)
    elif isinstance(value, str) and values.get("prompt") is None:  # LLaMA-Factory's: the answer alone
        answered = [{"role": "assistant", "content": text_of(value, column)}]
    else:
        answered = messages_of([value] if isinstance(value, dict) else value, column)
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = _prompt_and_answer(asked, answered, column)
    return answered_last(conversation(with_system(messages, values.get("system")), tools_of(values.get("tools"))))


def _prompt_and_answer(asked: list[Message], answered: list[Message], column: str) -> list[Message]:
    """Returns the prompt and the answer; the column may repeat the prompt, as UltraFeedback's do."""
    if not asked or answered[0]["role"] in ("assistant", "tool"):
        return [*asked, *answered]
    # The conversation may have a system turn of its own, which the prompt does not repeat.
    begins = answered[1:] if answered[0]["role"] == "system" and asked[0]["role"] != "system" else answered
    if [_role_and_text(message) for message in begins[: len(asked)]] != [_role_and_text(message) for message in asked]:
        raise RowProblem(f"{column} is a whole conversation that does not begin with the prompt")
    return answered


def _role_and_text(message: Message) -> tuple[str, str]:
    return message["role"], (message["content"] or "").strip()


def _dialogue(text: str, columns: dict[str, str]) -> list[Message]:
    """Parses a conversation written as text: `\\n\\nHuman: ...\\n\\nAssistant: ...`."""
    if not _TURN.match(text):
        raise RowProblem(f"{columns['prompt']} is missing or null")
    _, *parts = _TURN.split(text)
    return messages_of(
        [{"from": who.lower(), "value": words.strip()} for who, words in zip(parts[::2], parts[1::2], strict=True)],
        columns["chosen"],
    )
