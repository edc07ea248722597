"""Renders conversations with the tokenizer's chat template, and finds the characters that the model learns to write.

A chat template is a program, and it does not say which characters come from whom. Here they are found by
rendering parts of the conversation, or the conversation with a mark put into it, and comparing: a span is
returned only if the renderings agree about it; a row for which they do not is a `RowProblem`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, pairwise
from typing import Any, Literal

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from toolkit.data.layouts.messages import NO_CALLS, left_out_of
from toolkit.data.layouts.template_arguments import NO_ARGUMENTS, date_of
from toolkit.data.rows.examples import Message
from toolkit.data.rows.values import RowProblem
from toolkit.data.templates.marks import (
    LONG,
    absent_mark,
    all_marked,
    called_functions,
    first_of_part,
    head_of,
    mark_end,
    mark_middle,
    next_of,
    places_of_marks,
    stands_in,
    words_of,
)
from toolkit.data.templates.shapes import FrozenMessages, Skeleton, messages_in, sensitive, shape_of
from toolkit.data.templates.templates import prepared, rendered
from toolkit.errors import first_line

Targets = Literal["assistant", "last_turn", "all"]
"""What is learned: every assistant turn, the last one only, or the whole text."""

Span = tuple[int, int]

NO_WAY = "the assistant's words cannot be located in what the chat template renders"
NO_TURN = "no assistant turn"
ALL_UNLEARNED = "every turn that would be learned has weight 0"

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""Errors that a template's own code can raise."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text. `spans` are the characters of the targets: sorted, disjoint and not empty.

    `prompted` says whether the text before each learned answer is what a server gives the model: the messages before
    it with the generation prompt. It is not looked at if the whole text is learned.
    """

    text: str
    spans: list[Span]
    prompted: bool = field(default=True, compare=False)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    targets: Targets,
    unlearned: frozenset[int] = frozenset(),
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> Rendered:
    """Renders the conversation with the tokenizer's chat template, and finds what the model learns to write.

    An assistant turn's targets begin where its generation prompt ends. They include the special token that closes the
    turn, but no whitespace behind it. With "all" the whole text is one span.

    Args:
        messages: each with a `role` (system, user, assistant or tool) and `content` (text or None); an assistant's
            may have `tool_calls`.
        unlearned: indices of the messages that are not targets.
        arguments: arguments of the template.

    Raises:
        RowProblem: if the template refuses the conversation, it has no assistant turn, or the assistant's words cannot
            be found.
    """
    assert tokenizer.chat_template is not None, "the caller sees to it that there is a chat template"
    row = ConversationText(tokenizer, messages, tools, arguments)
    if targets != "all" and (found := _by_shape(row, targets, unlearned)) is not None:
        return found
    return _by_parts(row, targets, unlearned)


def _by_shape(row: ConversationText, targets: Targets, unlearned: frozenset[int]) -> Rendered | None:
    """Returns what another conversation of the same shape shows, or None if it shows nothing; see `shapes.py`."""
    shape = None if row.tools or row.arguments else shape_of(row.messages)
    if shape is None:
        return None
    template = row.tokenizer.get_chat_template()
    if sensitive(template, row.special).search("\n".join(shape.words)):
        return None
    day = date_of(row.tokenizer)
    skeleton = _skeleton(row.tokenizer, template, day, row.special, shape.messages, targets, unlearned)
    prompt_of = partial(row.beginning, prompt=True)
    spans = None if skeleton is None else skeleton.spans_in(row.text, shape.words, prompt_of)
    return None if skeleton is None or spans is None else Rendered(row.text, spans, skeleton.prompted)


@lru_cache(maxsize=1024)
def _skeleton(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    day: date | None,
    special: tuple[str, ...],
    shape: FrozenMessages,
    targets: Targets,
    unlearned: frozenset[int],
) -> Skeleton | None:
    """Returns what the template writes for a shape, or None if its answers cannot be found."""
    try:
        row = ConversationText(tokenizer, messages_in(shape), None)
        found = _by_parts(row, targets, unlearned)
    except RowProblem:
        return None
    prompts = {i: row.beginning(i, prompt=True) for i in _wanted(row, targets, unlearned) if i > 0}
    return Skeleton.of(found.text, found.spans, found.prompted, prompts)


def _turns(row: ConversationText) -> list[int]:
    return [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]


def _wanted(row: ConversationText, targets: Targets, unlearned: frozenset[int]) -> list[int]:
    """Returns the numbers of the messages that are learned."""
    turns = _turns(row)
    return [i for i in (turns[-1:] if targets == "last_turn" else turns) if i not in unlearned]


