"""Encodes examples as documents: token ids, and which of them are targets."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from transformers import PreTrainedTokenizerBase

from toolkit.data.documents.byte_tokens import ByteTokens
from toolkit.data.images.images import Images, parse
from toolkit.data.layouts.layout import Layout
from toolkit.data.layouts.left_out import NO_CALLS, NO_TOOLS, left_out_of
from toolkit.data.layouts.messages import ONLY_ASSISTANTS, Span, without
from toolkit.data.layouts.template_arguments import date_of, note_of, require_taken, takes_tools
from toolkit.data.layouts.thoughts import THOUGHTS
from toolkit.data.rows.examples import Answer, Conversation, Example, Message, Text
from toolkit.data.rows.image_places import MARK, PLACE, WITH_IMAGES
from toolkit.data.rows.readers import Row
from toolkit.data.rows.values import RowProblem
from toolkit.data.templates.chat import GREETING, Rendered, Targets, Turn, render
from toolkit.data.templates.masks import PLAIN, holds_prompt, spans_array, target_mask
from toolkit.data.templates.stops import NextTurn, end_texts, next_turn_of
from toolkit.data.templates.templates import template_that
from toolkit.errors import DataError
from toolkit.recipe.objectives.registry import SPECS

NOTE_END = "; "
"""Separator of two notes about a row."""

EACH_TURN: Final = "each_turn"
"""`data.targets` for a text of each answer, even where one text would have them all."""

NOT_ONCE = "a message with train_detail is not in the rendered text exactly once"

JOINED = "the beginning of an answer and the end of its prompt are one token"

ENDS_INSIDE = "an answer holds {}, which ends it: the model learns to stop there"

VERBATIM = "a prompt is text, which is learned without the chat template, and asked with it: write messages"

EMPTY = "an answer is empty: the model learns to say nothing"

EMPTY_THOUGHT = "an empty thought before an answer is learned: enable_thinking: false may write it into the prompt"
NO_THOUGHT = re.compile(r"\s*(<think>)?\s*</think>")
"""The beginning of an answer with an empty thought, of which the prompt may have the mark that opens it."""

DEVELOPER = "developer is written as system: the chat template has no developer role"

Document = dict[str, Any]
"""A row of `FEATURES` and of the encoder's own columns, without its shard."""

STARTS_OF_IMAGES = "picture_starts"
"""Column of rows of several pieces, such as pairs: the first token of the piece that each image is in."""

_Numbers = Sequence[int] | np.ndarray[Any, Any]

_Tokens = tuple[_Numbers, _Numbers, list[int]]
"""Tokens of a text, which of them are targets, and the number of the first one of each answer."""

ColumnType = str | list[str]
"""Name of a type as `datasets` has it, or a list of one. Plans have no need of `datasets`: 0.4 s of CPU."""

Columns = dict[str, tuple[ColumnType, Any]]
"""Column -> its type, and its value for a row that cannot be used."""

# Given, not inferred: a column that begins with nulls, such as `problem`, would become a column of nulls.
FEATURES: dict[str, ColumnType] = {
    "input_ids": ["int32"],
    "targets": ["bool"],
    "length": "int32",
    "num_targets": "int32",
    "problem": "string",
    "note": "string",
    "digest": "int64",
}


@dataclass(frozen=True)
class _Prepared:
    """Text to tokenise: what is learned, whether begin and end of text are added, and what was left out.

    `starts` are the characters where learned answers begin, each after its prompt; `example` is their conversation.
    """

    text: str
    spans: list[Span]
    whole: bool
    note: str | None = None
    images: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    example: Conversation | None = None


@dataclass(frozen=True)
class _Turns:
    """Answers to tokenise, each after its prompt in a text of its own."""

    texts: list[_Prepared]
    note: str | None


