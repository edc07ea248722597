"""Types of examples that several kinds of rows share: a text, an answer, a conversation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Self

Message = dict[str, Any]


class Example(ABC):
    """What is learned from a row, whatever file it is in."""

    @property
    def is_conversation(self) -> bool:
        """Whether a chat template writes it."""
        return False

    @abstractmethod
    def texts(self) -> list[str]:
        """Returns its texts, to train a tokenizer on."""

    def question(self) -> str:
        """Returns what a model is asked, or the text that it continues."""
        return self.texts()[0]

    def with_arguments(self, arguments: dict[str, Any]) -> Self:
        """Returns the example with the row's arguments of the chat template, if one writes it."""
        return self


@dataclass(frozen=True)
class Text(Example):
    """A text that is learned whole."""

    text: str

    def texts(self) -> list[str]:
        return [self.text]


@dataclass(frozen=True)
class Answer(Example):
    """A completion that is learned, given a prompt; both are used verbatim, without a chat template."""

    prompt: str
    completion: str

    def texts(self) -> list[str]:
        return [self.prompt + self.completion]

    def question(self) -> str:
        return self.prompt


@dataclass(frozen=True)
class Conversation(Example):
    """A conversation whose assistant turns are learned. Messages have `role` and `content`.

    Attributes:
        unlearned: numbers of the messages that are not learned, whoever speaks.
        parts: by a message's number, the characters of its words that are not learned.
        notes: parts of its messages that are ignored or not learned.
        arguments: the row's arguments for the chat template.
        images: in the order of their places in the messages' words: paths, URIs, bytes or mappings with one of them.
        num_asked: the first messages, which are the prompt of a completion: they are learned with the whole text alone.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    unlearned: frozenset[int] = frozenset()
    parts: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()
    num_asked: int = 0

    @property
    def is_conversation(self) -> bool:
        return True

    def texts(self) -> list[str]:
        return [message["content"] for message in self.messages if message["content"]]

    def question(self) -> str:
        return next((str(m["content"] or "") for m in self.messages if m["role"] == "user"), "")

    def with_arguments(self, arguments: dict[str, Any]) -> Conversation:
        return replace(self, arguments=arguments)
