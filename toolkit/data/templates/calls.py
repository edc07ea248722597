"""Passes the arguments of tool calls to a chat template as it writes them: as an object, or as JSON in a text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from toolkit.data.rows.examples import Message

ARGUMENTS = {"first": "three"}
ASKED = {"role": "user", "content": "What is three plus four?"}
ANSWERED = [
    {"role": "tool", "name": "add", "tool_call_id": "a1b2c3d4e", "content": "7"},
    {"role": "assistant", "content": "Seven."},
]


def for_template(messages: list[Message], template: str, special_tokens: Mapping[str, Any]) -> list[Message]:
    """Returns the messages with arguments as JSON in a text if the template joins them to its own, as DeepSeek R1's.

    Args:
        special_tokens: the tokenizer's, by name, which the template may write.
    """
    if not any(message.get("tool_calls") for message in messages):
        return messages
    if not _joins_arguments(template, tuple(sorted((name, str(text)) for name, text in special_tokens.items()))):
        return messages
    return [
        {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


@cache
def _joins_arguments(template: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Returns whether a template writes arguments as they are: of an object it makes Python's text, or an error."""
    as_object = list(_trials(template, dict(special_tokens), ARGUMENTS))
    as_text = list(_trials(template, dict(special_tokens), json.dumps(ARGUMENTS)))
    return any(json.dumps(ARGUMENTS) in text for text in as_text) and all(str(ARGUMENTS) in text for text in as_object)


def _trials(template: str, special_tokens: dict[str, str], arguments: dict[str, str] | str) -> Iterator[str]:
    """Yields what a template writes of a call that is the last message, and of one with its answer."""
    function = {"name": "add", "arguments": arguments}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "a1b2c3d4e", "type": "function"}]}
    call["tool_calls"][0]["function"] = function  # type: ignore[index]
    for messages in ([ASKED, call], [ASKED, call, *ANSWERED]):
        try:
            texts, _ = render_jinja_template(conversations=[messages], chat_template=template, **special_tokens)
        except Exception:  # noqa: S112 (a template is a program, and may fail in any way)
            continue
        yield texts[0]
