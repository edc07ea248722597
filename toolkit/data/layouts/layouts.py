"""Reads rows of any usual layout as examples: a text, an answer, a conversation, a class, a pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

from toolkit.data.layouts.messages import answered_last, asked_of, conversation, messages_of, tools_of, with_system
from toolkit.data.layouts.pairs import pair_of
from toolkit.data.layouts.row_flags import UnreadMedium, refuse_media
from toolkit.data.layouts.template_arguments import COLUMN, arguments_of
from toolkit.data.rows.examples import (
    Answer,
    Conversation,
    Example,
    Judged,
    Labelled,
    Pair,
    SourceTarget,
    Tagged,
    Text,
    is_conversation,
)
from toolkit.data.rows.image_places import COLUMNS, column_of
from toolkit.data.rows.readers import Row
from toolkit.data.rows.sources import ROWS_LOOKED_AT, Source, named_rows
from toolkit.data.rows.values import RowProblem, RowValues, is_empty, key_shown, listed, text_of
from toolkit.errors import DataError, closest
from toolkit.recipe.objectives.registry import SPECS
from toolkit.recipe.schema import ColumnsSection

KINDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("messages",),
    "prompt and completion": ("prompt", "completion"),
    "instruction and output": ("instruction", "output"),
    "text": ("text",),
    "source and target": ("source", "target"),
    "text and label": ("text", "label"),
    "tokens and tags": ("tokens", "tags"),
    "chosen and rejected": ("chosen", "rejected"),
    "judged messages": ("messages", "label"),
    "judged conversations": ("messages", "label"),
    "judged prompt and completion": ("prompt", "completion", "label"),
    "judged instruction and output": ("instruction", "output", "label"),
}
"""Layout -> the columns that it needs."""

OPTIONAL = {
    "messages": ("system", "tools"),
    "conversations": ("system", "tools"),
    "prompt and completion": ("tools",),
    "instruction and output": ("input", "system", "history"),
    "text": (),
    "source and target": (),
    "text and label": ("text_pair",),
    "tokens and tags": (),
    "chosen and rejected": ("prompt", "messages", "instruction", "input", "history", "system", "tools", "margin"),
}
JUDGED = {kind: kind.removeprefix("judged ") for kind in KINDS if kind.startswith("judged ")}
"""Layout of completions with a judgement each -> the layout of the same rows without the judgement."""

OPTIONAL |= {kind: OPTIONAL[plain] for kind, plain in JUDGED.items()}

ALSO_CALLED = {
    "messages": ("dialogue", "dialog", "conversation", "chat", "turns"),
    "prompt": ("question", "query", "problem", "context"),
    "completion": ("answer", "response", "solution", "reply", "target"),
    "instruction": ("task", "question", "query"),
    "input": ("context",),
    "system": ("system_prompt",),
    "output": ("answer", "response"),
    "text": ("body", "content", "document", "sentence", "review", "passage"),
    "source": ("src", "original", "content", "body", "article", "document", "question", "text"),
    "target": ("tgt", "output", "summary", "headline", "title", "reference", "translation", "answer"),
    "label": ("class", "category", "sentiment", "target", "stars"),
    "tokens": ("words",),
    "tags": ("ner", "labels", "pos_tags", "chunk_tags", "ner_labels"),
    "chosen": ("preferred", "winner", "response_w", "better"),
    "rejected": ("dispreferred", "loser", "response_l", "worse"),
}
"""Meaning of a column -> other names that data sets give it; errors suggest them, but they are never used silently."""

CLASSES = ("text and label", "tokens and tags")
"""Layouts of classification."""

SOURCES_AND_TARGETS = (
    ("source", "target"),
    ("input", "output"),
    ("inputs", "targets"),
    ("input_text", "target_text"),
    ("document", "summary"),
    ("article", "highlights"),
    ("dialogue", "summary"),
    ("text", "summary"),
    ("text", "target"),
    ("prompt", "completion"),
    ("instruction", "output"),
)
"""Usual names of source and target; for rows with several of these pairs the recipe must name the columns."""

TRANSLATION = "translation"
"""Column of the hub's data sets that holds a text for each language."""


