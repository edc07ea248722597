"""What a kind of row answers, from its columns to the tensors of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from toolkit.data.documents.encode import Encoder
from toolkit.data.images.images import Images
from toolkit.data.layouts.layout import ColumnLayout, Layout
from toolkit.data.rows.sources import Source
from toolkit.data.samples.packing import Ints, Pieces, best_fit
from toolkit.data.samples.samples import Rows, Samples
from toolkit.errors import counted
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.objectives.spec import ObjectiveSpec
from toolkit.recipe.schema import DataSection

TOO_LONG = "longer than data.max_length"


@dataclass(frozen=True)
class Field:
    """A tensor of a batch.

    Attributes:
        shape: its dimensions by letter, such as `BT`; a digit is a fixed size. B are samples, T tokens of a sample, U
            tokens of a target, R rows (pairs, or judged completions) in all samples.
        dtype: the name of torch's dtype.
        optional: whether a batch may lack it.
    """

    shape: str
    dtype: Literal["int64", "float32", "bool"] = "int64"
    optional: bool = False

    def sizes(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape in numbers, given the size of each letter."""
        return tuple(int(dim) if dim.isdigit() else dims[dim] for dim in self.shape)


BatchSpec = Mapping[str, Field]

Arrays = tuple[dict[str, Any], dict[str, Any]]
"""Arrays that say which rows make up which sample, and fields of a `SplitReport`."""


