"""Passes tool calls and words to a chat template in the form that it reads, which trials of the template show.

Arguments of calls are an object, or JSON in a text; words are a text, or parts, as in Idefics 3 and SmolVLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from toolkit.data.rows.examples import Message

ARGUMENTS = {"first": "three"}
WORDS = "What is three plus four?"
ASKED = {"role": "user", "content": WORDS}
ANSWERED = [
    {"role": "tool", "name": "add", "tool_call_id": "a1b2c3d4e", "content": "7"},
    {"role": "assistant", "content": "Seven."},
]

Named = tuple[tuple[str, str], ...]
"""A tokenizer's special tokens by name, which a template may write."""


def with_calls_for(messages: list[Message], template: str, special_tokens: Mapping[str, Any]) -> list[Message]:
    """Returns the messages with arguments as JSON in a text if the template joins them to its own, as DeepSeek R1's."""
    if not any(message.get("tool_calls") for message in messages):
        return messages
    if not _joins_arguments(template, _named(special_tokens)):
        return messages
    return [
        {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def with_words_for(messages: list[Message], template: str, special_tokens: Mapping[str, Any]) -> list[Message]:
    """Returns the messages, their words in a part each if the template writes them only so."""
    if not _needs_parts(template, _named(special_tokens)):
        return messages
    return [
        {**message, "content": _part(message["content"])} if isinstance(message.get("content"), str) else message
        for message in messages
    ]


def _named(special_tokens: Mapping[str, Any]) -> Named:
    return tuple(sorted((name, str(text)) for name, text in special_tokens.items()))


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _part(words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": words}]


@cache
def _joins_arguments(template: str, special_tokens: Named) -> bool:
    """Returns whether a template writes arguments as they are: of an object it makes Python's text, or an error."""
    as_object, as_text = (_calls(template, special_tokens, form) for form in (ARGUMENTS, json.dumps(ARGUMENTS)))
    return any(json.dumps(ARGUMENTS) in text for text in as_text) and all(str(ARGUMENTS) in text for text in as_object)


def _calls(template: str, special_tokens: Named, arguments: dict[str, str] | str) -> list[str]:
    """Returns what a template writes of a call that is the last message, and of one with its answer."""
    function = {"name": "add", "arguments": arguments}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "a1b2c3d4e", "type": "function"}]}
    call["tool_calls"][0]["function"] = function  # type: ignore[index]
    ends: tuple[list[dict[str, Any]], ...] = ([], ANSWERED)
    tried = (_written(template, special_tokens, [ASKED, call, *end]) for end in ends)
    return [text for text in tried if text is not None]


@cache
def _needs_parts(template: str, special_tokens: Named) -> bool:
    return not _writes(template, special_tokens, WORDS) and _writes(template, special_tokens, _part(WORDS))


def _writes(template: str, special_tokens: Named, content: Any) -> bool:
    """Returns whether a template writes the words of a user's message."""
    text = _written(template, special_tokens, [{"role": "user", "content": content}])
    as_value = [str(part) for part in content] if isinstance(content, list) else []  # of a template that reads no parts
    return text is not None and WORDS in text and not any(value in text for value in as_value)


def _written(template: str, special_tokens: Named, messages: list[dict[str, Any]]) -> str | None:
    """Returns what a template writes, or None if it fails."""
    try:
        texts, _ = render_jinja_template(conversations=[messages], chat_template=template, **dict(special_tokens))
    except Exception:  # a template is a program, and may fail in any way
        return None
    return str(texts[0])
