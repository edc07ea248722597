"""Passes words in parts to a chat template that reads no text, as those of Idefics 3, SmolVLM and LLaVA-NeXT."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from toolkit.data.rows.examples import Message

WORDS = "What is three plus four?"


def for_template(messages: list[Message], template: str, special_tokens: Mapping[str, Any]) -> list[Message]:
    """Returns the messages, their words in a part each if the template writes them only so.

    Args:
        special_tokens: the tokenizer's, by name, which the template may write.
    """
    if not _needs_parts(template, tuple(sorted((name, str(text)) for name, text in special_tokens.items()))):
        return messages
    return [
        {**message, "content": _part(message["content"])} if isinstance(message.get("content"), str) else message
        for message in messages
    ]


def _part(words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": words}]


@cache
def _needs_parts(template: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    return not _writes(template, special_tokens, WORDS) and _writes(template, special_tokens, _part(WORDS))


def _writes(template: str, special_tokens: tuple[tuple[str, str], ...], content: Any) -> bool:
    """Returns whether a template writes the words of a user's message."""
    asked = [{"role": "user", "content": content}]
    try:
        texts, _ = render_jinja_template(conversations=[asked], chat_template=template, **dict(special_tokens))
    except Exception:  # a template is a program, and may fail in any way
        return False
    as_value = [str(part) for part in content] if isinstance(content, list) else []  # of a template that reads no parts
    return WORDS in texts[0] and not any(value in texts[0] for value in as_value)