UNREAD = "which is not read; leave such rows out"
"""Why a medium is not read that nothing here reads."""


@dataclass(frozen=True)
class Layout:
    """How a source's rows are laid out.

    Attributes:
        kind: a key of `KINDS`.
        columns: meaning of a column -> its name.
        label_names: names of the numbers in the label's column, if the source has them.
        images: whether conversations may have images.
        blind: why images are not read where they are, and what to do.
        templated: whether pairs whose prompt is text are conversations; see `_says_more_than_text`.
        margins: whether the objective uses the margins of pairs.
    """

    kind: str
    columns: dict[str, str]
    label_names: tuple[str, ...] = ()
    images: bool = False
    blind: str = UNREAD
    templated: bool = False
    margins: bool = False

    @property
    def has_conversations(self) -> bool:
        """Whether all rows of this layout are conversations, which a chat template writes."""
        plain = ("text", *CLASSES, "source and target", "prompt and completion", "chosen and rejected")
        return self.templated or JUDGED.get(self.kind, self.kind) not in plain

    def example(self, row: Row) -> Example:
        """Returns what is learned from a row; see `read`."""
        return self.read(row)[0]

    def read(self, row: Row) -> tuple[Example, list[str]]:
        """Returns what is learned from a row, and a sentence for each of its columns that has a value and is ignored.

        Raises:
            RowProblem: if the row cannot be used.
        """
        if isinstance(row, RowProblem):
            raise row
        values = RowValues(row, self.columns)
        try:
            known = {*self.columns.values(), *(COLUMNS if self.images else ())}
            refuse_media({name: value for name, value in row.items() if name not in known}, "the row")
            example = _with_arguments(self._example_of_row(values), row)
        except UnreadMedium as found:
            raise RowProblem(f"{found}, {self.blind if found.is_image else UNREAD}") from found
        read = {*values.taken, *(COLUMNS if self.images else ())}
        if is_conversation(example):  # only a chat template takes arguments
            read.add(COLUMN)
        unread = [name for name, value in row.items() if name not in read and not is_empty(value)]
        return example, [f"column {key_shown(name)} is not read" for name in unread]

    def _example_of_row(self, values: RowValues) -> Example:
        if self.kind in JUDGED:
            answer = self._example_of_kind(values, JUDGED[self.kind])
            assert isinstance(answer, Answer | Conversation)
            if isinstance(answer, Conversation):
                answered_last(answer)
            return Judged(answer, _judgement(values["label"], self.columns["label"]))
        self._require_unjudged(values.row)
        of_row = column_of(values.row) if self.images else None
        found = self._example_of_kind(values, self.kind, of_row)
        if of_row and not isinstance(found, Conversation):
            raise RowProblem("images beside text that is no conversation, where no place is known for them")
        return found

    def _example_of_kind(self, values: RowValues, kind: str, of_row: list[Any] | None = None) -> Example:
        if kind == "text":
            return Text(values.text("text"))
        if kind == "text and label":
            return self._text_and_label(values)
        if kind == "source and target":
            return SourceTarget(values.text("source"), values.text("target"))
        if kind == "tokens and tags":
            return _tokens_and_tags(values, self.label_names)
        if kind == "chosen and rejected":
            return pair_of(values, self.templated, self.margins)
        if kind == "prompt and completion":
            return _prompt_and_completion(values, of_row)
        if kind == "instruction and output":
            return _instruction(values, of_row)
        messages = messages_of(values["messages"], self.columns["messages"], self.images)
        return conversation(with_system(messages, values), tools_of(values["tools"]), of_row)

    def _require_unjudged(self, row: Mapping[str, Any]) -> None:
        """Raises DataError if answers have judgements: the bad ones would be learned like the good ones."""
        # These layouts hold no single answers that could be judged; a `label` there is a class.
        if self.kind in ("text", "source and target", *CLASSES, "chosen and rejected"):
            return
        # TRL's name and LLaMA-Factory's. Compared as text, because a CSV file holds no booleans.
        for column in ("label", "kto_tag"):
            if str(row.get(column)).lower() in JUDGEMENTS:
                raise DataError(
                    f"data: rows are judged good or bad one by one ({column}: {row[column]}), as for KTO; set "
                    "objective.kind=kto (toolkit init: --method kto), or keep only the good rows and remove the "
                    f"column {column}"
                )

    def _text_and_label(self, values: RowValues) -> Labelled:
        return Labelled(
            values.text("text"),
            values.text("text_pair") if "text_pair" in self.columns else None,
            _class_name(values["label"], self.columns["label"], self.label_names),
        )


