"""Finds the turns of a conversation in the text that a chat template has made of it, to show them without its marks."""

from __future__ import annotations

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
    """Returns role and text of each turn; nothing if there are no marks, or any text stands outside of the turns.

    A last turn without text, which the model is to write, is left out.
    """
    for begin, end in FAMILIES:
        marks = list(begin.finditer(text))
        if not marks or _without_special(text[: marks[0].start()]):
            continue
        stops = [mark.start() for mark in marks[1:]] + [len(text)]
        found = [
            (mark["role"], text[mark.end() : stop].strip().removesuffix(end).removesuffix("</s>").strip())
            for mark, stop in zip(marks, stops, strict=True)
        ]
        return found if found[-1][1] else found[:-1]
    return []


def _without_special(text: str) -> str:
    """Returns what is left of a text without marks such as `<s>`."""
    return re.sub(r"<[^<>\s]+>", "", text).strip()
