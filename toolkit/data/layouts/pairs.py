"""Reads pairs of completions, one preferred over the other."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from toolkit.data.layouts.messages import answered_last, asked_of, conversation, messages_of, tools_of, with_system
from toolkit.data.rows.examples import Answer, Conversation, Message, Pair
from toolkit.data.rows.values import RowProblem, RowValues, is_absent, text_of, type_of

SIDES = ("chosen", "rejected")

_TURN = re.compile(r"\n\n(Human|Assistant):")
"""How hh-rlhf (arXiv 2204.05862) marks turns."""


def pair_of(values: RowValues, templated: bool = False, margins: bool = False) -> Pair:
    """Returns both completions behind their prompt, which may be the common beginning of two conversations.

    Args:
        templated: whether a prompt that is text is a user's message, and not text that is used verbatim.
        margins: whether the row's margin is used.

    Raises:
        RowProblem: if the two are the same, or differ before the last message.
    """
    prompt, names = _prompt(values), values.columns
    if templated and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    sides = [_completion(prompt, values, side) for side in SIDES]
    chosen, rejected = sides
    if chosen == rejected:
        raise RowProblem(f"{names['chosen']} and {names['rejected']} are the same")
    before = [side.messages[:-1] for side in sides if isinstance(side, Conversation)]
    if before and before[0] != before[-1]:
        raise RowProblem(f"{names['chosen']} and {names['rejected']} differ before the last message")
    return Pair(chosen, rejected, _margin(values) if margins else 0.0)


def _margin(values: RowValues) -> float:
    value: Any = values["margin"]
    if is_absent(value):
        return 0.0
    # A CSV file holds only text; in Python True is a number.
    try:
        margin = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise RowProblem(f"{values.columns['margin']} is {type_of(value)}, not a finite number")
    return margin


def _prompt(values: RowValues) -> str | list[Message]:
    """Returns the prompt as text or messages, or an empty list if both sides are whole conversations."""
    prompt = values["prompt"]
    if isinstance(prompt, list):
        return messages_of(prompt, values.columns["prompt"]) if prompt else []
    if prompt is not None:
        return text_of(prompt, values.columns["prompt"])
    if (messages := values["messages"]) is not None:
        return messages_of(messages, values.columns["messages"])
    if values["instruction"] is not None:
        return asked_of(values)
    return []


def _completion(prompt: str | list[Message], values: RowValues, side: str) -> Answer | Conversation:
    value, column = values[side], values.columns[side]
    if isinstance(prompt, str) and not isinstance(value, list | dict):
        return Answer(prompt, text_of(value, column))
    if isinstance(value, str) and not prompt:
        answered = _dialogue(value, values.columns)
    elif isinstance(value, str) and not isinstance(values["prompt"], list):  # LLaMA-Factory's: the answer alone
        answered = [{"role": "assistant", "content": text_of(value, column)}]
    else:
        answered = messages_of([value] if isinstance(value, dict) else value, column)
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = _prompt_and_answer(asked, answered, column)
    return answered_last(conversation(with_system(messages, values), tools_of(values["tools"])))


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


def _dialogue(text: str, columns: Mapping[str, str]) -> list[Message]:
    """Parses a conversation written as text: `\\n\\nHuman: ...\\n\\nAssistant: ...`."""
    if not _TURN.match(text):
        raise RowProblem(f"{columns['prompt']} is missing or null")
    _, *parts = _TURN.split(text)
    return messages_of(
        [{"from": who.lower(), "value": words.strip()} for who, words in zip(parts[::2], parts[1::2], strict=True)],
        columns["chosen"],
    )
