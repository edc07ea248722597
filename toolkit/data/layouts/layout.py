"""A layout of columns, and how the rows of a source that has it are read as examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from toolkit.data.layouts.messages import UnreadMedium, refuse_media
from toolkit.data.layouts.template_arguments import COLUMN, arguments_of
from toolkit.data.rows.examples import Example
from toolkit.data.rows.image_places import COLUMNS, OF_REJECTED, column_of
from toolkit.data.rows.readers import Row
from toolkit.data.rows.values import RowProblem, RowValues, is_empty, key_shown

UNREAD = "which is not read; leave such rows out"
"""Why a medium is not read that nothing here reads."""


@dataclass(frozen=True)
class ColumnLayout:
    """A way to lay out rows in columns.

    Attributes:
        name: its name in reports and errors.
        needed: the meanings of the columns that it needs.
        read: reads an example from the values of a row; raises RowProblem if the row cannot be used.
        optional: the meanings of the columns that it reads where a row has them.
        of_all_rows: those of them that all rows of a source have, or none.
        has_conversations: whether all rows are conversations, which a chat template writes.
        some_conversations: whether a row is one if it holds messages, and text otherwise.
        is_plain: whether rows are plain text, all of which is learned.
        names: meaning of a column -> its other usual name, in sources that have none of the first.
        elsewhere: meaning of a column without effect here -> the end of a sentence about where it has one, in which
            `{columns}` is the field that names columns.
    """

    name: str
    needed: tuple[str, ...]
    read: Callable[[RowValues], Example]
    optional: tuple[str, ...] = ()
    of_all_rows: tuple[str, ...] = ()
    has_conversations: bool = False
    some_conversations: bool = False
    is_plain: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """How a source's rows are laid out.

    Attributes:
        form: the layout that its columns match.
        columns: meaning of a column -> its name.
        label_names: names of the numbers in the column of labels, if the source has them.
        idle: meanings of columns whose values the objective does not use.
        images: whether conversations may have images.
        blind: why images are not read where they are, and what to do.
        templated: whether pairs whose prompt is text are conversations.
    """

    form: ColumnLayout
    columns: dict[str, str]
    label_names: tuple[str, ...] = ()
    idle: frozenset[str] = frozenset()
    images: bool = False
    blind: str = UNREAD
    templated: bool = False

    @property
    def name(self) -> str:
        return self.form.name

    @property
    def has_conversations(self) -> bool:
        """Whether all rows of the source are conversations, which a chat template writes."""
        return self.templated or self.form.has_conversations

    @property
    def may_have_conversations(self) -> bool:
        """Whether a row of the source may be one."""
        return self.has_conversations or self.form.some_conversations

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
        columns = {what: name for what, name in self.columns.items() if what not in self.idle}
        values = RowValues(row, columns, self.label_names, None, self.templated)
        try:
            known = {*self.columns.values(), *((*COLUMNS, OF_REJECTED) if self.images else ())}
            refuse_media({name: value for name, value in row.items() if name not in known}, "the row")
            values.images = column_of(row) if self.images else None
            example = self.form.read(values)
        except UnreadMedium as found:
            raise RowProblem(f"{found}, {self.blind if found.is_image else UNREAD}") from found
        if values.images and not example.is_conversation:
            raise RowProblem(
                "the row has images but is not a conversation, so their position in the text is unknown; write the "
                "prompt and its answer as messages"
            )
        read = {*values.taken, *(COLUMNS if self.images else ())}
        if example.is_conversation:  # only a chat template takes arguments
            example = example.with_arguments(arguments_of(row.get(COLUMN)))
            read.add(COLUMN)
        unread = [name for name, value in row.items() if name not in read and not is_empty(value)]
        return example, [f"column {key_shown(name)} is not read" for name in unread]