@dataclass(frozen=True)
class RowKind(ABC):
    """The rows of a recipe. A file in this folder describes each kind, and `registry.py` lists them.

    Attributes:
        name: what `ObjectiveSpec.rows` calls it.
        layouts: layouts of its columns, in the order in which they are tried.
        encodes: the class of the encoder of its rows.
        also_called: meaning of a column -> other names that data sets give it. Errors suggest them, and they are never
            used silently.
        limits: the fields of `data` that limit its tokens: those of a sample, and those of a separate target.
        too_long: why rows beyond these limits are dropped.
        learns_tokens: whether targets are tokens of the row, which the report counts.
        strata: the column of whose values a split holds out the same share, or None.
        documents: documents of a row, which share a sample and each have the model's positions.
    """

    data: DataSection
    objective: ObjectiveSection

    name: ClassVar[str]
    layouts: ClassVar[tuple[ColumnLayout, ...]]
    encodes: ClassVar[type[Encoder]] = Encoder
    also_called: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    limits: ClassVar[tuple[str, ...]] = ("max_length",)
    too_long: ClassVar[str] = TOO_LONG
    learns_tokens: ClassVar[bool] = True
    strata: ClassVar[str | None] = None
    documents: ClassVar[int] = 1

    # ---- columns ----

    @classmethod
    def idle_columns(cls, spec: ObjectiveSpec) -> frozenset[str]:
        """Returns the meanings of the columns that an objective does not use."""
        return frozenset()

    @classmethod
    def names_in(cls, source: Source, by_hand: Mapping[str, str]) -> dict[str, str]:
        """Returns meaning of a column -> its name, if a source's columns have other usual names together.

        Raises:
            DataError: if the recipe has to choose.
        """
        return {}

    @classmethod
    def adapted(cls, layout: Layout, source: Source, by_hand: Mapping[str, str]) -> Layout:
        """Returns the layout as the first rows of a source need it, given the names in the recipe."""
        return layout

    @classmethod
    def hint(cls, columns: list[str], place: str) -> str | None:
        """Returns settings of `place` that name a source's columns, where one says more than its name; or None."""
        return None

    def agreed(self, layout: Layout, others: Callable[[], list[Layout]]) -> Layout:
        """Returns the layout of a source among those of all sources of the recipe."""
        return layout

    # ---- documents ----

    @property
    def targets(self) -> Any:
        """What is learned of a conversation, or of a prompt and its completion."""
        return self.objective.spec.trained_turns or self.data.targets or "assistant"

    @property
    def chosen_targets(self) -> str | None:
        """`targets` if the recipe chooses them, else None."""
        spec = self.objective.spec
        return None if spec.padded or spec.compares_completions else self.targets

    @property
    def cuts_rows(self) -> bool:
        """Whether long rows are cut as they are tokenised, so that the documents have no long ones then."""
        return self.objective.spec.padded

    @property
    def ways(self) -> tuple[str, ...]:
        """The values of `data.long_rows` besides `error` that rows without images support."""
        if self.objective.spec.compares_completions:
            return ("drop",)
        return ("drop", "truncate") if self.cuts_rows else ("drop", "truncate", "split")

    def encoder(self, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Encoder:
        """Returns the encoder of the rows, given those of its fields that the tokenizer decides.

        Raises:
            DataError: if the tokenizer cannot encode such rows.
        """
        # Only the tokenizer can cut a text and keep the special tokens that a model expects around it.
        cut = self.data.max_length if self.cuts_rows and self.data.long_rows == "truncate" else None
        return self.encodes(tokenizer, self.targets, self.objective.kind, cut, **settings)

    def key(self, source: Source) -> list[Any]:
        """Returns what decides the documents of a source besides its encoder and layout."""
        return []

    # ---- the rows to learn from ----

    def class_names(self, train: Rows) -> list[str] | None:
        """Returns the names of the classes in the order of their numbers, or None without classes.

        They are empty if no row can be used.

        Raises:
            DataError: if no classifier can be trained on them.
        """
        return None

    def without_class(self, rows: Rows, names: list[str], dropped: Mapping[int, str]) -> dict[int, str]:
        """Returns why rows cannot be used with these classes, by row; those in `dropped` need no second reason."""
        return {}

    @classmethod
    def sizes(cls, rows: Rows, chosen: Any) -> tuple[Ints, ...]:
        """Returns, for each of `limits`, the tokens of these rows, (rows,)."""
        return (rows.column("length")[chosen],)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The most tokens of each of `limits`."""
        return tuple(getattr(self.data, field) or self.data.max_length for field in self.limits)

    @property
    def most(self) -> tuple[int, ...]:
        """The most tokens of a row for each of `limits`; fewer than `lengths` if a sample gets more than the row."""
        return self.lengths

    def too_many_long(self, field: str, sizes: Any, num_rows: int, num_long: int, choice: str) -> str:
        """Returns the error's text. `sizes` are those of the rows that are known, and `choice` is its end."""
        lengths, limit = sizes[0], self.data.max_length if self.too_long == TOO_LONG else self.most[0]
        p99 = int(np.percentile(lengths, 99, method="higher"))
        return (
            f"{field}: {num_long:,} of {counted(num_rows, 'row')} ({num_long / num_rows:.1%}) are {self.too_long}, "
            f"{limit} tokens; the longest has {int(lengths.max()):,}, and 99 % have at "
            f"most {p99:,}. Raise data.max_length{choice}"
        )

    def require(self, rows: Rows, kept: Ints) -> None:  # noqa: B027 (most kinds require nothing)
        """Checks the rows that are trained on.

        Raises:
            DataError: if nothing can be learned from them.
        """

    # ---- samples and batches ----

    @property
    def packed(self) -> bool:
        """Whether rows share samples: as the recipe says, else unless the objective pads."""
        return not self.objective.spec.padded if self.data.packing is None else self.data.packing

    def sample_of(self, pieces: Pieces) -> Ints:
        """Returns the number of the sample of each piece, (N,)."""
        return best_fit(pieces.lengths(), self.data.max_length) if self.packed else np.arange(len(pieces))

    @abstractmethod
    def arrays(self, rows: Rows, order: Ints, policy: str, names: list[str] | None) -> Arrays:
        """Returns what `samples` reads of one pass.

        Args:
            order: the rows of one pass.
            policy: what happens to rows that are too long.
            names: names of the classes, or None.
        """

    @abstractmethod
    def samples(self, rows: Rows, arrays: Mapping[str, Any], pad_id: int, images: Images | None) -> Samples:
        """Returns the samples that these arrays describe."""

    @property
    @abstractmethod
    def batch(self) -> BatchSpec:
        """The tensors of a micro-batch, without what objectives add on the host."""

    # ---- the report ----

    def parts(self, rows: Rows, row: int) -> list[tuple[str, int, int | None]]:
        """Returns the parts of a row that the report shows apart: name, first token and end, None for the row's.

        It is empty for a row that is shown whole.
        """
        return []

    def shown(self, rows: Rows, row: int, targets: Any) -> tuple[Any, dict[str, Any]]:
        """Returns which tokens of an example in the report are targets, (length,), and what is shown with them."""
        return targets, {}
