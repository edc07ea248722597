"""Sources, each with the target that an encoder-decoder writes for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from toolkit.data.documents.encode import Columns, Document, Encoder, document_of, joined_notes, unusable
from toolkit.data.images.images import Images
from toolkit.data.kinds.kind import TOO_LONG, Arrays, BatchSpec, Field, RowKind
from toolkit.data.layouts.layout import ColumnLayout, Layout
from toolkit.data.rows.examples import Example
from toolkit.data.rows.sources import Source
from toolkit.data.rows.values import RowProblem, RowValues
from toolkit.data.samples.packing import Ints
from toolkit.data.samples.samples import IGNORED, Batch, RowPrompt, Rows, RowSamples, Samples, filled_up, padded
from toolkit.errors import DataError, counted

USUAL_NAMES = (
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

SOURCE_CUT, TARGET_CUT = "the source was cut to data.max_length", "the target was cut to data.max_target_length"


@dataclass(frozen=True)
class SourceTarget(Example):
    """A target that an encoder-decoder learns, given a source."""

    source: str
    target: str

    def texts(self) -> list[str]:
        return [self.source, self.target]


def read_source_target(values: RowValues) -> SourceTarget:
    return SourceTarget(values.text("source"), values.text("target"))


@dataclass(frozen=True)
class SourceTargetEncoder(Encoder):
    """Encodes sources and their targets.

    Attributes:
        truncate_target_to: tokens to which a target is cut.
        prefix: text before each source.
    """

    truncate_target_to: int | None = None
    prefix: str = ""

    own: ClassVar[Columns] = {"split": ("int32", 0)}

    def own_key(self, layout: Layout) -> list[Any]:
        # The languages that the tokenizer marks sources and targets with, as mBART's does.
        languages = [getattr(self.tokenizer, name, None) for name in ("src_lang", "tgt_lang")]
        return [self.truncate_target_to, self.prefix, languages]

    def encode(self, examples: Sequence[Example | RowProblem]) -> list[Document]:
        return [
            self._source_target_document(item) if isinstance(item, SourceTarget) else unusable(item)
            for item in examples
        ]

    def _source_target_document(self, example: SourceTarget) -> Document:
        """Returns a document of a source's tokens and, after `split` of them, its target's, which are learned."""
        source, source_cut = self._token_ids(self.prefix + example.source, "text", self.truncate_to)
        target, target_cut = self._token_ids(example.target, "text_target", self.truncate_target_to)
        if not source:  # attention over nothing would give NaN
            return unusable(RowProblem("the source makes no token"))
        end = self.tokenizer.eos_token_id
        # Some tokenizers add the end themselves; with the others the model would not learn to stop. mBART's languages
        # come after the end.
        if end not in target:
            room = None if self.truncate_target_to is None else self.truncate_target_to - 1
            target = [*target[:room], end]
        cut = [what for what, is_cut in ((SOURCE_CUT, source_cut), (TARGET_CUT, target_cut)) if is_cut]
        targets = [False] * len(source) + [True] * len(target)
        return {**document_of(source + target, targets), "split": len(source), "note": joined_notes(cut)}

    def _token_ids(self, text: str, mode: str, limit: int | None) -> tuple[list[int], bool]:
        """Returns the tokens of a text, special ones included, at most `limit`, and whether it was cut.

        Args:
            mode: the tokenizer's argument for it: `text`, or `text_target`, which some tokenise differently.
        """
        settings = {mode: text, "return_attention_mask": False, "verbose": False}
        ids: list[int] = self.tokenizer(**settings)["input_ids"]
        if limit is None or len(ids) <= limit:
            return ids, False
        return self.tokenizer(**settings, truncation=True, max_length=limit)["input_ids"], True


@dataclass(frozen=True)
class SourceTargetSamples(RowSamples):
    """For sequence to sequence: `input_ids` and `attention_mask` of sources (B, S), and `labels` (B, T) of targets.

    Labels are IGNORED in padding; `lengths` and `target_lengths` (B,) are without it.

    A row has the tokens of its source, which are not targets, and then those of its target.

    Attributes:
        max_target_length: the most tokens of a target; `max_length` are those of a source.
    """

    max_target_length: int

    @property
    def most_answer_tokens(self) -> int:
        return self.max_target_length - 1

    def tokens(self, number: int) -> list[tuple[Any, Any]]:
        return [self.row(number)]

    def prompts(self, number: int) -> Iterator[RowPrompt]:
        source, target = self.parts(number)
        yield RowPrompt(source.tolist(), target.tolist())

    def parts(self, number: int) -> tuple[Any, Any]:
        """Returns the tokens of a sample's source, and of its target, each (length,)."""
        ids, is_target = self.row(number)
        return ids[~is_target], ids[is_target]

    def batch(self, numbers: Sequence[int]) -> Batch:
        sources, targets = zip(*(self.parts(number) for number in numbers), strict=True)
        labels, target_lengths = filled_up(targets, IGNORED, self.max_target_length)
        return {
            **padded(sources, self.pad_id, self.max_length),
            "labels": labels,
            "target_lengths": target_lengths,
        }