def recognise(source: Source, columns: ColumnsSection, *objectives: str) -> Layout:
    """Returns the layout of a source.

    Args:
        objectives: `objective.kind` of the recipe; if there are several, layouts of the first are tried first.

    Raises:
        DataError: if its columns match no known layout, or it lacks a column that the recipe names.
    """
    by_hand = {what: name for what, name in columns.model_dump().items() if name is not None}
    for what, name in by_hand.items():
        if not _has_column(name, source.columns):
            raise DataError(
                f"{source.field}: {source.name!r} has no column {name!r} (data.columns.{what}); {_columns_text(source)}"
            )
    candidates = [(kind, SPECS[objective]) for objective in objectives for kind in SPECS[objective].layouts]
    kinds = [kind for kind, _ in candidates]
    only_optional = by_hand.keys().isdisjoint(what for kind in kinds for what in KINDS[kind])
    idle: tuple[str, str] | None = None
    for kind, spec in candidates:
        names = _usual_names(kind, source, by_hand)
        needed = {what: names[what] for what in KINDS[kind]}
        # A needed column that is named by hand picks the layout; an optional one rules out layouts without it.
        chosen = any(what in by_hand for what in KINDS[kind]) or all(what in OPTIONAL[kind] for what in by_hand)
        if (chosen or only_optional) and all(_has_column(name, source.columns) for name in needed.values()):
            read = {*KINDS[kind], *OPTIONAL[kind]} - (set() if spec.has_margins else {"margin"})
            unused = [what for what in by_hand if what not in read]
            if unused:
                idle = idle or (unused[0], kind)
                continue
            # The first rows need not have all columns, so optional columns are looked up in each row.
            extra = {
                what: names[what] for what in OPTIONAL[kind] if what != "text_pair" or names[what] in source.columns
            }
            labels = source.label_names.get(needed.get("label") or needed.get("tags", ""), [])
            templated = kind == "chosen and rejected" and _say_more_than_text(source, {**needed, **extra}, by_hand)
            return Layout(kind, {**needed, **extra}, tuple(labels), templated=templated, margins=spec.has_margins)
    if idle is not None:
        raise DataError(
            f"data.columns.{idle[0]} has no effect on {source.name!r}, whose rows would be read as {idle[1]}; remove it"
            f"{_place_for(*idle)}"
        )
    # `conversations` needs the same column as `messages`; it would be listed twice.
    allowed = "; ".join(" + ".join(KINDS[kind]) for kind in kinds if not kind.endswith("conversations"))
    others = [
        spec.kind for spec in SPECS.values() if any(set(KINDS[kind]) <= set(source.columns) for kind in spec.layouts)
    ]
    fitting = f"Its columns fit {' or '.join(f'objective.kind={other}' for other in others)}. " if others else ""
    raise DataError(
        f"{source.field}: {source.name!r} matches no known column layout; {_columns_text(source)}; needed: {allowed}. "
        f"{fitting}{_advice(source, kinds)}"
    )


