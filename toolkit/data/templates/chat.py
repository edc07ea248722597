"""Renders conversations with the tokenizer's chat template: the prompt of each answer, and what the model writes.

The prompt is what a server gives the model before an answer (`prompts.py`). The answer is what the template writes
after it, up to and with the special token that ends the turn. Where all prompts and answers are in the text of the
whole conversation, this text has them all; otherwise each answer has a text of its own, as at inference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from os.path import commonprefix
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from toolkit.data.layouts.left_out import NO_CALLS
from toolkit.data.layouts.messages import SYSTEM
from toolkit.data.layouts.template_arguments import NO_ARGUMENTS, variables
from toolkit.data.layouts.thoughts import THOUGHTS, thought_of
from toolkit.data.rows.examples import Message
from toolkit.data.rows.values import RowProblem
from toolkit.data.templates.masks import Span, special_texts
from toolkit.data.templates.prompts import prompt_of
from toolkit.data.templates.templates import rendered
from toolkit.errors import first_line

Targets = Literal["assistant", "last_turn", "all", "each_turn"]
"""What is learned: every assistant turn, the last one only, or the whole text; with each_turn each in its own text."""

NO_TURN = "no assistant turn"
ALL_UNLEARNED = "every turn that would be learned has weight 0"
LONG, STEP = 64, 8
"""Prompts of up to `LONG` messages are rendered whole; a part of a longer one has at least `STEP` messages."""

GREETING = "an answer that nothing comes before is not learned"
NO_PLACE = "the chat template writes the words of a message that is not learned otherwise, or not at all"


@dataclass(frozen=True)
class Turn:
    """One answer.

    Attributes:
        index: number of its message.
        prompt: the conversation before it with the generation prompt, as at inference.
        written: the text that the model writes, including the token that ends its turn.
    """

    index: int
    prompt: str
    written: str


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        spans: characters of the targets: sorted and disjoint; empty ones if the template ends no answer.
        greets: whether an answer that nothing comes before is left out, because a model is not asked for it.
        turns: the answers if each is a text of its own; then `text` and `spans` say nothing. Otherwise None.
    """

    text: str
    spans: list[Span]
    turns: list[Turn] | None = None
    greets: bool = False


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    targets: Targets,
    unlearned: frozenset[int] = frozenset(),
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
    is_asked: bool = True,
) -> Rendered:
    """Renders the conversation with the tokenizer's chat template, and returns what the model learns to write.

    With "all" the whole text is one span, less the messages that are not learned.

    Args:
        messages: each with a `role` (system, user, assistant or tool) and `content` (text or None); an assistant's
            may have `tool_calls`.
        unlearned: indices of the messages that are not targets.
        arguments: arguments of the template.
        is_asked: whether a model writes the answers. A reward model reads the text as it is.

    Raises:
        RowProblem: if the template refuses the conversation, it has no assistant turn, or what it writes after a
            prompt is not known.
    """
    assert tokenizer.chat_template is not None, "the caller sees to it that there is a chat template"
    row = ConversationText(tokenizer, messages, tools, arguments)
    if targets == "all":
        return Rendered(row.text, row.without(unlearned))
    return _by_turns(row, targets, unlearned, is_asked)


def _by_turns(row: ConversationText, targets: Targets, unlearned: frozenset[int], is_asked: bool) -> Rendered:
    """Renders the prompt of each answer, and the answer after it."""
    wanted = row.wanted(targets, unlearned)
    if not is_asked:
        return Rendered(row.text, [row.read(wanted[-1])])
    if targets != "each_turn" and (found := row.spans_by_parts(wanted)) is not None:
        return Rendered(row.text, found)
    turns = [row.turn(i) for i in wanted if i > 0]
    greeting = row.greeting() if wanted[0] == 0 else None
    together = turns if greeting is None else [greeting, *turns]
    spans = None if targets == "each_turn" else row.spans_of(together)
    if not turns and not spans:
        raise RowProblem(GREETING)
    if spans is not None:
        return Rendered(row.text, spans, greets=len(spans) < len(wanted))
    return Rendered(row.text, [], turns, greets=wanted[0] == 0)


