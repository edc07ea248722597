"""Texts, or pairs of texts, with a class each."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from toolkit.data.documents.encode import Columns, Document, Encoder, document_of, unusable
from toolkit.data.images.images import Images
from toolkit.data.kinds.kind import Arrays, BatchSpec, Field, RowKind
from toolkit.data.layouts.layout import ColumnLayout, Layout
from toolkit.data.rows.examples import Example
from toolkit.data.rows.sources import Source, first_rows
from toolkit.data.rows.values import RowProblem, RowValues, numbers_first, text_of
from toolkit.data.samples.packing import Ints
from toolkit.data.samples.samples import IGNORED, MULTIPLE, Batch, Rows, RowSamples, Samples, filled_up, padded
from toolkit.errors import DataError

_DECIMAL = re.compile(r"[-+]?([0-9]*[.,][0-9]*[1-9][0-9]*|([0-9]+\.?|[0-9]*\.[0-9]+)[eE][-+]?[0-9]+)")

NO_CLASS = "the label is not one of the classes"

PADDED_TEXT: BatchSpec = {
    "input_ids": Field("BT"),
    "attention_mask": Field("BT"),  # 0 for padding
    "token_type_ids": Field("BT", optional=True),  # 1 for the second text of a pair; left out if all are 0
    "lengths": Field("B"),
}


@dataclass(frozen=True)
class Labelled(Example):
    """The class of a text, or of a pair of texts; a number that names a class comes as text, several labels as JSON."""

    text: str
    text_pair: str | None
    label: str

    def texts(self) -> list[str]:
        return [self.text, *([self.text_pair] if self.text_pair is not None else [])]


def read_labelled(values: RowValues) -> Labelled:
    """Reads a text and its class; raises RowProblem."""
    way = " (objective.labels=[score] learns numbers)"
    return _labelled(values, class_name(values["label"], values.columns["label"], values.label_names, way))


def _labelled(values: RowValues, label: str) -> Labelled:
    second = values.text("text_pair") if "text_pair" in values.columns else None
    return Labelled(values.text("text"), second, label)


def read_several(values: RowValues) -> Labelled:
    """Reads a text and a list of its labels, which may be empty; raises RowProblem."""
    labels, column = values["label"], values.columns["label"]
    if not isinstance(labels, list):
        raise RowProblem(f"{column} is not a list, as in other rows")
    names = sorted(class_name(label, f"a label of {column}", values.label_names) for label in labels)
    if len(set(names)) < len(names):
        raise RowProblem(f"{column} has a label twice; it lists the names of those that hold")
    return _labelled(values, json.dumps(names))


def read_number(values: RowValues) -> Labelled:
    """Reads a text and its number; raises RowProblem."""
    value, column = values["label"], values.columns["label"]
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= torch.finfo(torch.float32).max or np.float32(number) == IGNORED:
        raise RowProblem(f"{column} is not a number of float32, or is {IGNORED}, which means no label")
    return _labelled(values, repr(number))


def class_name(value: Any, column: str, names: Sequence[str], of_numbers: str = "") -> str:
    """Returns the name of a class that a column names or numbers; raises RowProblem, `of_numbers` in it for 0.5."""
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
    name = str(value) if isinstance(value, float) else text_of(value, column).strip()
    # A CSV file holds only text. Of 0.25 and 0.26 nobody means two classes.
    if _DECIMAL.fullmatch(name) or isinstance(value, float):
        raise RowProblem(f"{column} is a number, but not a whole one{of_numbers}")
    return name


def _require_one_kind(names: list[str]) -> None:
    """Raises DataError if some of these classes, which are sorted, are numbers: one would be taken for two."""
    numbers = [name for name in names if name.isdecimal()]
    if 0 < len(numbers) < len(names):
        raise DataError(
            f"data.train: labels are numbers ({numbers[0]}) in some places and names ({names[-1]}) in others, and "
            "one would be taken for two classes; write all as numbers or all as names"
        )


def _require_unlike(names: list[str]) -> None:
    """Raises DataError if two of these classes are written alike, as Good and good, or 1 and 1.0 of a CSV file."""
    alike: dict[str, str] = {}
    for name in names:
        plain = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
        if (other := alike.setdefault(re.sub(r"^\+?(-?)0*(\d+?)(\.0*)?$", r"\1\2", plain), name)) != name:
            raise DataError(f"data.train: labels {other!r} and {name!r} look like one; list both in objective.labels")


class LabelledEncoder(Encoder):
    """Encodes texts with the model's own special tokens; `targets` hold token types, of which XLNet has three."""

    own: ClassVar[Columns] = {
        "targets": (["uint8"], []),
        "label": ("string", None),
    }

    def encode(self, examples: Sequence[Example | RowProblem]) -> list[Document]:
        encoded = iter(self._encode_texts([example for example in examples if isinstance(example, Labelled)]))
        return [unusable(item) if isinstance(item, RowProblem) else next(encoded) for item in examples]

    def _encode_texts(self, examples: list[Labelled]) -> list[Document]:
        if not examples:
            return []
        pairs = [example.text_pair for example in examples]
        cut = {} if self.truncate_to is None else {"truncation": "longest_first", "max_length": self.truncate_to}
        encoded = self.tokenizer(
            [example.text for example in examples],
            pairs if pairs[0] is not None else None,
            return_attention_mask=False,
            # As in inference: a tokenizer may know token types although its model was trained without them.
            return_token_type_ids="token_type_ids" in self.tokenizer.model_input_names,
            verbose=False,
            **cut,
        )
        # Tokenizers without token types give none: then both texts of a pair are of type 0.
        kinds = encoded.get("token_type_ids") or [[0] * len(ids) for ids in encoded["input_ids"]]
        return [
            # A label is learned from the whole text. Without targets, the row would be dropped.
            {**document_of(ids, row_kinds, example.label, num_targets=len(ids)), "label": example.label}
            for ids, row_kinds, example in zip(encoded["input_ids"], kinds, examples, strict=True)
        ]