def _usual_names(kind: str, source: Source, by_hand: dict[str, str]) -> dict[str, str]:
    """Returns the names of all columns in a layout: those of the recipe, or usual ones."""
    names = {what: what for what in ColumnsSection.model_fields}
    # ShareGPT's `conversations` stand for `messages`.
    if kind.endswith("conversations") or (kind == "chosen and rejected" and "messages" not in source.columns):
        names["messages"] = "conversations"
    # LLaMA-Factory's name of the judgement.
    if kind in JUDGED and "label" not in source.columns:
        names["label"] = "kto_tag"
    # The usual name in data sets of named entities.
    if kind == "tokens and tags" and "tags" not in source.columns:
        names["tags"] = "ner_tags"
    if kind == "source and target":
        names |= _source_and_target(source, by_hand)
    return {**names, **by_hand}


def _say_more_than_text(source: Source, columns: dict[str, str], by_hand: dict[str, str]) -> bool:
    """Returns whether pairs of a text prompt and texts have a system prompt or tools, as Intel/orca_dpo_pairs does.

    Only a conversation has a place for these. The first rows decide for all, and a column that is named by hand does,
    because rows without a system prompt among others must not be learned in another form.
    """
    rows = (row for _, row in islice(named_rows(source.shards, source.paths), ROWS_LOOKED_AT))
    found = (RowValues(row, columns) for row in rows if not isinstance(row, RowProblem))
    texts = [values for values in found if isinstance(values["prompt"], str) and isinstance(values["chosen"], str)]
    return any(what in by_hand or not is_empty(values[what]) for values in texts for what in ("system", "tools"))


def _place_for(what: str, kind: str) -> str:
    """Returns advice where a column has an effect that has none in this layout."""
    if what == "margin" and kind == "chosen and rejected":
        return ", or set objective.kind=reward, which uses it"
    if JUDGED.get(kind, kind) == "prompt and completion" and what in OPTIONAL["instruction and output"]:
        return ", or name the prompt data.columns.instruction and the completion data.columns.output"
    return ""


def _advice(source: Source, kinds: list[str]) -> str:
    """Suggests how to turn the columns of a source into a known layout."""
    separator = next((s for s in (";", "\t", "|") if len(source.columns) == 1 and s in source.columns[0]), None)
    if separator is not None:
        return f"They are separated by {separator!r}: save the file with commas" + (
            ", or name it .tsv" if separator == "\t" else ""
        )
    if TRANSLATION not in source.columns and len(source.columns) < min(len(KINDS[kind]) for kind in kinds):
        return "Add the columns that are missing"
    return f"Name its columns by hand, for example {_hint(source.columns, kinds)}"


def _has_column(name: str, columns: list[str]) -> bool:
    """Returns whether there is such a column; `translation.de` is a key of one that holds mappings."""
    return name in columns or ("." in name and name.partition(".")[0] in columns)


def _source_and_target(source: Source, by_hand: dict[str, str]) -> dict[str, str]:
    """Returns the columns of source and target if they have usual names; raises DataError if several pairs have."""
    if {"source", "target"} & by_hand.keys():
        return {}
    found = [pair for pair in SOURCES_AND_TARGETS if set(pair) <= set(source.columns)]
    if len(found) > 1:
        told = " or ".join(" to ".join(pair) for pair in found)
        first, second = found[0]
        raise DataError(
            f"{source.field}: {source.name!r} could be learned from {told}; choose by hand, for example "
            f"data.columns.source={first} data.columns.target={second}"
        )
    return dict(zip(("source", "target"), found[0], strict=True)) if found else {}


def _hint(columns: list[str], kinds: list[str]) -> str:
    """Returns settings that match a source's columns to the nearest layout, or an example if none is near."""
    if kinds[0] == "source and target" and TRANSLATION in columns:
        return f"data.columns.source={TRANSLATION}.en data.columns.target={TRANSLATION}.de"
    best: dict[str, str] = {}
    for kind in kinds:
        near = {what: column for what in KINDS[kind] if (column := _nearest_column(what, columns)) is not None}
        if len(near) == len(KINDS[kind]):
            near |= {
                what: column for what in OPTIONAL[kind] if (column := _column_by_usual_name(what, columns)) is not None
            }
            best = max(best, near, key=_nearness)
    wanted = best or {what: columns[-1] if len(columns) == 1 else "NAME" for what in KINDS[kinds[-1]]}
    needed = {what: column for what, column in wanted.items() if not best or what != column} or wanted
    return " ".join(f"data.columns.{what}={column}" for what, column in needed.items())


