"""Conversations to text by the tokenizer's chat template, and which part of that text the model learns to write.

A chat template is a program, and it does not say which characters come from whom. Here they are found by
rendering parts of the conversation, or the conversation with a mark put into it, and comparing: a span is
returned only where the renderings agree about it; a row where they do not is a `RowProblem`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Literal

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from toolkit.data import picture_places
from toolkit.data.problem import RowProblem
from toolkit.data.template_arguments import NO_ARGUMENTS
from toolkit.data.templates import rendered
from toolkit.data.thoughts import for_template
from toolkit.errors import first_line

Targets = Literal["assistant", "last_turn", "all"]
"""What is learnt: every assistant turn, the last one only, or the whole text."""

Message = dict[str, Any]
Span = tuple[int, int]

NO_WAY = "the assistant's words cannot be located in what the chat template renders"
NO_TURN = "no assistant turn"
ALL_UNLEARNED = "every turn that would be learned has weight 0"
NO_FUNCTION = "a tool call names no function"

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a template's own code can raise."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text. `spans` are the targets' characters in it: sorted, disjoint, none of them empty."""

    text: str
    spans: list[Span]


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    targets: Targets,
    unlearned: frozenset[int] = frozenset(),
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> Rendered:
    """The conversation by the tokenizer's chat template, and what of it the model learns to write.

    An assistant turn's targets begin where its generation prompt ends. They go up to and with the special token
    that closes the turn; whitespace behind that is no target. With "all" the whole text is one span.

    Args:
        messages: each with a `role` (system, user, assistant or tool) and `content` (text or None); an assistant's
            may have `tool_calls`.
        unlearned: indices of the messages that are no targets.
        arguments: of the template.

    Raises:
        RowProblem: the template refuses the conversation, there is no assistant turn, or its words cannot be found.
    """
    assert tokenizer.chat_template is not None, "the caller sees to it that there is a chat template"
    row = ConversationText(tokenizer, messages, tools, arguments)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    skipped = [i for i in turns if i in unlearned]
    if targets == "all":
        spans = _spans(row, turns, skipped) if skipped else []
        return Rendered(row.text, _gaps(spans, len(row.text)))
    if not turns:
        raise RowProblem(NO_TURN)
    for i in turns:
        # For its error: a call without a name is a bad row also where its turn is not learned.
        _called(messages[i])
    wanted = [i for i in (turns[-1:] if targets == "last_turn" else turns) if i not in unlearned]
    if not wanted:
        raise RowProblem(ALL_UNLEARNED)
    return Rendered(row.text, _spans(row, turns, wanted))


def _gaps(spans: list[Span], length: int) -> list[Span]:
    """What of a text the spans leave over."""
    edges = [0, *(edge for span in spans for edge in span), length]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


def target_mask(spans: list[Span], offsets: list[Span]) -> list[bool]:
    """Which tokens are targets: those whose characters overlap a span.

    Args:
        spans: characters, sorted and disjoint.
        offsets: each token's characters, by rising start. Tokenizers that trim offsets give whitespace none, and
            its place as where it ends: it counts as the character before that.
    """
    if not spans or not offsets:
        return [False] * len(offsets)
    starts, ends = np.asarray(offsets).T
    span_starts, span_ends = np.asarray(spans).T
    # The first span that ends behind the token's start; a token behind them all is given the last.
    following = np.searchsorted(span_ends, np.minimum(starts, ends - 1), side="right")
    overlaps = span_starts[np.minimum(following, len(spans) - 1)] < ends
    return ((following < len(spans)) & overlaps).tolist()  # type: ignore[no-any-return]