@dataclass(frozen=True)
class LabelledSamples(RowSamples):
    """For classification: `input_ids`, `attention_mask`, `token_type_ids`, each (B, T), and `labels`, `lengths` (B,).

    Token types that are all 0 are left out: most models assume 0 then, and GPT-2 would add the embedding of word 0.

    Attributes:
        labels: the class of each sample, (samples,), int64; numbers to learn, float32; or which of C labels hold,
            (samples, C), float32.
    """

    labels: Any

    @property
    def has_several_labels(self) -> bool:
        return getattr(self.labels, "ndim", 1) == 2  # of words they are a list

    def batch(self, numbers: Sequence[int]) -> Batch:
        tokens = [self.row(number) for number in numbers]
        return {**self._padded_batch(tokens), "labels": torch.from_numpy(np.asarray(self.labels)[list(numbers)])}

    def few(self, tokens: int) -> Batch:
        """Returns a micro-batch of one row of at most `tokens` tokens and its padding, to try a model on."""
        filling = {"input_ids": self.pad_id, "labels": IGNORED}
        batch = {
            name: F.pad(tensor[:, :tokens], (0, MULTIPLE), value=filling.get(name, 0))
            if tensor.dim() == 2 and not tensor.is_floating_point()
            else tensor
            for name, tensor in self.batch([0]).items()
        }
        return {**batch, "lengths": batch["lengths"].clamp_max(tokens)}

    def _padded_batch(self, tokens: list[tuple[Any, Any]]) -> Batch:
        """Returns a batch without labels, (B, T), whose rows have these ids and token types."""
        batch = padded([ids for ids, _ in tokens], self.pad_id, self.max_length)
        types, _ = filled_up([types for _, types in tokens], 0, self.max_length)
        return {**batch, "token_type_ids": types} if types.any() else batch


ONE = ColumnLayout("text and label", ("text", "label"), read_labelled, ("text_pair",), of_all_rows=("text_pair",))
SEVERAL = replace(ONE, name="text and labels", read=read_several)
NUMBER = replace(ONE, name="text and number", read=read_number)


