"""Finds the turns of a conversation in the text of a chat template or of its messages as JSON, to show them bare."""

from __future__ import annotations

import json
import re

_ROLE = r"(?P<role>system|developer|user|assistant|model|tool|ipython|environment)"

FAMILIES = (
    (re.compile(rf"<\|im_start\|>{_ROLE}\n"), "<|im_end|>"),
    (re.compile(rf"<\|start_header_id\|>{_ROLE}<\|end_header_id\|>\n\n"), "<|eot_id|>"),
    (re.compile(rf"<start_of_turn>{_ROLE}\n"), "<end_of_turn>"),
    (re.compile(rf"<\|{_ROLE}\|>\n"), "<|end|>"),
)
"""How templates begin a turn, and how they end it: ChatML, Llama 3, Gemma, Phi and Zephyr."""


def turns_of(text: str) -> list[tuple[str, str]]:
    """Returns role and text of each turn; nothing if there are no marks, or any text is outside of the turns.

    A last turn without text, which the model is to write, is left out.
    """
    if messages := _messages(text):
        return messages
    for begin, end in FAMILIES:
        marks = list(begin.finditer(text))
        # Before the first mark may be marks such as `<s>`, and nothing else.
        if not marks or re.sub(r"<[^<>\s]+>", "", text[: marks[0].start()]).strip():
            continue
        stops = [mark.start() for mark in marks[1:]] + [len(text)]
        found = [
            (mark["role"], text[mark.end() : stop].strip().removesuffix(end).removesuffix("</s>").strip())
            for mark, stop in zip(marks, stops, strict=True)
        ]
        return found if found[-1][1] else found[:-1]
    return []


def _messages(text: str) -> list[tuple[str, str]]:
    """Returns the turns of messages as JSON; nothing for other text, or if a message has more than role and content."""
    if not text.startswith("["):
        return []
    try:
        found = json.loads(text)
    except ValueError:
        return []
    are_plain = all(isinstance(one, dict) and one.keys() == {"role", "content"} for one in found)
    return [(str(one["role"]), str(one["content"])) for one in found] if are_plain else []
