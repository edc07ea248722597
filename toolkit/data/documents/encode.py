"""Encodes examples as documents: token ids, and which of them are targets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from toolkit.data.documents.byte_tokens import ByteTokens
from toolkit.data.images.images import Images, parse
from toolkit.data.layouts.layout import Layout
from toolkit.data.layouts.messages import ONLY_ASSISTANTS, left_out_of
from toolkit.data.layouts.row_flags import Span, without
from toolkit.data.layouts.template_arguments import date_of, note_of, require_taken, takes_tools
from toolkit.data.layouts.thoughts import THOUGHTS, left_out
from toolkit.data.rows.examples import Answer, Conversation, Example, Message, Text
from toolkit.data.rows.image_places import MARK, PLACE, WITH_IMAGES
from toolkit.data.rows.readers import Row
from toolkit.data.rows.values import RowProblem
from toolkit.data.templates.chat import ALL_UNLEARNED, Targets, render, spans_array, special_ids, target_mask
from toolkit.data.templates.stops import NextTurn, end_texts
from toolkit.data.templates.turns import (
    ASKED_OTHERWISE,
    GREETING,
    OF_EARLIER_TURNS,
    OTHER_PROMPT,
    Turn,
    encode_turns,
    has_thoughts_at_inference,
    is_asked_otherwise,
    parts_in,
    parts_in_turn,
    turns_of,
)
from toolkit.errors import DataError, first_line
from toolkit.recipe.objectives.registry import SPECS

NOTE_END = "; "
"""Separator of two notes about a row."""

EACH_TURN: Final = "each_turn"
"""`data.targets` for a sample of each answer."""

NO_TOOLS = "the chat template leaves out tools"

ENDS_INSIDE = "an answer holds {}, which ends it: the model learns to stop there"

VERBATIM = "a prompt is text, which is learned without the chat template, and asked with it: write messages"

EMPTY = "an answer is empty: the model learns to say nothing"

DEVELOPER = "developer is written as system: the chat template has no developer role"

Document = dict[str, Any]
"""A row of `FEATURES` and of the encoder's own columns, without its shard."""

STARTS_OF_IMAGES = "picture_starts"
"""Column of rows of several pieces, such as pairs: the first token of the piece that each image is in."""

_Numbers = Sequence[int] | np.ndarray[Any, Any]