class ConversationText:
    """One row: its text, and renderings of parts of it to compare the text with.

    Raises RowProblem where the template refuses the whole conversation.
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
        self.tools = tools or None  # templates ask `tools is not none`: an empty list would be announced
        self.special = _special_tokens(tokenizer)
        self.text = self._render(messages, prompt=False)
        # Messages count too: a template can leave words out of the whole text and write them in a part of it.
        self.mark = _absent_mark(f"{messages} {self.text}")
        # Rendering is the cost: with this, two for each assistant turn, one of the whole and one that checks it.
        # Where marks are needed it is 2 n + 2, and a conversation of 800 messages takes 3 s (docs/log.md).
        self._beginnings: dict[tuple[int, bool], str | None] = {(len(messages), False): self.text}

    def _render(self, messages: list[Message], prompt: bool) -> str:
        try:
            return rendered(self.tokenizer, messages, self.tools, prompt, self.arguments)
        except _REFUSALS as error:
            raise RowProblem(f"the chat template rejects it: {first_line(error)}") from error

    def attempt(self, messages: list[Message], *, prompt: bool = False) -> str | None:
        """The text of other messages than the row's, `prompt` for a generation prompt; None if refused."""
        try:
            return self._render(messages, prompt)
        except RowProblem:
            return None

    def beginning(self, count: int, *, prompt: bool = False) -> str | None:
        """The text of the first `count` messages, rendered once; None where the template refuses them."""
        key = (count, prompt)
        if key not in self._beginnings:
            self._beginnings[key] = self.attempt(self.messages[:count], prompt=prompt)
        return self._beginnings[key]

    def shared(self, count: int, *, prompt: bool = False) -> int | None:
        """Length of the first `count` messages' text, where the row's text begins with it (characters)."""
        beginning = self.beginning(count, prompt=prompt)
        return len(beginning) if beginning is not None and self.text.startswith(beginning) else None

    def place_of_mark(self, index: int, marked: Message | None) -> int | None:
        """Where the mark of message `index` comes to stand in the row's text (characters).

        None unless it stands there once and leaves all else as it is. That in the name of a call may stand there
        again: behind it, where the answer to the call is.
        """
        if marked is None:
            return None
        text = self.attempt([*self.messages[:index], marked, *self.messages[index + 1 :]]) or ""
        before, mark, behind = text.partition(self.mark)
        if marked.get("tool_calls"):
            behind = behind.replace(self.mark, "")
        return len(before) if mark and before + behind == self.text else None

    def behind_mark(self, index: int, marked: Message, *, prompt: bool = False) -> str | None:
        """What follows the mark when message `index` is the last; None where the mark does not show."""
        _, mark, behind = (self.attempt([*self.messages[:index], marked], prompt=prompt) or "").partition(self.mark)
        return behind if mark else None

    def closed_end(self, start: int, end: int) -> int:
        """`end` without the whitespace behind a special token that closes the text from `start` (characters)."""
        text = self.text[start:end].rstrip()
        return start + len(text) if text.endswith(self.special) else end

    def behind_special(self, place: int) -> int:
        """The end of the special token at `place`, maybe after whitespace; `place` where there is none."""
        behind = self.text[place:]
        start = place + len(behind) - len(behind.lstrip())
        found = [len(token) for token in self.special if self.text.startswith(token, start)]
        return start + max(found) if found else place

    def body(self, start: int, end: int) -> str:
        """The text from `start` to `end` without the special tokens and the whitespace that close it."""
        text = self.text[start:end].rstrip()
        while text.endswith(self.special):
            text = text[: -max(len(token) for token in self.special if text.endswith(token))].rstrip()
        return text

    def closes(self, index: int) -> bool:
        """Whether the template closes the turn of message `index` with a special token.

        The message is looked at as the last one: behind an earlier one the special token may be the next one's.
        """
        closed = self.beginning(index + 1)
        return closed is not None and closed.rstrip().endswith(self.special)


def _spans(row: ConversationText, turns: list[int], wanted: list[int]) -> list[Span]:
    """What the assistant writes in the turns `wanted`, some of all its `turns` (indices of messages).

    Raises:
        RowProblem: it cannot be found.
    """
    # The template's own blocks come first, but not unchecked: a block inside a `set` gets a wrong place.
    spans = _spans_by_template(row, turns, wanted)
    if spans and _are_theirs(row, spans, wanted):
        return spans
    spans = [(start, end) for start, end in (turn_span(row, i) for i in wanted) if start < end]
    if spans and _are_theirs(row, spans, wanted):
        return spans
    # Dropped and counted, never guessed.
    raise RowProblem(NO_WAY)


def _spans_by_template(row: ConversationText, turns: list[int], wanted: list[int]) -> list[Span] | None:
    """The spans that the template itself marks as generated; None where it does not, or not what is wanted."""
    spans = _generation_spans(row)
    if not spans or not _hold_words(row, spans, turns):
        return None
    if len(wanted) < len(turns):
        if len(spans) != len(turns):
            return None  # which of the spans are of the turns wanted?
        spans = [spans[turns.index(i)] for i in wanted]
    # A block may end before the special token that the model has to learn to stop at.
    if row.closes(turns[-1]):
        spans = [(start, _with_closing(row, start, end)) for start, end in spans]
    spans = [(start, row.closed_end(start, end)) for start, end in spans]
    return [span for span in spans if span[0] < span[1]]


