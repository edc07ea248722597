"""Passes the assistant's thoughts, which have many names in data, to the field that the model's template reads.

DeepSeek and Qwen have `reasoning_content`, vLLM `reasoning`, GPT-OSS `thinking`; Anthropic's and Mistral's rows have
parts of type thinking, Harmony's a message of its own in the channel `analysis`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from toolkit.data.rows.examples import Message
from toolkit.data.rows.values import RowProblem, type_of

FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Keys of thoughts in a message; a template gets them under the first one that it reads."""

THOUGHTS = FIELDS[0]
"""Key of a message's thoughts here."""

_READS_PARTS = re.compile(r"""(?:\.type|\[['"]type['"]\])\s*==\s*['"]thinking['"]""")
CHANNELS = ("analysis", "commentary", "final")


def thoughts_of(fields: dict[str, Any], content: Any) -> str:
    """Returns a message's thoughts from its keys and the parts of its content, or an empty text.

    Raises:
        RowProblem: if a key holds no text, or two hold different ones.
    """
    found = []
    for name in FIELDS:
        value = fields.get(name, "")
        if not isinstance(value, str):
            raise RowProblem(f"a message's {name} is {type_of(value)}, not text")
        found.append(value)
    if isinstance(content, list):
        found.append("".join(_thought_in(part) for part in content if is_thought(part)))
    said = {text for text in found if text}
    if len(said) > 1:
        raise RowProblem("a message has two different thoughts")
    return next(iter(said), "")


def is_thought(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("thinking", "reasoning")


def _thought_in(part: dict[str, Any]) -> str:
    held = next((part[key] for key in ("thinking", "reasoning", "text") if part.get(key) is not None), None)
    if isinstance(held, list) and all(isinstance(piece, dict) and isinstance(piece.get("text"), str) for piece in held):
        held = "".join(piece["text"] for piece in held)  # Mistral's
    if not isinstance(held, str):
        raise RowProblem("a message's content has a thought that is not text")
    return held


def in_one_message(messages: list[Message]) -> list[Message]:
    """Merges Harmony's channels: a message in `analysis` becomes a thought of the message after it.

    Raises:
        RowProblem: if a channel is unknown, or no message of the assistant follows an analysis.
    """
    found: list[Message] = []
    thought = ""
    for message in messages:
        channel = message.get("channel")
        if channel not in (None, *CHANNELS):
            raise RowProblem(f"a message's channel is not one of {', '.join(CHANNELS)}")
        plain = {key: value for key, value in message.items() if key != "channel"}
        if channel == "analysis" and not message.get("tool_calls"):
            thought += plain.get("content") or ""
            continue
        if thought and plain["role"] != "assistant":
            raise RowProblem("a message of the channel analysis is not followed by an answer")
        if thought and plain.get(THOUGHTS):
            raise RowProblem("a message has two different thoughts")
        found.append({**plain, THOUGHTS: thought} if thought else plain)
        thought = ""
    if thought:
        raise RowProblem("a message of the channel analysis is not followed by an answer")
    return found


@cache
def field_of(template: str) -> str | None:
    """Returns the key under which a chat template reads thoughts, or None if it reads none."""
    return next((name for name in FIELDS if re.search(rf"""(?:\.|['"]){name}\b""", template)), None)


@cache
def reads_parts(template: str) -> bool:
    """Returns whether a chat template reads thoughts from parts of the content, as Magistral's does."""
    return _READS_PARTS.search(template) is not None


def _in_parts(message: Message) -> Message:
    plain = {key: value for key, value in message.items() if key != THOUGHTS}
    words = [{"type": "text", "text": plain["content"]}] if plain.get("content") else []
    return {**plain, "content": [{"type": "thinking", "thinking": message[THOUGHTS], "closed": True}, *words]}


def for_template(messages: list[Message], template: str) -> list[Message]:
    """Returns the messages with thoughts under the template's own key; they stay as they are if it reads none."""
    if reads_parts(template):
        return [_in_parts(message) if message.get(THOUGHTS) else message for message in messages]
    field = field_of(template)
    if field in (None, THOUGHTS):
        return messages
    return [
        {**{key: value for key, value in message.items() if key != THOUGHTS}, field: message[THOUGHTS]}
        if message.get(THOUGHTS)
        else message
        for message in messages
    ]


def thought_of(message: Message) -> str:
    """Returns a message's thoughts, from its field or inside its words, which may lack the mark that opens them."""
    inside, closed, _ = (message.get("content") or "").partition("</think>")
    return message.get(THOUGHTS) or (inside.rpartition("<think>")[2] if closed else "")