class ConversationText:
    """One row: its text, the prompts of its answers, and the answers.

    Raises:
        RowProblem: if the template refuses the whole conversation.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> None:
        self.tokenizer = tokenizer
        self.messages = messages
        self.arguments = arguments
        self.tools = tools or None  # templates test `tools is not none`: they would announce an empty list
        self.special = special_texts(tokenizer)

    @cached_property
    def text(self) -> str:
        """The whole conversation."""
        return self._render(self.messages)

    def _render(self, messages: list[Message]) -> str:
        try:
            return rendered(self.tokenizer, messages, self.tools, False, self.arguments)
        except Exception as error:  # a template is a program, and may refuse a conversation in any way
            raise RowProblem(f"the chat template rejects it: {first_line(error)}") from error

    def prompt(self, index: int) -> str:
        """Returns what a server gives the model before the answer of message `index`."""
        return prompt_of(self.tokenizer, self.messages[:index], self.tools, self.arguments)

    def wanted(self, targets: Targets, unlearned: frozenset[int]) -> list[int]:
        """Returns the numbers of the messages that are learned."""
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if not turns:
            raise RowProblem(NO_TURN)
        wanted = [i for i in (turns[-1:] if targets == "last_turn" else turns) if i not in unlearned]
        if not wanted:
            raise RowProblem(ALL_UNLEARNED)
        return wanted

    def turn(self, index: int) -> Turn:
        """Returns the answer of message `index` as the last one, as it is when a model writes it."""
        messages = self.messages[: index + 1]
        text = self.text if len(messages) == len(self.messages) else self._render(messages)
        prompt = self.prompt(index)
        if text.startswith(prompt):
            written = text[len(prompt) :]
        else:
            written = written_otherwise(self.tokenizer, messages, prompt, text, self.arguments)
        written = self._closed(written)
        calls = [call.get("function") or call for call in messages[-1].get("tool_calls") or ()]
        if not all(str(call.get("name")) in written for call in calls):
            raise RowProblem(NO_CALLS)
        return Turn(index, prompt, written)

    def greeting(self) -> Turn | None:
        """Returns an answer that nothing comes before, after what the template writes before its words, or None."""
        try:
            text = self._render(self.messages[:1])
            start = self._place_of_words(0, self.messages[:1])
        except RowProblem:
            return None
        return Turn(0, text[:start], self._closed(text[start:]))

    def _closed(self, text: str) -> str:
        """Returns a text without the whitespace after a special token that ends it."""
        closed = text.rstrip()
        return closed if closed.endswith(self.special) else text

    def spans_of(self, turns: list[Turn]) -> list[Span] | None:
        """Returns the places of answers in the whole text, or None if a prompt or an answer is not there as served."""
        spans = []
        for turn in turns:
            start = len(turn.prompt)
            found = next((each for each in self._endings(turn) if self.text.startswith(each, start)), None)
            if found is None or not self.text.startswith(turn.prompt):
                return None
            spans.append((start, start + len(found)))
        return spans

    def _endings(self, turn: Turn) -> list[str]:
        """Returns an answer, and it without what follows the first special token at its end.

        A finished conversation has the end of text there (Phi 3).
        """
        message, closed, ends = self.messages[turn.index], turn.written, [turn.written]
        if not str(message.get("content") or "").strip() and not message.get("tool_calls"):
            return ends  # a special token before nothing may open it, as in GPT-OSS
        while closed.endswith(self.special):
            ends.append(closed)
            closed = closed[: -max(len(token) for token in self.special if closed.endswith(token))].rstrip()
        return [turn.written, ends[-1]]

    def spans_by_parts(self, wanted: list[int]) -> list[Span] | None:
        """Returns the places of answers in a long conversation, each found in a part of it, or None.

        Prompts grow with the conversation, so that their cost would grow with the square of its turns.
        """
        if len(self.messages) <= LONG:
            return None
        places: dict[int, Span] = {}
        before = 0
        for index in (i for i, message in enumerate(self.messages) if message["role"] == "assistant"):
            place = self._place_in_part(before, index, places[before][1]) if index > LONG and before else None
            if place is None and (found := self.spans_of([self.turn(index)] if index else [])):
                [place] = found
            if place is None:
                return None
            places[index], before = place, index
        return [places[i] for i in wanted]

    def _place_in_part(self, before: int, index: int, end: int) -> Span | None:
        """Returns the place of an answer, given the end of the one before it (characters), or None if it is not known.

        The part has the system prompt, a user's message and some messages before both, of which a template makes the
        same text.
        """
        roles = [message["role"] for message in self.messages]
        turns = (i for i in range(before - STEP, 0, -1) if roles[i] == "assistant" != roles[i - 1])
        first = next(turns, 0)
        head = [i for i in range(min(1, first)) if roles[i] in SYSTEM]
        head += [i for i in range(first) if roles[i] == "user"][-1:]
        messages = [self.messages[i] for i in (*head, *range(first, index + 1))]
        part = ConversationText(self.tokenizer, messages, self.tools, self.arguments)
        last = part.turn(len(messages) - 1)
        earlier = part.turn(len(messages) - 1 - (index - before))
        texts = [earlier.prompt + ending for ending in part._endings(earlier)]
        between = next((last.prompt[len(text) :] for text in texts if last.prompt.startswith(text)), None)
        if between is None or not self.text.startswith(between, end):
            return None
        start = end + len(between)
        found = next((each for each in part._endings(last) if self.text.startswith(each, start)), None)
        return None if found is None else (start, start + len(found))

    def read(self, index: int) -> Span:
        """Returns the place of an answer that nobody has to write: what a prompt of it does not have."""
        start = shared_length(self.text, self.prompt(index)) if index else 0
        return start, len(self._closed(self.text))

    def without(self, unlearned: frozenset[int]) -> list[Span]:
        """Returns the whole text less the messages `unlearned`: an answer with its end, of others the words."""
        edges = [0, *(edge for i in sorted(unlearned) for edge in self._place(i)), len(self.text)]
        return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]

    def _place(self, index: int) -> Span:
        """Returns the place of a message in the whole text; raises RowProblem if it is not there as it was written."""
        turn = self.turn(index) if self.messages[index]["role"] == "assistant" and index > 0 else None
        if turn is not None and (found := self.spans_of([turn])) is not None:
            return found[0]
        words = str(self.messages[index].get("content") or "").strip()
        start = self._place_of_words(index, self.messages)
        if not words or not self.text.startswith(words, start):
            raise RowProblem(NO_PLACE)
        end, written = start + len(words), "" if turn is None else turn.written
        closing = (len(each) for each in self.special if written.endswith(each) and self.text.startswith(each, end))
        return start, end + max(closing, default=0)

    def _place_of_words(self, index: int, messages: list[Message]) -> int:
        """Returns where a message's words begin in the text of messages: what does not change with them."""
        words = str(messages[index].get("content") or "").strip()
        other = {"role": messages[index]["role"], "content": "b" if words.startswith("a") else "a"}
        return shared_length(self._render(messages), self._render([*messages[:index], other, *messages[index + 1 :]]))


