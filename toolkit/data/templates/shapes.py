"""Finds the turns of a conversation from another one of the same shape.

The shape is the conversation with a place instead of words: its roles, the white space around words, and where thoughts
are. A row has its answers where its shape has them if its text, and what a server gives the model before each answer,
are those of the shape with the row's words in the places. The shape's answers are found once, with all checks
(`chat.py`). So a row is rendered once as a whole and once before each learned answer. Words that a template may look
for, and special tokens, have no place in a shape: such rows are rendered in parts, as are rows with calls or tools.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, zip_longest

from toolkit.data.rows.examples import Message

Span = tuple[int, int]

FrozenMessages = tuple[tuple[tuple[str, str], ...], ...]
"""Messages as pairs of key and value, which caches can hold."""

MOST_MESSAGES = 32
"""Longer conversations rarely have the shape of another one."""

_KEYS = {"role", "content", "reasoning_content"}
_PLACE = re.compile(r"⟦w(\d+)⟧")
_LOOKED_FOR = re.compile(
    r"""(?:startswith|endswith|split|partition|replace|find|index|count|prefix|suffix)\(\s*(?:'([^']*)'|"([^"]*)")"""
    r"""|(?:'([^']*)'|"([^"]*)")\s+(?:not\s+)?in\b"""
)
_KEY_OF_MESSAGE = re.compile(r"\s*|[a-z_]+")


@dataclass(frozen=True)
class Shape:
    """A conversation's messages with places, and the words that are there."""

    messages: FrozenMessages
    words: list[str]


def shape_of(messages: list[Message]) -> Shape | None:
    """Returns the shape of a conversation, or None if it has more than words and thoughts."""
    if len(messages) > MOST_MESSAGES:
        return None
    words: list[str] = []
    found = []
    for message in messages:
        if not message.keys() <= _KEYS or not all(isinstance(value, str) for value in message.values()):
            return None
        found.append(tuple((key, value if key == "role" else _placed(value, words)) for key, value in message.items()))
    # A template could take equal words from either message, and a text would not show it.
    return Shape(tuple(found), words) if len(set(words)) == len(words) else None


def _placed(text: str, words: list[str]) -> str:
    """Returns the text with a place for its words, which are added to `words`; for its thoughts another."""
    thought, closed, answer = text.partition("</think>")
    before, opened, thought = thought.partition("<think>")
    if not closed or not opened or before.strip():
        return _place(text, words)
    return f"{before}<think>{_place(thought, words)}</think>{_place(answer, words)}"


def _place(text: str, words: list[str]) -> str:
    found = text.strip()
    if not found:
        return text
    words.append(found)
    start = text.index(found)
    return f"{text[:start]}⟦w{len(words) - 1}⟧{text[start + len(found) :]}"


def messages_in(frozen: FrozenMessages) -> list[Message]:
    return [dict(message) for message in frozen]


@dataclass(frozen=True)
class Places:
    """A text with places for words.

    Attributes:
        pieces: the texts before, between and after the places.
        numbers: the number of the words in each place.
    """

    pieces: tuple[str, ...]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, text: str) -> Places:
        found = _PLACE.split(text)
        return cls(tuple(found[::2]), tuple(map(int, found[1::2])))

    def parts(self, words: list[str]) -> list[str]:
        """Returns the pieces with words between them; in places that no shape has, which a template wrote, none."""
        own = (words[i] if i < len(words) else "" for i in self.numbers)
        return [*chain.from_iterable(zip_longest(self.pieces, own, fillvalue=""))]


@dataclass(frozen=True)
class Skeleton:
    """What a template writes for a shape.

    Attributes:
        whole: the text.
        edges: the beginning and end of each learned part: number of a piece, and a character in it.
        prompts: number of each learned message that others precede, and what a server gives the model before it.
    """

    whole: Places
    edges: tuple[tuple[int, int], ...]
    prompts: tuple[tuple[int, Places], ...]

    @classmethod
    def of(cls, text: str, spans: list[Span], prompts: dict[int, str]) -> Skeleton:
        """Returns the skeleton of a shape's text, in which the learned spans (characters) are known."""
        places = list(_PLACE.finditer(text))
        starts, ends = [0, *(place.end() for place in places)], [*(place.start() for place in places), len(text)]
        # A span may begin or end with words, which no piece holds; it does so where a piece ends or begins.
        edges = [
            next((i, edge - start) for i, (start, end) in enumerate(zip(starts, ends, strict=True)) if edge <= end)
            for edge in chain.from_iterable(spans)
        ]
        return cls(Places.of(text), tuple(edges), tuple((i, Places.of(prompt)) for i, prompt in prompts.items()))

    def spans_in(self, text: str, words: list[str], prompt_of: Callable[[int], str]) -> list[Span] | None:
        """Returns the learned spans of a row's text (characters), or None if it is not this one with these words.

        Args:
            prompt_of: returns what a server gives the model before a message. It may depend on words where the text
                does not.
        """
        parts = self.whole.parts(words)
        if "".join(parts) != text:
            return None
        for i, prompt in self.prompts:
            if prompt_of(i) != "".join(prompt.parts(words)):
                return None
        starts = [0, *accumulate(map(len, parts))]
        edges = [starts[2 * piece] + place for piece, place in self.edges]
        return list(zip(edges[::2], edges[1::2], strict=True))


@lru_cache(maxsize=64)
def sensitive(template: str, special: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern of words that are no words like others: special tokens, and what the template looks for."""
    return re.compile("|".join(map(re.escape, {*special, *_looked_for(template), "<think>", "</think>"})))


def _looked_for(template: str) -> Iterable[str]:
    """Yields texts that the template compares with beginnings, ends or parts of others, but names of keys."""
    for found in _LOOKED_FOR.finditer(template):
        text = "".join(filter(None, found.groups())).replace("\\n", "\n")
        if not _KEY_OF_MESSAGE.fullmatch(text):
            yield text