class SourceTargetRows(RowKind):
    """Rows of two texts, which are padded."""

    name = "source and target"
    layouts: ClassVar = (ColumnLayout("source and target", ("source", "target"), read_source_target),)
    also_called: ClassVar = {
        "source": ("src", "original", "content", "body", "article", "document", "question", "text"),
        "target": ("tgt", "output", "summary", "headline", "title", "reference", "translation", "answer"),
    }
    encodes = SourceTargetEncoder
    limits = ("max_length", "max_target_length")
    too_long = f"{TOO_LONG}, or its target than data.max_target_length"

    @classmethod
    def names_in(cls, source: Source, by_hand: Mapping[str, str]) -> dict[str, str]:
        """Returns the columns of source and target if they have usual names; raises DataError if several pairs have."""
        if {"source", "target"} & by_hand.keys():
            return {}
        found = [pair for pair in USUAL_NAMES if set(pair) <= set(source.columns)]
        if len(found) > 1:
            pairs = " or ".join(" to ".join(pair) for pair in found)
            first, second = found[0]
            raise DataError(
                f"{source.field}: {source.name!r} could be learned from {pairs}; choose by hand, for example "
                f"data.columns.source={first} data.columns.target={second}"
            )
        return dict(zip(("source", "target"), found[0], strict=True)) if found else {}

    @classmethod
    def hint(cls, columns: list[str], place: str) -> str | None:
        if TRANSLATION not in columns:
            return None
        return f"{place}.source={TRANSLATION}.en {place}.target={TRANSLATION}.de"

    def encoder(self, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Encoder:
        if tokenizer.eos_token_id is None:
            raise DataError("model.tokenizer: it has no end-of-text token, so no target would end; use another one")
        cut = self.lengths[1] if self.data.long_rows == "truncate" else None
        return super().encoder(tokenizer, truncate_target_to=cut, prefix=self.data.source_prefix or "", **settings)

    @classmethod
    def sizes(cls, rows: Rows, chosen: Any) -> tuple[Ints, ...]:
        sources = rows.column("split")[chosen]
        return sources, rows.column("length")[chosen] - sources

    def too_many_long(self, field: str, sizes: Any, num_rows: int, num_long: int, choice: str) -> str:
        (most, most_of_target), (sources, targets) = self.lengths, sizes
        return (
            f"{field}: {num_long:,} of {counted(num_rows, 'row')} ({num_long / num_rows:.1%}) have a source longer "
            f"than data.max_length, {most} tokens, or a target longer than data.max_target_length, {most_of_target}; "
            f"the longest source has {int(sources.max()):,} and the longest target {int(targets.max()):,}. Raise "
            f"these{choice}"
        )

    def arrays(self, rows: Rows, order: Ints, policy: str, names: list[str] | None) -> Arrays:
        return {"row": order}, {"samples": len(order)}

    def samples(self, rows: Rows, arrays: Mapping[str, Any], pad_id: int, images: Images | None) -> Samples:
        return SourceTargetSamples(rows, arrays["row"], self.lengths[0], pad_id, self.lengths[1])

    @property
    def batch(self) -> BatchSpec:
        return {
            "input_ids": Field("BT"),
            "attention_mask": Field("BT"),
            "labels": Field("BU"),  # the target; -100 for padding
            "lengths": Field("B"),
            "target_lengths": Field("B"),
        }