# ---- What a model writes after a prompt with which the text of the conversation does not begin ----
# A chat template may write an answer after other characters than its own generation prompt: blanks, a thought that the
# prompt opens or closes, or a history that changes once the answer follows. Then the answer is what the template writes
# from where the two part. Anything else is refused in the words of its cause.

CLOSED = "an answer has thoughts, and the generation prompt of the chat template closes them before it"
OPENED = (
    "the generation prompt of the chat template opens thoughts, and the template writes an answer's in another form"
)
PARTED = "the chat template writes what comes before an answer otherwise once the answer follows"

_ASKED = [{"role": "user", "content": "What is three plus four?"}]
_THOUGHT, _WORDS = "I count on from four.", "Seven"
_TAG = re.compile(r"(?:<[^<>]*>|\[[^\[\]]*\])\w*\s*$")


def shared_length(text: str, other: str) -> int:
    """Returns how many characters two texts begin with both."""
    return len(commonprefix([text, other]))  # noqa: RUF071 (of characters is what it should be)


def written_otherwise(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    prompt: str,
    text: str,
    arguments: Mapping[str, Any],
) -> str:
    """Returns what the model writes after the prompt, for the last of the messages, whose text is `text`.

    Raises:
        RowProblem: if prompt and text part by more than blanks, a thought or the history.
    """
    common = shared_length(prompt, text)
    if not prompt[common:].strip():
        return text[common:]
    template, given = tokenizer.get_chat_template(), json.dumps(dict(arguments), sort_keys=True)
    opening, between = _around_thought(tokenizer, template, given) or _usual(prompt)
    # Both are optional: a prompt may also end a thought that it has not opened, as Laguna's.
    marks = rf"({re.escape(opening)}\s*)?({re.escape(between.strip())}\s*)?\Z"
    end = re.search(marks, prompt)
    if end is None or not end[0] or not text.startswith(prompt[: end.start()]):
        return _after_history(messages, prompt, text, common)
    rest = text[end.start() :]
    if not end[2]:
        return _after_opened(messages[-1], rest, opening, between)
    if thought_of(messages[-1]).strip():
        raise RowProblem(f"{CLOSED}{_opened_by(tokenizer, messages, prompt, arguments)}")
    return re.sub(marks.removesuffix(r"\Z"), "", rest, count=1)


