"""Types of training examples: a text, an answer, a conversation, a class, or one completion over another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Text:
    """A text that is learned whole."""

    text: str


@dataclass(frozen=True)
class Answer:
    """A completion that is learned, given a prompt; both are used verbatim, without a chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class SourceTarget:
    """A target that an encoder-decoder learns, given a source."""

    source: str
    target: str


@dataclass(frozen=True)
class Conversation:
    """A conversation whose assistant turns are learned. Messages have `role` and `content`.

    Attributes:
        unlearned: numbers of the messages that are not learned, whoever speaks.
        parts: by a message's number, the characters of its words that are not learned.
        notes: parts of its messages that are ignored or not learned.
        arguments: the row's arguments for the chat template.
        images: in the order of their places in the messages' words: paths, URIs, bytes or mappings with one of them.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    unlearned: frozenset[int] = frozenset()
    parts: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Labelled:
    """The class of a text, or of a pair of texts; a number that names a class comes as text."""

    text: str
    text_pair: str | None
    label: str


@dataclass(frozen=True)
class Tagged:
    """Words, and the tag of each; a number that names a tag comes as text."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Pair:
    """One completion preferred over the other; what comes before them is the same.

    Attributes:
        margin: by how much the chosen one is better, as the row says; otherwise 0.
    """

    chosen: Answer | Conversation
    rejected: Answer | Conversation
    margin: float = 0.0


@dataclass(frozen=True)
class Judged:
    """A completion that is good or bad; in a conversation it is the last turn."""

    answer: Answer | Conversation
    good: bool


Example = Text | Answer | SourceTarget | Conversation | Labelled | Tagged | Pair | Judged


def is_conversation(example: Example) -> bool:
    """Returns whether a chat template writes the example."""
    if isinstance(example, Judged):
        return isinstance(example.answer, Conversation)
    return isinstance(example.chosen if isinstance(example, Pair) else example, Conversation)


def texts_of(example: Example) -> list[str]:
    """Returns the texts of a row, to train a tokenizer on."""
    if isinstance(example, Text):
        return [example.text]
    if isinstance(example, Answer):
        return [example.prompt + example.completion]
    if isinstance(example, SourceTarget):
        return [example.source, example.target]
    if isinstance(example, Labelled):
        return [example.text, *([example.text_pair] if example.text_pair is not None else [])]
    if isinstance(example, Tagged):
        return [" ".join(example.words)]
    if isinstance(example, Pair):
        return [*texts_of(example.chosen), *texts_of(example.rejected)]
    if isinstance(example, Judged):
        return texts_of(example.answer)
    return [message["content"] for message in example.messages if message["content"]]