def _by_parts(row: ConversationText, targets: Targets, unlearned: frozenset[int]) -> Rendered:
    """Finds the spans by renderings of parts of the row."""
    messages = row.messages
    turns = _turns(row)
    skipped = [i for i in turns if i in unlearned]
    if targets == "all":
        spans = _spans(row, turns, skipped) if skipped else []
        spans = sorted([*spans, *(_words_span(row, i) for i in unlearned.difference(turns) if words_of(messages[i]))])
        return Rendered(row.text, _gaps(spans, len(row.text)))
    if not turns:
        raise RowProblem(NO_TURN)
    for i in turns:
        # For its error: a call without a name makes a bad row even if its turn is not learned.
        called_functions(messages[i])
    wanted = _wanted(row, targets, unlearned)
    if not wanted:
        raise RowProblem(ALL_UNLEARNED)
    with row.telling_calls(wanted):
        spans = _spans(row, turns, wanted)
    starts = {start for start, _ in spans}
    # Nothing is asked before an answer that opens the conversation.
    return Rendered(row.text, spans, all(row.shared(i, prompt=True) in starts for i in wanted if i > 0))


def _gaps(spans: list[Span], length: int) -> list[Span]:
    """Returns the spans between `spans` in a text of `length` characters."""
    edges = [0, *(edge for span in spans for edge in span), length]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


def spans_array(spans: list[Span]) -> np.ndarray[Any, Any]:
    """Returns the spans, (n, 2), in less than half of numpy's own time for a list of tuples."""
    return np.fromiter(chain.from_iterable(spans), np.int64, 2 * len(spans)).reshape(-1, 2)


def target_mask(spans: list[Span], offsets: list[Span] | np.ndarray[Any, Any]) -> list[bool]:
    """Returns which tokens are targets: those whose characters overlap a span.

    Args:
        spans: characters, sorted and disjoint.
        offsets: each token's characters, by rising start. Tokenizers that trim offsets give whitespace an empty
            span at its end: it counts as the character before that.
    """
    if not spans or not len(offsets):
        return [False] * len(offsets)
    starts, ends = np.asarray(offsets).T
    span_starts, span_ends = spans_array(spans).T
    # The first span that ends behind the token's start, or the last span for a token behind all spans.
    following = np.searchsorted(span_ends, np.minimum(starts, ends - 1), side="right")
    overlaps = span_starts[np.minimum(following, len(spans) - 1)] < ends
    return ((following < len(spans)) & overlaps).tolist()  # type: ignore[no-any-return]