@dataclass(frozen=True)
class Encoder:
    """Encodes rows with one tokenizer: those of text, answers and conversations. Other kinds of rows derive theirs.

    Attributes:
        own: the columns that documents of the kind have, see `columns`.
        many_pieces: whether a document holds several pieces, which each see images of their own.
        targets: what is learned of a conversation, or of a prompt and its completion.
        objective: `objective.kind` of the recipe.
        bos_id: the token that is added before plain text, or None if no BOS token is added.
        truncate_to: tokens to which a text to classify, or a source, is cut, special tokens kept; None for no cut.
        next_turn: ends answers that the chat template does not end, or None if it ends them.
        images: reads the images of conversations, or None if rows have none.
        image_root: folder that the paths of images start from.
        image_tokens: tokens that the model replaces by image features, where no images are read.
    """

    own: ClassVar[Columns] = {}
    many_pieces: ClassVar[bool] = False

    tokenizer: PreTrainedTokenizerBase
    targets: Targets = "assistant"
    objective: str = "causal_lm"
    truncate_to: int | None = None
    bos_id: int | None = None
    next_turn: NextTurn | None = None
    images: Images | None = None
    image_root: Path | None = None
    image_tokens: frozenset[int] = frozenset()

    @property
    def columns(self) -> Columns:
        """Columns of its documents besides `FEATURES`: the type of each, and its value for a row that cannot be used.

        `pictures` are the records of a row's images, in the order of their places. `ends` are one after the last token
        of each of its samples, if each answer is one, else none; `length` is the longest one's then.
        """
        strings: ColumnType = ["string"]
        numbers: ColumnType = ["int32"]
        images: Columns = {} if self.images is None else {"pictures": (strings, [])}
        if images and (self.many_pieces or self.makes_turns):
            images[STARTS_OF_IMAGES] = (numbers, [])
        return {**self.own, **images, **({"ends": (numbers, [])} if self.makes_turns else {})}

    @property
    def makes_turns(self) -> bool:
        """Whether a document can have several samples, one for each answer."""
        spec = SPECS[self.objective]
        return self.targets in ("assistant", EACH_TURN) and spec.predicts_next_tokens and not spec.samples_itself

    def key(self, layout: Layout) -> list[Any]:
        """Returns what decides the documents of rows besides the tokenizer and the layout."""
        day = date_of(self.tokenizer) if layout.may_have_conversations else None  # most templates write none
        return [
            [self.targets, self.truncate_to, self.objective, self.bos_id],
            *self.own_key(layout),
            *([] if day is None else [str(day)]),
            *([] if self.next_turn is None else [astuple(self.next_turn)]),
        ]

    def own_key(self, layout: Layout) -> list[Any]:
        """Returns the part of the key that few rows have."""
        # A run that learned these prompts as text, or answers after other prompts, must not resume.
        templated = ["templated"] if layout.templated else []
        if not layout.may_have_conversations or self.targets in ("all", EACH_TURN):
            return templated
        spec = SPECS[self.objective]
        if spec.compares_answers:
            return [*templated, *(["prompted"] if self._needs_turns(TRIALS[:2]) else [])]
        # Blocks of a template decided what is learned until version 0.2.
        has_blocks = "endgeneration" in str(getattr(self.tokenizer, "chat_template", None))
        apart = self.makes_turns and (has_blocks or self._needs_turns(TRIALS))
        return [*templated, *(["apart"] if apart else [])]

    def _needs_turns(self, trials: Sequence[Conversation]) -> bool:
        """Returns whether the chat template needs a text of its own for an answer of these conversations."""
        if not getattr(self.tokenizer, "chat_template", None):
            return False
        plain = Encoder(self.tokenizer, next_turn=self.next_turn)
        return any(document.get("ends") for document in plain.encode(trials))

    def documents(self, rows: list[Row], layout: Layout) -> list[Document]:
        """Returns a document for each row; that of a row that cannot be used has a reason instead of tokens."""
        read = [_result_or_problem(layout.read, row) for row in rows]
        documents = self.encode([item if isinstance(item, RowProblem) else item[0] for item in read])
        for document, item in zip(documents, read, strict=True):
            if document["problem"] is None and (unread := item[1]):
                document["note"] = joined_notes([document["note"], *unread])
            elif document["problem"] == NO_CALLS and (name := self._template_for(item[0])) is not None:
                document["problem"] = f"{NO_CALLS} (data.chat_template={name} writes them)"
        blank = {name: value for name, (_, value) in self.columns.items()}
        return [{**blank, **document} for document in documents]

    def _template_for(self, example: Example) -> str | None:
        """Returns the template of ours with which a row can be used, tried on the row itself; None without one."""

        def helps(tokenizer: PreTrainedTokenizerBase) -> bool:
            other = replace(self, tokenizer=tokenizer, next_turn=next_turn_of(tokenizer))
            return other.encode([example])[0]["problem"] is None

        return template_that(helps, self.tokenizer)

    def _prepare_example(self, example: Example) -> _Prepared | _Turns | RowProblem:
        if isinstance(example, Conversation):
            found: _Prepared | _Turns | RowProblem = _result_or_problem(self._conversation, example)
            return found
        if isinstance(example, Answer):
            text = example.prompt + example.completion
            start = 0 if self.targets == "all" else len(example.prompt)
            asked_with_template = SPECS[self.objective].predicts_next_tokens and self.tokenizer.chat_template
            return _Prepared(text, [(start, len(text))], whole=True, note=VERBATIM if asked_with_template else None)
        assert isinstance(example, Text)
        return _Prepared(example.text, [(0, len(example.text))], whole=True)

    def _messages_for_template(self, example: Conversation) -> tuple[list[Message], list[str]]:
        """Returns the messages as the template takes them, and notes about it; raises RowProblem."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise RowProblem("a conversation, and the tokenizer has no chat template (data.chat_template)")
        template = self.tokenizer.get_chat_template(tools=example.tools)
        messages, notes = example.messages, list(example.notes)
        if self.targets == "all":
            notes = [note for note in notes if not note.endswith(ONLY_ASSISTANTS)]
        if example.arguments:
            require_taken(example.arguments, template)
            notes.append(note_of(example.arguments))
        if not example.images and any(MARK in (message.get("content") or "") for message in messages):
            notes.append(f"{MARK} is in the words of a row without images, and is read as text")
        notes += notes_of_template(messages, example.tools, template)
        if any(_is_empty_answer(message) for i, message in enumerate(messages) if i not in example.unlearned):
            notes.append(EMPTY)
        answers = [message["content"] or "" for message in messages if message["role"] == "assistant"]
        notes += [ENDS_INSIDE.format(end) for end in self._ends if any(end in answer for answer in answers)]
        if self.images is not None and example.images:
            messages = [{**message, WITH_IMAGES: self.images.token} for message in messages]
        return messages, notes

    @cached_property
    def _ends(self) -> list[str]:
        return end_texts(self.tokenizer)

    def _conversation(self, example: Conversation, targets: Targets | None = None) -> _Prepared | _Turns:
        """Renders a conversation; raises RowProblem."""
        targets = targets or self.targets
        messages, notes = self._messages_for_template(example)
        unlearned = example.unlearned
        if targets != "all":
            unlearned |= frozenset(range(example.num_asked))
        # A reward model is asked nothing: it reads a conversation as the template writes it.
        is_asked = SPECS[self.objective].predicts_next_tokens
        found = render(self.tokenizer, messages, example.tools, targets, unlearned, example.arguments, is_asked)
        notes += [GREETING] if found.greets else []
        if found.turns is not None:
            return self._in_turns(example, messages, notes, found.turns)
        return self._in_one_text(example, messages, notes, found, targets != "all" and is_asked)

    def _in_one_text(
        self, example: Conversation, messages: list[Message], notes: list[str], found: Rendered, is_asked: bool
    ) -> _Prepared:
        text, spans = found.text, found.spans
        starts = [start for start, _ in spans if start] if is_asked else []
        if self.next_turn is not None:
            text, spans = self.next_turn.stopped(text, spans, messages)
        spans = without([span for span in spans if span[0] < span[1]], _parts_in(text, messages, example.parts))
        notes += [EMPTY_THOUGHT] * any(NO_THOUGHT.match(text, *span) for span in spans)
        note = joined_notes([*notes, *left_out_of(messages, text, example.tools)])
        if not example.images:
            return _Prepared(text, spans, False, note, starts=tuple(starts), example=example)
        assert self.images is not None
        assert self.image_root is not None
        shown = self.images.expanded(text, spans, example.images, self.image_root)
        return _Prepared(shown.text, shown.spans, False, note, shown.records)

    def _in_turns(self, example: Conversation, messages: list[Message], notes: list[str], turns: list[Turn]) -> _Turns:
        if (following := self.next_turn) is not None:
            turns = [replace(turn, written=turn.written + following.stop(messages, turn.index)) for turn in turns]
        own, last = {turn.index for turn in turns}, turns[-1]
        before = [message for i, message in enumerate(messages[: last.index]) if i not in own]
        notes += left_out_of(before, last.prompt, example.tools)
        notes += [EMPTY_THOUGHT] * any(NO_THOUGHT.match(turn.written) for turn in turns)
        notes += [note for turn in turns for note in left_out_of([messages[turn.index]], turn.written)]
        texts = [self._prepared_turn(turn, example, messages) for turn in turns]
        return _Turns(texts, joined_notes(notes))

    def _prepared_turn(self, turn: Turn, example: Conversation, messages: list[Message]) -> _Prepared:
        parts = {turn.index: example.parts[turn.index]} if turn.index in example.parts else {}
        prompt, records = self._shown(turn.prompt, example, messages[: turn.index])
        learned = without([(0, len(turn.written))], _parts_in(turn.written, messages, parts))
        spans = [(len(prompt) + start, len(prompt) + end) for start, end in learned]
        return _Prepared(prompt + turn.written, spans, False, images=tuple(records), starts=(len(prompt),))

    def _shown(self, prompt: str, example: Conversation, before: list[Message]) -> tuple[str, list[str]]:
        """Returns the prompt with the images of the messages before an answer expanded, and their records."""
        if self.images is None or not example.images:
            return prompt, []
        assert self.image_root is not None
        count = sum((message["content"] or "").count(PLACE) for message in before)
        found = self.images.expanded(prompt, [], example.images[:count], self.image_root)
        return found.text, list(found.records)

    def _document_of_turns(self, item: _Turns, tokens: Iterable[_Tokens]) -> Document:
        """Returns a document of all answers, each after its prompt; raises RowProblem."""
        ids: list[int] = []
        targets: list[bool] = []
        pieces, ends = [], []
        for text, (together, mask, firsts) in zip(item.texts, tokens, strict=True):
            of_turn, learned = list(together), list(mask)
            if not holds_prompt(self.tokenizer, text.text[: text.starts[0]], of_turn[: firsts[0]]):
                of_turn, learned = _tokens_apart(self.tokenizer, text, of_turn)
            self._require_places(of_turn, text.images)
            pieces.append((len(ids), list(text.images)))
            ids, targets = ids + of_turn, targets + learned
            ends.append(len(ids))
        images = with_images(pieces)
        document = {**document_of(ids, targets, digests_of(images)), "note": item.note}
        if not self.makes_turns:
            return {**document, **{name: value for name, value in images.items() if name != STARTS_OF_IMAGES}}
        # A conversation is as long as its longest sample: the last one, unless it omits thoughts of earlier turns.
        return {**document, **images, "length": int(np.diff([0, *ends]).max()), "ends": ends}

    def _require_places(self, ids: _Numbers, records: Sequence[str]) -> None:
        """Raises RowProblem if tokens stand for an image and there is none."""
        image_tokens = self.images.token_ids if self.images is not None else self.image_tokens
        if not records and image_tokens and not image_tokens.isdisjoint(np.asarray(ids).tolist()):
            raise RowProblem("the text contains the model's image token, but the row has no image")

    def _document_of_text(self, item: _Prepared, tokens: _Numbers, targets: _Numbers, firsts: list[int]) -> Document:
        """Returns the document of a text; `firsts` are the numbers of the first token of each of its `starts`."""
        for start, first in zip(item.starts, firsts, strict=True):
            if not holds_prompt(self.tokenizer, item.text[:start], tokens[:first]):
                document: Document | RowProblem = _result_or_problem(self._apart, item.example)
                return unusable(document) if isinstance(document, RowProblem) else document
        bos, eos = self.bos_id, self.tokenizer.eos_token_id
        ids, learned = np.asarray(tokens, dtype=np.int32), np.array(targets, dtype=bool)
        # The text may have the token already.
        if item.whole and bos is not None and ids[:1].tolist() != [bos]:
            ids, learned = np.insert(ids, 0, bos), np.insert(learned, 0, False)
        if item.whole and eos is not None and ids[-1:].tolist() != [eos]:
            ids, learned = np.append(ids, eos), np.append(learned, True)
        try:
            self._require_places(ids, item.images)
        except RowProblem as problem:
            return unusable(problem)
        learned[:1] = False  # nothing precedes the first token
        images = with_images([(0, list(item.images))])
        if not self.makes_turns:
            images.pop(STARTS_OF_IMAGES, None)
        return {**document_of(ids, learned, digests_of(images)), "note": item.note, **images}

    def _apart(self, example: Conversation) -> Document:
        """Returns the document of a conversation in whose text a prompt has other tokens than alone."""
        wanted = "last_turn" if self.targets == "last_turn" else EACH_TURN
        if wanted == "last_turn":
            last = max(i for i, message in enumerate(example.messages) if message["role"] == "assistant")
            example = replace(example, unlearned=example.unlearned | frozenset(range(last)))
        item = self._conversation(example, EACH_TURN)
        assert isinstance(item, _Turns)
        return self._document_of_turns(item, _tokens(self.tokenizer, item.texts))

    def encode(self, examples: Sequence[Example | RowProblem]) -> list[Document]:
        """Returns a document for each example, without `columns` that have the value of a row that cannot be used."""
        prepared = [item if isinstance(item, RowProblem) else self._prepare_example(item) for item in examples]
        return self._encode(prepared)

    def _encode(self, prepared: list[_Prepared | _Turns | RowProblem]) -> list[Document]:
        items = [item for item in prepared if not isinstance(item, RowProblem)]
        texts = [text for item in items for text in (item.texts if isinstance(item, _Turns) else [item])]
        tokens = _tokens(self.tokenizer, texts)
        return [self._document(item, tokens) for item in prepared]

    def _document(self, item: _Prepared | _Turns | RowProblem, tokens: Iterator[_Tokens]) -> Document:
        """Returns the document of an item, whose tokens are the next ones."""
        if isinstance(item, _Prepared):
            return self._document_of_text(item, *next(tokens))
        if isinstance(item, _Turns):
            of_item = list(islice(tokens, len(item.texts)))
            item = _result_or_problem(lambda turns: self._document_of_turns(turns, of_item), item)
        return unusable(item) if isinstance(item, RowProblem) else item  # type: ignore[return-value]


def _tokens_apart(
    tokenizer: PreTrainedTokenizerBase, item: _Prepared, together: list[int]
) -> tuple[list[int], list[bool]]:
    """Returns the tokens of an answer after those of its prompt, which a server encodes alone.

    Line ends of both may become one token, for example.

    Raises:
        RowProblem: if they are not the tokens of the text.
    """
    start = item.starts[0]
    prompt = tokenizer(item.text[:start], **PLAIN)["input_ids"]
    answer = tokenizer(item.text[start:], return_offsets_mapping=True, **PLAIN)
    ids = [*prompt, *answer["input_ids"]]
    if tokenizer.decode(ids) != tokenizer.decode(together):
        raise RowProblem(JOINED)
    offsets = np.vstack([[[0, 0]] * len(prompt), spans_array(answer["offset_mapping"]) + start])
    return ids, target_mask(item.spans, offsets)


def _tokens(tokenizer: PreTrainedTokenizerBase, prepared: list[_Prepared]) -> Iterator[_Tokens]:
    """Yields the tokens of each text."""
    counted = _by_bytes(tokenizer, prepared)
    offsets = _by_offsets(tokenizer, [item for item, found in zip(prepared, counted, strict=True) if not found])
    for found in counted:
        yield found or next(offsets)


def _by_bytes(tokenizer: PreTrainedTokenizerBase, prepared: list[_Prepared]) -> list[_Tokens | None]:
    """Returns the tokens of each text, or None for one whose targets only offsets can tell."""
    counting = ByteTokens.of(tokenizer)
    if counting is None:
        return [None] * len(prepared)
    found: list[_Tokens | None] = []
    for item, ids in zip(prepared, counting.encode([item.text for item in prepared]), strict=True):
        edges = sorted({*item.starts, *(edge for span in item.spans for edge in span)})
        places = counting.places(item.text, ids, edges)
        if places is None:
            found.append(None)
            continue
        token_at = dict(zip(edges, places.tolist(), strict=True))
        mask = np.zeros(len(ids), dtype=bool)
        for start, end in item.spans:
            mask[token_at[start] : token_at[end]] = True
        found.append((ids, mask, [token_at[start] for start in item.starts]))
    return found


def _by_offsets(tokenizer: PreTrainedTokenizerBase, prepared: list[_Prepared]) -> Iterator[_Tokens]:
    if not prepared:
        return
    # Text that is learned whole needs no offsets, so it works with tokenizers that cannot give them.
    needs_offsets = any(item.spans != [(0, len(item.text))] for item in prepared)
    if needs_offsets and not tokenizer.is_fast:
        raise DataError(
            f"model.tokenizer: {type(tokenizer).__name__} does not report where in the text its tokens are, "
            "so the assistant's cannot be marked; use a model with a fast tokenizer, or data.targets=all"
        )
    encoded = tokenizer([item.text for item in prepared], return_offsets_mapping=needs_offsets, **PLAIN)
    if not needs_offsets:
        yield from ((ids, [True] * len(ids), []) for ids in encoded["input_ids"])
        return
    for item, ids, pairs in zip(prepared, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        offsets = spans_array(pairs)
        # White space, to which a tokenizer that trims offsets gives an empty span at its end, begins before that.
        begins = np.minimum(offsets[:, 0], offsets[:, 1] - 1)
        mask, firsts = target_mask(item.spans, offsets), np.searchsorted(begins, item.starts).tolist()
        for start, first in zip(item.starts, firsts, strict=True):
            # The prompt's last token may take the white space after it, as Phi 3's `<|assistant|>` does.
            if first and offsets[first - 1, 1] > start:
                mask[first - 1] = False
        yield ids, mask, firsts


_ASKED: list[Message] = [
    {"role": "user", "content": "What is three plus four?"},
    {"role": "assistant", "content": "Seven."},
]
_THOUGHT: Message = {"role": "assistant", "content": "Five.", THOUGHTS: "I count on."}
_CALL = {"type": "function", "id": "a1b2c3d4e", "function": {"name": "add", "arguments": {"a": 3}}}
_CALLED: list[Message] = [
    _ASKED[0],
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "a1b2c3d4e", "content": "7"},
    _ASKED[1],
]
TRIALS = [
    Conversation(_ASKED),
    Conversation([{"role": "system", "content": "Be brief."}, *_ASKED]),
    Conversation([*_ASKED, *_ASKED]),
    Conversation([_ASKED[0], _THOUGHT, _ASKED[0], _THOUGHT]),
    Conversation([*_CALLED, *_ASKED]),
]
"""Conversations that show whether a chat template lets all answers be in one text."""


def _parts_in(text: str, messages: list[Message], parts: dict[int, tuple[Span, ...]]) -> list[Span]:
    """Returns the places of parts of messages in a text (characters).

    Raises:
        RowProblem: if a message with parts is not in the text exactly once, word for word.
    """
    found = []
    for number, spans in parts.items():
        words = messages[number]["content"]
        if text.count(words) != 1:
            raise RowProblem(NOT_ONCE)
        found += [(text.index(words) + start, text.index(words) + end) for start, end in spans]
    return found


def notes_of_template(messages: list[Message], tools: list[dict[str, Any]] | None, template: str) -> list[str]:
    """Returns notes about a chat template that takes no tools, or has no developer."""
    notes = [NO_TOOLS] if tools and not takes_tools(template) else []
    is_read = "developer" in template or all(message["role"] != "developer" for message in messages)
    return notes if is_read else [*notes, DEVELOPER]


def document_of(ids: _Numbers, targets: _Numbers, label: str = "", num_targets: int | None = None) -> Document:
    """Returns a document, with arrays of `ids` and `targets`.

    Args:
        label: what is learned of the row besides its tokens, by which rows with the same tokens differ.
        num_targets: the number of targets if `targets` are something else.
    """
    # Eight bytes, which the int64 column of `FEATURES` holds.
    input_ids = np.asarray(ids, dtype=np.int32)
    learned = np.asarray(targets, dtype=bool if num_targets is None else np.uint8)
    content = hashlib.blake2b(input_ids.tobytes(), digest_size=8)
    content.update(label.encode())
    num_targets = int(learned.sum()) if num_targets is None else num_targets
    return {
        "input_ids": input_ids,
        "targets": learned,
        "length": len(ids),
        "num_targets": num_targets,
        "problem": None if num_targets else "nothing to learn",
        "note": None,
        "digest": int.from_bytes(content.digest(), signed=True),
    }


def with_images(pieces: Sequence[tuple[int, list[str]]]) -> Document:
    """Returns the columns of images of a document, given the first token and the records of each of its pieces.

    They are empty without images.
    """
    starts = [start for start, records in pieces for _ in records]
    found = [record for _, records in pieces for record in records]
    return {"pictures": found, STARTS_OF_IMAGES: starts} if found else {}


def records_of(document: Document, start: int | None) -> list[dict[str, Any]]:
    """Returns the records of a document's images, or those of its piece that begins with token `start`."""
    records = parse(document["pictures"])
    if start is None or STARTS_OF_IMAGES not in document:
        return records
    return [record for record, first in zip(records, document[STARTS_OF_IMAGES], strict=True) if first == start]


def digests_of(images: Document) -> str:
    """Returns the digests of a document's images, one after the other."""
    return "".join(json.loads(record)["digest"] for record in images.get("pictures", ()))


def _is_empty_answer(message: Message) -> bool:
    is_silent = not (message["content"] or "").strip() and not message.get("tool_calls")
    return message["role"] == "assistant" and is_silent and not message.get(THOUGHTS)


def joined_notes(notes: Iterable[str | None]) -> str | None:
    """Joins notes about a row into one text, each once; None if there are none. `notes_in` splits them."""
    each = (note for text in notes if text for note in notes_in(text))
    return NOTE_END.join(dict.fromkeys(each)) or None


def notes_in(text: str) -> list[str]:
    """Splits the notes about a row."""
    return text.split(NOTE_END)


def unusable(problem: RowProblem | Example) -> Document:
    """Returns the document of a row that cannot be used."""
    return {**document_of([], []), "problem": str(problem)}


def _result_or_problem(action: Any, value: Any) -> Any:
    """Returns the result of `action` on a value, or the problem that it raises."""
    try:
        return action(value)
    except RowProblem as problem:
        return problem