def _generation_spans(row: ConversationText) -> list[Span] | None:
    """Characters inside `{% generation %}` blocks; None where the template has none."""
    template = row.tokenizer.get_chat_template(tools=row.tools)
    if not _GENERATION.search(template):
        return None
    # As apply_chat_template does it, which gives the mask by tokens only: without the keys that are None.
    messages = [{key: value for key, value in message.items() if value is not None} for message in row.messages]
    messages = picture_places.for_template(for_template(messages, template), template)
    texts, spans = render_jinja_template(
        conversations=[messages],
        tools=row.tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **{**row.tokenizer.special_tokens_map, **row.arguments},
    )
    return _joined(spans[0]) if texts == [row.text] else None


def _joined(spans: list[Span]) -> list[Span]:
    """The spans in order, those that touch as one: a template may write one turn in several blocks."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            start, end = joined[-1][0], max(end, joined.pop()[1])
        joined.append((start, end))
    return joined


def _hold_words(row: ConversationText, spans: list[Span], turns: list[int]) -> bool:
    """Whether each span holds the words of its turn, or of any turn where the template left some turns out."""
    pieces = [row.body(start, end) for start, end in spans]
    messages = [row.messages[i] for i in turns]
    if len(pieces) == len(messages):
        return all(map(stands_in, messages, pieces))
    return all(any(stands_in(message, piece) for message in messages) for piece in pieces)


def _with_closing(row: ConversationText, start: int, end: int) -> int:
    """The span's end with the special token behind it, unless it has one (characters)."""
    closed = row.text[start:end].rstrip().endswith(row.special)
    return end if closed else row.behind_special(end)


def turn_span(row: ConversationText, index: int) -> Span:
    """What the assistant writes in the turn of message `index`.

    Raises:
        RowProblem: it cannot be found.
    """
    # The plain case: the text begins with the conversation cut before this turn, and with that cut after it.
    start, end = row.shared(index, prompt=True), row.shared(index + 1)
    if start is not None and end is not None and stands_in(row.messages[index], row.body(start, end)):
        return start, row.closed_end(start, end)
    # The template writes this turn, or what comes before it, otherwise when more follows.
    # Qwen 3 drops the think block of earlier turns; Mistral 3 moves tools into the last user turn.
    place, end = _end_by_mark(row, index)
    if start is None:
        start = _start_by_mark(row, index)
    if start > place:
        raise RowProblem(NO_WAY)
    return start, end


def _end_by_mark(row: ConversationText, index: int) -> tuple[int, int]:
    """Where the words of message `index` end, and where its turn does (characters).

    The turn ends as it does when it is the last one, or else at the special token behind its words.

    Raises:
        RowProblem: neither stands there.
    """
    message = row.messages[index]
    marked = _mark_end(message, row.mark)
    place = row.place_of_mark(index, marked)
    if marked is None or place is None:
        raise RowProblem(NO_WAY)
    closing = row.behind_mark(index, marked)
    if closing is not None and row.text.startswith(closing, place):
        return place, row.closed_end(place, place + len(closing))
    if message.get("tool_calls"):
        raise RowProblem(NO_WAY)  # the rest of the calls stands between the words and the special token
    return place, row.behind_special(place) if row.closes(index) else place


def _start_by_mark(row: ConversationText, index: int) -> int:
    """Where the turn of message `index` starts (characters): behind its generation prompt, or else at its words.

    Raises:
        RowProblem: neither can be found.
    """
    start = _prompt_end_by_mark(row, index)
    if start is None:
        start = _words_start_by_mark(row, index)
    if start is None:
        raise RowProblem(NO_WAY)
    return start


def _prompt_end_by_mark(row: ConversationText, index: int) -> int | None:
    """The end of what a generation prompt puts behind the words of the message before; None if it is not there."""
    marked = _mark_end(row.messages[index - 1], row.mark) if index > 0 else None
    place = row.place_of_mark(index - 1, marked)
    if marked is None or place is None:
        return None
    prompt = row.behind_mark(index - 1, marked, prompt=True)
    return place + len(prompt) if prompt is not None and row.text.startswith(prompt, place) else None