class ConversationText:
    """One row: its text, and renderings of parts of it to compare the text with.

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
        self.special = _special_tokens(tokenizer)
        self.text = self._render(messages, prompt=False)
        # Rendering is the cost: with these caches, two for each assistant turn, one of the whole and one as a check;
        # 2 n + 2 if marks are needed. In a long conversation they are renderings of a part (marks.py).
        self._beginnings: dict[tuple[int, bool], str | None] = {(len(messages), False): self.text}
        self._shared: dict[tuple[int, bool], int | None] = {}

    @cached_property
    def mark(self) -> str:
        """A mark that is in neither the text nor the messages; a template may write more of them in a part of it."""
        return absent_mark(f"{self.messages} {self.text}")

    def _render(self, messages: list[Message], prompt: bool) -> str:
        try:
            return rendered(self.tokenizer, messages, self.tools, prompt, self.arguments)
        except _REFUSALS as error:
            raise RowProblem(f"the chat template rejects it: {first_line(error)}") from error

    def attempt(self, messages: list[Message], *, prompt: bool = False) -> str | None:
        """Returns the text of other messages, with a generation prompt if `prompt`, or None if the template refuses."""
        try:
            return self._render(messages, prompt)
        except RowProblem:
            return None

    def beginning(self, count: int, *, prompt: bool = False) -> str | None:
        """Returns the text of the first `count` messages, rendered once, or None if the template refuses them."""
        key = (count, prompt)
        if key not in self._beginnings:
            self._beginnings[key] = self.attempt(self.messages[:count], prompt=prompt)
        return self._beginnings[key]

    def shared(self, count: int, *, prompt: bool = False) -> int | None:
        """Returns the length of the first `count` messages' text (characters), if the row begins with it, else None."""
        key = (count, prompt)
        if key not in self._shared:
            self._shared[key] = self._shared_part(count, prompt) if count > LONG else self._shared_whole(count, prompt)
        return self._shared[key]

    def _shared_whole(self, count: int, prompt: bool) -> int | None:
        beginning = self.beginning(count, prompt=prompt)
        return len(beginning) if beginning is not None and self.text.startswith(beginning) else None

    def _shared_part(self, count: int, prompt: bool) -> int | None:
        """Compares the text from a message of a part on, whose place is known."""
        if (count, prompt) in self._beginnings:
            return self._shared_whole(count, prompt)
        first = first_of_part(self.messages, count)
        anchor = next((i for i in range(first, count) if i in self.places and "tool_calls" not in self.messages[i]), 0)
        marked = mark_end(self.messages[anchor], self.mark)
        if not first or not anchor or marked is None:
            return self._shared_whole(count, prompt)
        part = [*self.messages[first:anchor], marked, *self.messages[anchor + 1 : count]]
        text = self.attempt([*head_of(self.messages, first, self.users), *part], prompt=prompt)
        _, mark, behind = (text or "").partition(self.mark)
        place = self.places[anchor]
        return place + len(behind) if mark and self.text.startswith(behind, place) else None

    @cached_property
    def places(self) -> dict[int, int]:
        """Where the words of each message end in the text (characters), found by one rendering; empty if it fails."""
        if len(self.messages) <= LONG or f"{self.mark[:-1]}." in f"{self.messages} {self.text}":
            return {}
        text = self.attempt(all_marked(self.messages, self.mark))
        found = places_of_marks(text or "", self.mark, self.text)
        # A call's name may appear again in the answer to the call.
        return {i: each[0] for i, each in found.items() if len(each) == 1 or self.messages[i].get("tool_calls")}

    @cached_property
    def users(self) -> list[int]:
        """Numbers of the user's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "user"]

    def up_to(self, index: int, last: Message) -> list[Message]:
        """Returns the conversation up to message `index`, in place of which `last` stands; of a long one a part."""
        first = first_of_part(self.messages, index) if index >= LONG else 0
        head = head_of(self.messages, first, self.users) if first else []
        return [*head, *self.messages[first:index], last]

    def place_of_mark(self, index: int, marked: Message | None) -> int | None:
        """Returns the position of message `index`'s mark in the row's text (characters).

        It is None unless the mark appears once and the rest of the text is unchanged. A mark in the name of a call may
        appear again behind it, in the answer to the call.
        """
        if marked is None:
            return None
        if index in self.places:
            return self.places[index]
        text = self.attempt([*self.messages[:index], marked, *self.messages[index + 1 :]]) or ""
        before, mark, behind = text.partition(self.mark)
        if marked.get("tool_calls"):
            behind = behind.replace(self.mark, "")
        return len(before) if mark and before + behind == self.text else None

    def behind_mark(self, index: int, marked: Message, *, prompt: bool = False) -> str | None:
        """Returns the text behind the mark if message `index` is the last, or None if the mark does not appear."""
        _, mark, behind = (self.attempt(self.up_to(index, marked), prompt=prompt) or "").partition(self.mark)
        return behind if mark else None

    @contextmanager
    def telling_calls(self, indices: list[int]) -> Iterator[None]:
        """Tells if the template leaves out calls of tools, where these messages are not found for that."""
        try:
            yield
        except RowProblem as problem:
            called = any(self.messages[i].get("tool_calls") for i in indices)
            if str(problem) == NO_WAY and called and NO_CALLS in left_out_of(self.messages, self.text):
                raise RowProblem(NO_CALLS) from problem
            raise

    def closed_end(self, start: int, end: int) -> int:
        """Returns `end` before the whitespace behind a special token that closes the text from `start` (characters)."""
        text = self.text[start:end].rstrip()
        return start + len(text) if text.endswith(self.special) else end

    def behind_special(self, place: int) -> int:
        """Returns the end of the special token at `place` or after whitespace there, or `place` if there is none."""
        start = place
        while self.text[start : start + 1].isspace():
            start += 1
        found = [len(token) for token in self.special if self.text.startswith(token, start)]
        return start + max(found) if found else place

    def body(self, start: int, end: int) -> str:
        """Returns the text from `start` to `end` without the special tokens and the whitespace that close it."""
        text = self.text[start:end].rstrip()
        while text.endswith(self.special):
            text = text[: -max(len(token) for token in self.special if text.endswith(token))].rstrip()
        return text

    def closes(self, index: int) -> bool:
        """Returns whether the template closes the turn of message `index` with a special token.

        The message is rendered as the last one: behind an earlier one the special token may be the next turn's.
        """
        long = index >= LONG
        closed = self.attempt(self.up_to(index, self.messages[index])) if long else self.beginning(index + 1)
        return closed is not None and closed.rstrip().endswith(self.special)


def _spans(row: ConversationText, turns: list[int], wanted: list[int]) -> list[Span]:
    """Returns the characters that the assistant writes in the turns `wanted`, some of its `turns` (message indices).

    Raises:
        RowProblem: if they cannot be found.
    """
    # The template's own blocks come first, but are checked: a block inside a `set` gets a wrong place.
    spans = _spans_by_template(row, turns, wanted)
    if spans and _hold_only_wanted(row, spans, wanted):
        return spans
    spans = [(start, end) for start, end in (turn_span(row, i) for i in wanted) if start < end]
    if spans and _hold_only_wanted(row, spans, wanted):
        return spans
    # Dropped and counted, never guessed.
    raise RowProblem(NO_WAY)


def _spans_by_template(row: ConversationText, turns: list[int], wanted: list[int]) -> list[Span] | None:
    """Returns the spans that the template itself marks as generated, or None if these are not the wanted turns."""
    spans = _generation_spans(row)
    if not spans or not _hold_words(row, spans, turns):
        return None
    if len(wanted) < len(turns):
        if len(spans) != len(turns):
            return None  # it is unknown which spans belong to the wanted turns
        spans = [spans[turns.index(i)] for i in wanted]
    # A block may end before the special token that the model has to learn to stop at.
    if row.closes(turns[-1]):
        spans = [(start, _with_closing(row, start, end)) for start, end in spans]
    spans = [(start, row.closed_end(start, end)) for start, end in spans]
    return [span for span in spans if span[0] < span[1]]


def _generation_spans(row: ConversationText) -> list[Span] | None:
    """Returns the characters inside `{% generation %}` blocks, or None if the template has none."""
    template = row.tokenizer.get_chat_template(tools=row.tools)
    if not _GENERATION.search(template):
        return None
    # Keys that are None are dropped, as apply_chat_template does; that function gives the mask by tokens only.
    messages = [{key: value for key, value in message.items() if value is not None} for message in row.messages]
    messages = prepared(messages, template, row.tokenizer)
    texts, spans = render_jinja_template(
        conversations=[messages],
        tools=row.tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **{**row.tokenizer.special_tokens_map, **row.arguments},
    )
    return _merge_touching(spans[0]) if texts == [row.text] else None


def _merge_touching(spans: list[Span]) -> list[Span]:
    """Sorts the spans and merges those that touch, because a template may write one turn in several blocks."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            start, end = joined[-1][0], max(end, joined.pop()[1])
        joined.append((start, end))
    return joined