_Tokens = tuple[_Numbers, _Numbers, bool]
"""Tokens of a text, which of them are targets, and whether a token begins where each answer does."""

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

    `starts` are the characters where learned answers begin, each behind a generation prompt.
    """

    text: str
    spans: list[tuple[int, int]]
    whole: bool
    note: str | None = None
    images: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Turns:
    """Answers to tokenise, each with what comes before it, its parts that are not learned, and records of images."""

    turns: list[Turn]
    cuts: list[list[Span]]
    note: str | None
    images: list[list[str]]


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
    targets: Targets | Literal["each_turn"] = "assistant"
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
        of each of its samples, if each answer is one; `length` is the longest one's then.
        """
        strings: ColumnType = ["string"]
        numbers: ColumnType = ["int32"]
        images: Columns = {} if self.images is None else {"pictures": (strings, [])}
        if images and (self.many_pieces or self.targets == EACH_TURN):
            images[STARTS_OF_IMAGES] = (numbers, [])
        return {**self.own, **images, **({"ends": (numbers, [0])} if self.targets == EACH_TURN else {})}

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
        # A run that learned these prompts as text, or answers behind other prompts, must not resume.
        prompted = SPECS[self.objective].compares_answers and is_asked_otherwise(self.tokenizer)
        return [*(["templated"] if layout.templated else []), *(["prompted"] if prompted else [])]

    def documents(self, rows: list[Row], layout: Layout) -> list[Document]:
        """Returns a document for each row; that of a row that cannot be used has a reason instead of tokens."""
        read = [_result_or_problem(layout.read, row) for row in rows]
        documents = self._documents_or_data_error([item if isinstance(item, RowProblem) else item[0] for item in read])
        for document, item in zip(documents, read, strict=True):
            if document["problem"] is None and (unread := item[1]):
                document["note"] = joined_notes([document["note"], *unread])
        blank = {name: value for name, (_, value) in self.columns.items()}
        return [{**blank, **document} for document in documents]

    def _documents_or_data_error(self, examples: list[Example | RowProblem]) -> list[Document]:
        """Runs `encode`; a panic of a tokenizer's Rust code, as for an endless expression, is a DataError."""
        try:
            return self.encode(examples)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # its class is not exported, and is not an Exception
                raise
            raise DataError(
                f"model.tokenizer: the tokenizer of {self.tokenizer.name_or_path!r} cannot read a row: "
                f"{first_line(error)}; correct its tokenizer.json, or name another one"
            ) from None

    def _prepare_example(self, example: Example) -> _Prepared | _Turns | RowProblem:
        if isinstance(example, Conversation):
            in_turns = self.targets == EACH_TURN
            found: _Prepared | _Turns | RowProblem
            found = _result_or_problem(self._rendered_by_turn if in_turns else self._render_conversation, example)
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
        if example.tools and not takes_tools(template):
            notes.append(NO_TOOLS)
        if not example.images and any(MARK in (message.get("content") or "") for message in messages):
            notes.append(f"{MARK} stands in the words of a row without images, and is read as text")
        if "developer" not in template and any(message["role"] == "developer" for message in messages):
            notes.append(DEVELOPER)
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

    @cached_property
    def _special(self) -> set[int]:
        return special_ids(self.tokenizer)

    def _render_conversation(self, example: Conversation) -> _Prepared | _Turns:
        messages, notes = self._messages_for_template(example)
        assert self.targets != EACH_TURN
        unlearned = example.unlearned
        if self.targets != "all":
            unlearned |= frozenset(range(example.num_asked))
        rendered = render(self.tokenizer, messages, example.tools, self.targets, unlearned, example.arguments)
        spec = SPECS[self.objective]
        # A reward model is asked nothing: it reads a conversation as the template writes it.
        prompted = rendered.prompted or not spec.predicts_next_tokens
        if not prompted and spec.compares_answers:
            # Otherwise one half of a pair could stand behind another prompt than the other.
            return self._rendered_by_turn(example)
        text, spans = rendered.text, rendered.spans
        starts = tuple(start for start, _ in spans if start) if prompted and self.targets != "all" else ()
        if self.next_turn is not None:
            text, spans = self.next_turn.stopped(text, spans, messages)
        spans = without(spans, parts_in(text, messages, example.parts))
        notes += left_out_of(messages, text)
        if not prompted:
            notes.append(OTHER_PROMPT)
        left = left_out(messages, text)
        if example.images:
            assert self.images is not None
            assert self.image_root is not None
            shown = self.images.expanded(text, spans, example.images, self.image_root)
            return _Prepared(shown.text, shown.spans, False, joined_notes([*notes, *left]), shown.records)
        if left and has_thoughts_at_inference(self.tokenizer, messages, example.tools, example.arguments, text):
            left = [f"{note} {OF_EARLIER_TURNS}" for note in left]
        return _Prepared(text, spans, False, joined_notes([*notes, *left]), starts=starts)

    def _rendered_by_turn(self, example: Conversation) -> _Turns:
        messages, notes = self._messages_for_template(example)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [i for i in answers if i not in example.unlearned and i >= example.num_asked]
        wanted = wanted if self.targets == EACH_TURN else wanted[-1:]
        turns = turns_of(self.tokenizer, messages, example.tools, wanted, example.arguments)
        if not turns:
            raise RowProblem(ALL_UNLEARNED)
        if (following := self.next_turn) is not None:
            turns = [replace(turn, written=turn.written + following.stop(messages, turn.index)) for turn in turns]
        if wanted[0] == 0:
            notes.append(GREETING)
        notes += left_out_of(messages[: turns[-1].index], turns[-1].prompt)
        cuts = [
            parts_in_turn(turn, messages[turn.index], example.parts[turn.index]) if turn.index in example.parts else []
            for turn in turns
        ]
        left = [note for turn in turns for note in left_out([messages[turn.index]], turn.written)]
        shown = [self._shown(turn.prompt, example, messages[: turn.index]) for turn in turns]
        turns = [replace(turn, prompt=prompt) for turn, (prompt, _) in zip(turns, shown, strict=True)]
        return _Turns(turns, cuts, joined_notes([*notes, *left]), [records for _, records in shown])

    def _shown(self, prompt: str, example: Conversation, before: list[Message]) -> tuple[str, list[str]]:
        """Returns the prompt with the images of the messages before an answer expanded, and their records."""
        if self.images is None or not example.images:
            return prompt, []
        assert self.image_root is not None
        count = sum((message["content"] or "").count(PLACE) for message in before)
        found = self.images.expanded(prompt, [], example.images[:count], self.image_root)
        return found.text, list(found.records)

    def _encode_turns(self, item: _Turns) -> Document:
        """Returns a document of all answers, each behind what comes before it; raises RowProblem."""
        found = encode_turns(self.tokenizer, item.turns, item.cuts)
        # A conversation is as long as its longest sample: the last one, unless it omits thoughts of earlier turns.
        length = int(np.diff([0, *found.ends]).max())
        starts = [0, *found.ends[:-1]]
        for start, end, records in zip(starts, found.ends, item.images, strict=True):
            self._require_places(found.ids[start:end], records)
        images = with_images(list(zip(starts, item.images, strict=True)))
        document = {**document_of(found.ids, found.targets, digests_of(images)), "length": length, "note": item.note}
        if self.targets == EACH_TURN:
            return {**document, **images, "ends": found.ends}
        return {**document, **{name: value for name, value in images.items() if name != STARTS_OF_IMAGES}}

    def _require_places(self, ids: _Numbers, records: Sequence[str]) -> None:
        """Raises RowProblem if tokens stand for an image and there is none."""
        image_tokens = self.images.token_ids if self.images is not None else self.image_tokens
        if not records and image_tokens and not image_tokens.isdisjoint(np.asarray(ids).tolist()):
            raise RowProblem("the text contains the model's image token, but the row has no image")

    def _encode(self, prepared: list[_Prepared]) -> list[Document]:
        if not prepared:
            return []
        counted = self._by_bytes(prepared)
        offsets = iter(self._by_offsets([item for item, found in zip(prepared, counted, strict=True) if not found]))
        return [self._document(item, *(found or next(offsets))) for item, found in zip(prepared, counted, strict=True)]

    def _by_bytes(self, prepared: list[_Prepared]) -> list[_Tokens | None]:
        """Returns the tokens of each text, or None for one whose targets only offsets can tell."""
        counting = ByteTokens.of(self.tokenizer)
        if counting is None:
            return [None] * len(prepared)
        ids = counting.encode([item.text for item in prepared])
        masks = [counting.mask(item.text, of_item, item.spans) for item, of_item in zip(prepared, ids, strict=True)]
        # Where a span begins, a token does.
        return [None if mask is None else (each, mask, True) for each, mask in zip(ids, masks, strict=True)]

    def _by_offsets(self, prepared: list[_Prepared]) -> Iterator[_Tokens]:
        if not prepared:
            return
        # Text that is learned whole needs no offsets, so it works with tokenizers that cannot give them.
        needs_offsets = any(item.spans != [(0, len(item.text))] for item in prepared)
        if needs_offsets and not self.tokenizer.is_fast:
            raise DataError(
                f"model.tokenizer: {type(self.tokenizer).__name__} does not report where in the text its tokens are, "
                "so the assistant's cannot be marked; use a model with a fast tokenizer, or data.targets=all"
            )
        encoded = self.tokenizer(
            [item.text for item in prepared],
            # A chat template writes its own special tokens; those of plain text are added in `_document`.
            add_special_tokens=False,
            return_offsets_mapping=needs_offsets,
            return_attention_mask=False,
            # It would warn of rows longer than the model, before data.long_rows has dealt with them.
            verbose=False,
        )
        if not needs_offsets:
            yield from ((ids, [True] * len(ids), True) for ids in encoded["input_ids"])
            return
        for item, ids, pairs in zip(prepared, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            offsets = spans_array(pairs)
            mask, across = target_mask(item.spans, offsets), _across(item.starts, offsets)
            # The prompt's last token may take the white space behind it, as Phi 3's `<|assistant|>` does.
            of_prompt = [token for token in across if ids[token] in self._special]
            for token in of_prompt:
                mask[token] = False
            yield ids, mask, len(of_prompt) == len(across)

    def _document(self, item: _Prepared, tokens: _Numbers, targets: _Numbers, begin_tokens: bool) -> Document:
        """Returns the document of a text; `begin_tokens` says whether a token begins where each answer does."""
        bos, eos, note = self.bos_id, self.tokenizer.eos_token_id, item.note
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
        if not begin_tokens:
            note = joined_notes([note, ASKED_OTHERWISE if SPECS[self.objective].compares_completions else OTHER_PROMPT])
        learned[:1] = False  # nothing precedes the first token
        images: Document = {"pictures": list(item.images)} if item.images else {}
        return {**document_of(ids, learned, digests_of(images)), "note": note, **images}

    def encode(self, examples: Sequence[Example | RowProblem]) -> list[Document]:
        """Returns a document for each example, without `columns` that have the value of a row that cannot be used."""
        prepared = [item if isinstance(item, RowProblem) else self._prepare_example(item) for item in examples]
        prepared = [
            _result_or_problem(self._encode_turns, item) if isinstance(item, _Turns) else item for item in prepared
        ]
        encoded = iter(self._encode([item for item in prepared if isinstance(item, _Prepared)]))
        documents = [
            unusable(item) if isinstance(item, RowProblem) else item if isinstance(item, dict) else next(encoded)
            for item in prepared
        ]
        by_turn = self.targets == EACH_TURN
        return [{**document, "ends": ends_of(document)} if by_turn else document for document in documents]


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


def _across(starts: tuple[int, ...], offsets: np.ndarray[Any, Any]) -> list[int]:
    """Returns the tokens that hold the end of a prompt and the beginning of an answer, as of two line ends."""
    if not starts:
        return []
    firsts, lasts = offsets.T
    before = np.searchsorted(firsts, starts) - 1
    return before[lasts[before] > starts].tolist()  # type: ignore[no-any-return]


def ends_of(document: Document) -> list[int]:
    """Returns the position after the last token of each sample of a document."""
    return document.get("ends") or [document["length"]]


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


def batches(rows: Iterable[Row], size: int) -> Iterable[list[Row]]:
    """Yields lists of `size` rows; the last may be shorter."""
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