def _usual(prompt: str) -> tuple[str, str]:
    return "<think>", "\n</think>\n\n" if prompt.endswith("\n") else "</think>"


def _after_opened(message: Message, rest: str, opening: str, between: str) -> str:
    """Returns an answer that ends the thought that the prompt opened; `rest` is what the template writes of it."""
    closing, words = between.strip(), str(message.get("content") or "")
    if rest.startswith(opening):
        raise RowProblem(OPENED)
    before, closed, _ = words.partition(closing)
    if closed and before.strip() and rest.strip().startswith(before.strip()):
        return rest  # the template writes the thought as it is in the words
    thought, rest = thought_of(message), rest.removeprefix(closing)
    if not between.startswith("\n"):
        return thought + between + rest
    # The words of such a message have line ends after the thought.
    return thought.strip("\n") + between + (rest.lstrip("\n") if closed and not message.get(THOUGHTS) else rest)


def _after_history(messages: list[Message], prompt: str, text: str, common: int) -> str:
    """Returns what follows the end of the prompt, with which the text goes on after leaving out a part of it.

    Mistral puts the system text into the last user turn, GPT-OSS leaves out thoughts before a final answer.
    """
    said = str(messages[-2].get("content") or "").strip()
    asked, rest = prompt[common:], text[common:]
    shared = next((n for n in range(min(len(asked), len(rest)), 0, -1) if rest.startswith(asked[-n:])), 0)
    if not said or said not in prompt or not text[: common + shared].endswith(prompt[prompt.rfind(said) :]):
        raise RowProblem(PARTED)
    return rest[shared:]


@lru_cache(maxsize=64)
def _around_thought(tokenizer: PreTrainedTokenizerBase, template: str, arguments: str) -> tuple[str, str] | None:
    """Returns the mark that opens thoughts, and what the template writes between a thought and the words after it.

    Args:
        template: the tokenizer's.
        arguments: arguments of the template in JSON.
    """
    answer = {"role": "assistant", "content": _WORDS, THOUGHTS: _THOUGHT}
    try:
        text = rendered(tokenizer, [*_ASKED, answer], arguments=json.loads(arguments))
    except Exception:  # a template is a program, and may refuse a conversation in any way
        return None
    before, _, after = text.partition(_THOUGHT)
    between, said, _ = after.partition(_WORDS)
    mark = _TAG.search(before)
    return (mark[0].rstrip(), between) if mark and said and between.strip() else None


def _opened_by(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], prompt: str, arguments: Mapping[str, Any]
) -> str:
    """Returns which argument of the template opens thoughts, in parentheses; empty if none is found."""
    for name in sorted(variables(tokenizer.get_chat_template())):
        for value in (True, False):
            try:
                other = rendered(tokenizer, messages[:-1], None, True, {**arguments, name: value})
            except Exception:  # noqa: S112 (a template is a program, and may refuse a value in any way)
                continue
            if len(other) < len(prompt) and prompt.startswith(other):
                return f" (data.template_arguments: {{{name}: {str(value).lower()}}} opens them)"
    return ""