class LabelledRows(RowKind):
    """Rows with a class each, or with several labels or a number, which are padded."""

    name = "labelled"
    encodes: ClassVar[type[Encoder]] = LabelledEncoder
    layouts: ClassVar[tuple[ColumnLayout, ...]] = (ONE, SEVERAL, NUMBER)
    also_called: ClassVar = {
        "text": ("body", "content", "document", "sentence", "review", "passage"),
        "label": ("class", "category", "sentiment", "target", "stars"),
    }
    learns_tokens = False
    strata: ClassVar[str | None] = "label"
    mixes_numbers: ClassVar[bool] = True
    """Whether some classes may be called by numbers and others by names, where no source names its numbers."""

    @classmethod
    def adapted(cls, layout: Layout, source: Source, by_hand: Mapping[str, str]) -> Layout:
        """Returns the layout, of several labels if one of the first rows has a list."""
        lists = layout.form is ONE and any(
            isinstance(row.get(layout.columns["label"]), list) for row in first_rows(source.shards)
        )
        return replace(layout, form=SEVERAL) if lists else layout

    def agreed(self, layout: Layout, others: Callable[[], list[Layout]]) -> Layout:
        """Returns the layout, of numbers if the recipe names a single label. Raises DataError if sources differ."""
        if layout.form in (ONE, SEVERAL) and len(self.objective.labels or ()) == 1:
            return replace(layout, form=NUMBER)
        if layout.form in (ONE, SEVERAL) and any(other.form is not layout.form for other in others()):
            raise DataError("data.train: some sources have lists of labels, others one label a row; write all as lists")
        return layout

    def class_names(self, train: Rows) -> list[str]:
        """Returns the names of the classes: those of the recipe, of the data set, or of the rows.

        Raises:
            DataError: if the rows have a single one, or some are numbers and others names.
        """
        if self.objective.labels is not None:
            return list(self.objective.labels)
        named = [source.label_names for source in train.sources if source.label_names]
        # If sources name their numbers differently, one number would mean two classes: the rows' names decide.
        if named and len(named) == len(train.sources) and all(names == named[0] for names in named):
            return named[0]
        names = sorted({name for found in self.labels(train) for name in found}, key=numbers_first)
        if named or not self.mixes_numbers:
            _require_one_kind(names)
        _require_unlike(names)
        if len(names) == 1:
            raise DataError(f"data.train: all rows are of one class ({names[0]}); a classifier needs two or more")
        return names

    def labels(self, rows: Rows) -> list[list[str]]:
        """Returns the classes of each row; none of a row that cannot be used."""
        known, several = rows.values("label"), self._layout_of(rows) is SEVERAL
        if self._layout_of(rows) is NUMBER:
            known = [None if label is None else (self.objective.labels or [])[0] for label in known]
        return [[] if label is None else json.loads(label) if several else [label] for label in known]

    def _layout_of(self, rows: Rows) -> ColumnLayout:
        return next((form for form in self.layouts for source in rows.sources if form.name == source.layout), ONE)

    def without_class(self, rows: Rows, names: list[str], dropped: Mapping[int, str]) -> dict[int, str]:
        known = set(names)
        return {
            row: NO_CLASS
            for row, found in enumerate(self.labels(rows))
            if row not in dropped and not known.issuperset(found)
        }

    def arrays(self, rows: Rows, order: Ints, policy: str, names: list[str] | None) -> Arrays:
        assert names is not None
        numbers, of_row = {name: number for number, name in enumerate(names)}, self.labels(rows)
        found = [of_row[row] for row in order.tolist()]
        labels = np.array([numbers[name] for names in found for name in names], dtype=np.int64)
        by_class = dict(zip(names, np.bincount(labels, minlength=len(names)).tolist(), strict=True))
        if (form := self._layout_of(rows)) is SEVERAL:
            labels = np.array([[name in held for name in names] for held in found], dtype=np.float32)
        elif form is NUMBER:
            labels = np.array([float(rows.value("label", row)) for row in order.tolist()], dtype=np.float32)
        arrays = {"row": order, "label": labels, "ends": np.cumsum([len(names) for names in found])}
        return arrays, {"samples": len(order), "labels": by_class}

    def samples(self, rows: Rows, arrays: Mapping[str, Any], pad_id: int, images: Images | None) -> Samples:
        return LabelledSamples(rows, arrays["row"], self.data.max_length, pad_id, arrays["label"])

    @property
    def batch(self) -> BatchSpec:
        return {**PADDED_TEXT, "labels": Field("B")}  # the class of each row

    def shown(self, rows: Rows, row: int, targets: Any) -> tuple[Any, dict[str, Any]]:
        # Here `targets` marks the tokens of a pair's second text.
        return np.zeros_like(targets), {"label": rows.value("label", row)}