def _words_start_by_mark(row: ConversationText, index: int) -> int | None:
    """Where the first of an assistant's words would stand in this place; None if the text begins otherwise."""
    words = {"role": row.messages[index]["role"], "content": row.mark}
    text = row.attempt([*row.messages[:index], words, *row.messages[index + 1 :]]) or ""
    before, mark, _ = text.partition(row.mark)
    return len(before) if mark and row.text.startswith(before) else None


def _are_theirs(row: ConversationText, spans: list[Span], wanted: list[int]) -> bool:
    """Whether the spans are in order and hold nothing of messages other than `wanted`."""
    in_order = all(left[1] <= right[0] for left, right in pairwise(spans))
    others = [i for i, message in enumerate(row.messages) if i not in wanted and _words(message)]
    return in_order and not _hold_others(row, spans, others)


def _hold_others(row: ConversationText, spans: list[Span], others: list[int]) -> bool:
    """Whether words of the messages `others` stand in a span: a mark amid them does.

    Where marks change the text otherwise (templates look into messages), the words themselves must not be there.
    """
    messages = [_mark_middle(m, row.mark) if i in others else m for i, m in enumerate(row.messages)]
    pieces = (row.attempt(messages) or "").split(row.mark)
    if "".join(pieces) != row.text:
        return any(_words(row.messages[i]) in row.text[start:end] for i in others for start, end in spans)
    places = [(place, place + 1) for place in accumulate(map(len, pieces[:-1]))]
    return any(target_mask(spans, places))


def stands_in(message: Message, text: str) -> bool:
    """Whether the text holds the message's words and the names of the functions it calls."""
    return _words(message) in text and all(name in text for name in _called(message))


def _words(message: Message) -> str:
    """The message's text without whitespace around it; empty where it has none."""
    content = message.get("content")
    return content.strip() if isinstance(content, str) else ""


def _called(message: Message) -> list[str]:
    """Names of the functions that the message calls. Raises RowProblem where a call has none."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RowProblem(NO_FUNCTION)
    return [_function(call)["name"] for call in calls]


def _function(call: object) -> dict[str, Any]:
    """What a tool call calls: it is under `function`, or is the call itself."""
    function = (call.get("function") or call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowProblem(NO_FUNCTION)
    return function


def _mark_end(message: Message, mark: str) -> Message | None:
    """The message with a mark behind its words, or in its last tool call; None where it has neither."""
    calls = message.get("tool_calls")
    if calls:
        return {**message, "tool_calls": [*calls[:-1], _mark_call(calls[-1], mark)]}
    return _mark_at(message, mark, _text_end(message))


def _mark_call(call: dict[str, Any], mark: str) -> dict[str, Any]:
    """The tool call with a mark behind its function's name, which is text in every format."""
    function = _function(call)
    marked = {**function, "name": function["name"] + mark}
    return marked if function is call else {**call, "function": marked}


def _mark_middle(message: Message, mark: str) -> Message:
    """The message with a mark amid its words: templates look at the beginning and the end of a text."""
    return _mark_at(message, mark, _text_end(message) - (len(_words(message)) + 1) // 2) or message


def _mark_at(message: Message, mark: str, place: int) -> Message | None:
    content = message.get("content")
    if not isinstance(content, str):
        return None
    return {**message, "content": content[:place] + mark + content[place:]}


def _text_end(message: Message) -> int:
    """Where the message's text ends but for whitespace (characters)."""
    content = message.get("content")
    return len(content.rstrip()) if isinstance(content, str) else 0


def _absent_mark(text: str) -> str:
    """A mark that the text does not hold.

    Of signs that JSON, upper case and stripping leave alone, and whose ends differ: put anywhere, it is there once.
    """
    # Any number does: it is raised until the text does not hold it.
    number = 7413
    while (mark := f"⟦{number}⟧") in text:
        number += 1
    return mark


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokenizer's special tokens, added ones included."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added.union(tokenizer.all_special_ids)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The tokenizer's special tokens as text."""
    added = _added_special_tokens(tokenizer, len(tokenizer))
    return tuple({str(token) for token in tokenizer.all_special_tokens}.union(added))


@lru_cache(maxsize=4)  # there can be thousands, and every row asks
def _added_special_tokens(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> tuple[str, ...]:
    """Special tokens that were added to the vocabulary, now of `num_tokens` tokens."""
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