def _hold_words(row: ConversationText, spans: list[Span], turns: list[int]) -> bool:
    """Returns whether each span holds the words of its turn, or of any turn if the template omitted some."""
    pieces = [row.body(start, end) for start, end in spans]
    messages = [row.messages[i] for i in turns]
    if len(pieces) == len(messages):
        return all(map(stands_in, messages, pieces))
    return all(any(stands_in(message, piece) for message in messages) for piece in pieces)


def _with_closing(row: ConversationText, start: int, end: int) -> int:
    """Returns the span's end, extended by the special token behind it unless the span has one (characters)."""
    closed = row.text[start:end].rstrip().endswith(row.special)
    return end if closed else row.behind_special(end)


def turn_span(row: ConversationText, index: int) -> Span:
    """Returns the characters that the assistant writes in the turn of message `index`.

    Raises:
        RowProblem: if they cannot be found.
    """
    # The usual case: the text begins with the conversation cut before this turn, and with that cut after it.
    start, end = row.shared(index, prompt=True), row.shared(index + 1)
    if start is not None and end is not None and stands_in(row.messages[index], row.body(start, end)):
        return start, row.closed_end(start, end)
    # The template writes this turn, or what comes before it, differently when more follows.
    # Qwen 3 drops the think block of earlier turns; Mistral 3 moves tools into the last user turn.
    place, end = _end_by_mark(row, index)
    if start is None:
        start = _start_by_mark(row, index)
    if start > place:
        raise RowProblem(NO_WAY)
    return start, end


def _words_span(row: ConversationText, index: int) -> Span:
    """Returns the characters of the words of message `index`, which is not the assistant's.

    Raises:
        RowProblem: if they cannot be found.
    """
    words, end = words_of(row.messages[index]), row.place_of_mark(index, mark_end(row.messages[index], row.mark))
    if end is None or not row.text.endswith(words, 0, end):
        raise RowProblem(NO_WAY)
    return end - len(words), end