def _nearness(found: dict[str, str]) -> tuple[int, int]:
    """Returns how well columns fit a layout: columns with its own names count first."""
    return sum(what == column for what, column in found.items()), len(found)


def _nearest_column(what: str, columns: list[str]) -> str | None:
    names = {column.lower(): column for column in columns}
    near = closest(what, names, cutoff=0.75)
    return _column_by_usual_name(what, columns) or (None if near is None else names[near])


def _column_by_usual_name(what: str, columns: list[str]) -> str | None:
    """Returns the column that has the layout's own name or another usual one."""
    names = {column.lower(): column for column in columns}
    return next((names[name] for name in (what, *ALSO_CALLED.get(what, ())) if name in names), None)


def _columns_text(source: Source) -> str:
    return f"it has {listed(source.columns) or 'no columns'}"


# ---- one layout each ----


T = TypeVar("T")


def _with_arguments(example: T, row: dict[str, Any]) -> T:
    """Adds the row's arguments of the chat template to a conversation, or a pair of them."""
    if isinstance(example, Pair):
        sides = (_with_arguments(example.chosen, row), _with_arguments(example.rejected, row))
        return replace(example, chosen=sides[0], rejected=sides[1])
    if not isinstance(example, Conversation):
        return example
    return replace(example, arguments=arguments_of(row.get(COLUMN)))


def _class_name(value: Any, column: str, names: tuple[str, ...]) -> str:
    # Before int: in Python True is an int, and `true` is a name of its own.
    if isinstance(value, bool):
        return str(value).lower()
    # 1.0 and 1 are the same class.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        if names and not 0 <= value < len(names):
            raise RowProblem(f"{column} is a number that has no class name")
        return names[value] if names else str(value)
    if isinstance(value, float):
        raise RowProblem(f"{column} is a number, but not a whole one")
    return text_of(value, column).strip()


def _tokens_and_tags(values: RowValues, names: tuple[str, ...]) -> Tagged:
    words, tags, columns = values["tokens"], values["tags"], values.columns
    for value, column in ((words, columns["tokens"]), (tags, columns["tags"])):
        if not isinstance(value, list):
            raise RowProblem(f"{column} is {'missing or null' if value is None else 'not a list'}")
    if not words:
        raise RowProblem(f"{columns['tokens']} is empty")
    if len(words) != len(tags):
        raise RowProblem(f"{columns['tokens']} and {columns['tags']} are of different lengths")
    return Tagged(
        tuple(text_of(word, f"a word of {columns['tokens']}") for word in words),
        tuple(_class_name(tag, f"a tag of {columns['tags']}", names) for tag in tags),
    )


JUDGEMENTS = ("true", "false", "1", "0")
"""How rows write that an answer is good or bad, in lower case."""


def _judgement(value: Any, column: str) -> bool:
    # A CSV file holds only text.
    said = str(value).lower()
    if said not in JUDGEMENTS:
        raise RowProblem(f"{column} is {'missing or null' if value is None else 'neither true nor false'}")
    return said in ("true", "1")


def _prompt_and_completion(values: RowValues, of_row: list[Any] | None = None) -> Example:
    prompt, completion, columns = values["prompt"], values["completion"], values.columns
    if isinstance(prompt, list) or isinstance(completion, list):
        asked = messages_of(prompt, columns["prompt"], of_row is not None)
        answered = messages_of(completion, columns["completion"], of_row is not None)
        return conversation([*asked, *answered], tools_of(values["tools"]), of_row)
    return Answer(text_of(prompt, columns["prompt"]), text_of(completion, columns["completion"]))


def _instruction(values: RowValues, of_row: list[Any] | None = None) -> Conversation:
    asked = asked_of(values)
    messages = with_system([*asked, {"role": "assistant", "content": values.text("output")}], values)
    return conversation(messages, None, of_row) if of_row else Conversation(messages)