def _end_by_mark(row: ConversationText, index: int) -> tuple[int, int]:
    """Returns where the words of message `index` end, and where its turn ends (characters).

    The turn ends as if it were the last one, or else at the special token behind its words.

    Raises:
        RowProblem: if neither is found.
    """
    message = row.messages[index]
    marked = mark_end(message, row.mark)
    place = row.place_of_mark(index, marked)
    if marked is None or place is None:
        raise RowProblem(NO_WAY)
    closing = row.behind_mark(index, marked)
    if closing is not None and row.text.startswith(closing, place):
        return place, row.closed_end(place, place + len(closing))
    if message.get("tool_calls"):
        raise RowProblem(NO_WAY)  # the rest of the calls is between the words and the special token
    return place, row.behind_special(place) if row.closes(index) else place


def _start_by_mark(row: ConversationText, index: int) -> int:
    """Returns where the turn of message `index` starts (characters): behind its generation prompt, or at its words.

    Raises:
        RowProblem: if neither can be found.
    """
    start = _prompt_end_by_mark(row, index)
    if start is None:
        start = _words_start_by_mark(row, index)
    if start is None:
        raise RowProblem(NO_WAY)
    return start


def _prompt_end_by_mark(row: ConversationText, index: int) -> int | None:
    """Returns the end of the generation prompt behind the words of the message before, or None if it is not there."""
    marked = mark_end(row.messages[index - 1], row.mark) if index > 0 else None
    place = row.place_of_mark(index - 1, marked)
    if marked is None or place is None:
        return None
    prompt = row.behind_mark(index - 1, marked, prompt=True)
    return place + len(prompt) if prompt is not None and row.text.startswith(prompt, place) else None


def _words_start_by_mark(row: ConversationText, index: int) -> int | None:
    """Returns where an assistant's first word would be in this turn, or None if the text before it differs."""
    words = {"role": row.messages[index]["role"], "content": row.mark}
    if index - 1 in row.places and index >= LONG:
        return _words_start_in_part(row, index, words)
    text = row.attempt([*row.messages[:index], words, *row.messages[index + 1 :]]) or ""
    before, mark, _ = text.partition(row.mark)
    return len(before) if mark and row.text.startswith(before) else None


def _words_start_in_part(row: ConversationText, index: int, words: Message) -> int | None:
    """Returns the same for a long conversation, from a part of it: between the words before and this turn's."""
    marked = mark_end(row.messages[index - 1], row.mark)
    assert marked is not None, "its place is known"
    part = [*row.up_to(index - 1, marked), words, *next_of(row.messages, index, row.users)]
    _, _, behind = (row.attempt(part) or "").partition(row.mark)
    between, mark, _ = behind.partition(row.mark)
    place = row.places[index - 1]
    return place + len(between) if mark and row.text.startswith(between, place) else None


def _hold_only_wanted(row: ConversationText, spans: list[Span], wanted: list[int]) -> bool:
    """Returns whether the spans are in order and hold nothing of messages other than `wanted`."""
    in_order = all(left[1] <= right[0] for left, right in pairwise(spans))
    others = [i for i, message in enumerate(row.messages) if i not in wanted and words_of(message)]
    return in_order and not _hold_others(row, spans, others)


def _hold_others(row: ConversationText, spans: list[Span], others: list[int]) -> bool:
    """Returns whether a span holds words of the messages `others`, that is a mark in their middle.

    If marks change the rest of the text (templates look into messages), the words themselves are searched.
    """
    messages = [mark_middle(m, row.mark) if i in others else m for i, m in enumerate(row.messages)]
    pieces = (row.attempt(messages) or "").split(row.mark)
    if "".join(pieces) != row.text:
        return any(words_of(row.messages[i]) in row.text[start:end] for i in others for start, end in spans)
    places = [(place, place + 1) for place in accumulate(map(len, pieces[:-1]))]
    return any(target_mask(spans, places))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Returns the ids of the tokenizer's special tokens, added ones included."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added.union(tokenizer.all_special_ids)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Returns the tokenizer's special tokens as text."""
    added = _added_special_tokens(tokenizer, len(tokenizer))
    return tuple(dict.fromkeys([*map(str, tokenizer.all_special_tokens), *added]))


@lru_cache(maxsize=4)  # there can be thousands, and every row needs them
def _added_special_tokens(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> tuple[str, ...]:
    """Returns the special tokens that were added to the vocabulary, now of `num_tokens` tokens."""
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
