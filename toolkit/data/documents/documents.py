"""Tokenised rows of a source: made once and in parallel, cached by content, memory-mapped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from toolkit.data.documents.byte_tokens import tokens_by
from toolkit.data.documents.encode import FEATURES, STARTS_OF_IMAGES, Encoder, notes_in, records_of
from toolkit.data.documents.processes import Work, encoded
from toolkit.data.images.images import parse
from toolkit.data.layouts.layout import Layout
from toolkit.data.rows.sources import Source
from toolkit.errors import DataError

WRITTEN_BATCHES = 16
"""Batches of rows that are written as one, so that a table has fewer to look through."""


class Named(TypedDict):
    """A run's names for a source whose documents are cached: its own, those of its shards' files, and its loss's.

    `roots` are the folders of the images that each shard's rows name.
    """

    folder: str
    name: str
    paths: list[str]
    told_as: NotRequired[str]
    roots: NotRequired[list[str]]


@dataclass(frozen=True)
class Documents:
    """The rows of one source, good and bad, in order; the good ones with their tokens.

    Attributes:
        name: the source's name.
        layout: the layout in words.
        weight: the source's weight in the mix.
        paths: the file of each shard, with as few parts of its path as distinguish it from the run's others.
        label_names: in the order of their numbers, if the source has them.
        table: rows of the encoder's columns.
        folder: the folder in the cache that holds them; None for streamed rows.
        told_as: the name under which the loss of its rows is reported, if it has one.
        roots: folder of the images of each shard's rows.
        tokens_by: the package that made the tokens, if it is known.
    """

    name: str
    layout: str
    weight: float | None
    paths: list[str]
    label_names: list[str]
    table: pa.Table
    folder: Path | None
    told_as: str | None = None
    roots: tuple[str, ...] = ()
    tokens_by: str | None = None

    def images(self, row: int, start: int | None = None) -> list[tuple[dict[str, Any], str]]:
        """Returns the record and the root of each image of a row, or of its piece that begins with token `start`."""
        if "pictures" not in self.table.column_names:
            return []
        columns = ("pictures", STARTS_OF_IMAGES)
        known = [name for name in columns if name in self.table.column_names]
        of_row = {name: self.table.column(name)[row].as_py() or [] for name in known}  # no list beside rows with images
        return [(record, self.roots[int(self.column("shard")[row])]) for record in records_of(of_row, start)]

    def all_images(self) -> Iterator[list[tuple[dict[str, Any], str]]]:
        """Yields `images` of each row, in order, or nothing if no row may have any."""
        if "pictures" not in self.table.column_names:
            return
        by_row = (records for chunk in self.table.column("pictures").chunks for records in chunk.to_pylist())
        for shard, records in zip(self.column("shard").tolist(), by_row, strict=True):
            yield [(record, self.roots[shard]) for record in parse(records)]

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """Returns a column of numbers, (rows,)."""
        return self.table.column(name).to_numpy()  # type: ignore[no-any-return]

    def turns(self) -> dict[int, list[int]]:
        """Returns, for each row with a sample for each answer, the position after the last token of each."""
        if "ends" not in self.table.column_names:
            return {}
        ends = self.table.column("ends")
        rows = np.flatnonzero(pc.list_value_length(ends).to_numpy())
        return {int(row): ends[int(row)].as_py() for row in rows}

    def problems(self) -> dict[int, str]:
        """Returns why rows cannot be used, by row."""
        problems = self.table.column("problem")
        rows = np.flatnonzero(pc.is_valid(problems).to_numpy())
        return {int(row): problems[int(row)].as_py() for row in rows}

    def notes(self) -> dict[int, list[str]]:
        """Returns, by row, what of a usable row is not learned or not read."""
        notes = self.table.column("note")
        return {int(row): notes_in(notes[int(row)].as_py()) for row in np.flatnonzero(pc.is_valid(notes).to_numpy())}

    def row_name(self, row: int) -> str:
        """Returns a name such as `chat.jsonl:12`: the file, and the line or row in it."""
        shards = self.column("shard")
        path = self.paths[shards[row]]
        # A file of lines may be cut into several shards; rows are counted from the first one.
        first = self.paths.index(path)
        return f"{path}:{row - int(np.searchsorted(shards, first)) + 1}"

    def tokens(self, row: int, start: int = 0, stop: int | None = None) -> tuple[Any, Any]:
        """Returns `input_ids` and `targets` of a part of a row, each (length,); only that part is read."""
        end = None if stop is None else stop - start
        ids, targets = (self.table.column(name)[row].values.slice(start, end) for name in ("input_ids", "targets"))
        return ids.to_numpy(), targets.to_numpy(zero_copy_only=False)


def write_documents(
    source: Source, layout: Layout, encoder: Encoder, num_proc: int | Literal["auto"], folder: Path
) -> None:
    """Tokenises a source's rows into `folder`.

    Raises:
        DataError: if a file cannot be read, or the source holds no rows.
        BadInputError: if the user's function that maps rows fails.
    """
    if not source.shards:  # an opened data set; a first row of files has been read already
        raise DataError(f"{source.field}: {source.name!r} holds no rows; name another file")
    work = work_of(layout, encoder)
    documents, schema = encoded(work, source.shards, num_proc), work.schema
    with pa.OSFile(str(folder / "rows-00000.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as written:
        while together := list(islice(documents, WRITTEN_BATCHES)):
            written.write_table(pa.Table.from_batches(together).combine_chunks())
    facts = {"layout": layout.name, "label_names": list(layout.label_names), "tokens_by": tokens_by(encoder.tokenizer)}
    (folder / "source.json").write_text(json.dumps(facts), encoding="utf-8")


def work_of(layout: Layout, encoder: Encoder) -> Work:
    """Returns what makes documents of rows."""
    import datasets

    own = {name: kind for name, (kind, _) in encoder.columns.items()}
    kinds = {**FEATURES, **own, "shard": "int32"}
    lists = {name: datasets.List(datasets.Value(kind[0])) for name, kind in kinds.items() if isinstance(kind, list)}
    features = datasets.Features({name: lists.get(name) or datasets.Value(kind) for name, kind in kinds.items()})
    return Work(layout, encoder, features.arrow_schema)


def read_documents(cache: Path, named: Named, weight: float | None) -> Documents:
    """Reads what `write_documents` wrote, under the names of this run, because another run may have written it."""
    import datasets

    folder = cache / named["folder"]
    files = sorted(folder.glob("rows-*.arrow"))
    table = datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files]).data.table
    facts = json.loads((folder / "source.json").read_text(encoding="utf-8"))
    return Documents(
        name=named["name"],
        paths=named["paths"],
        **facts,
        weight=weight,
        table=table,
        folder=folder,
        told_as=named.get("told_as"),
        roots=tuple(named.get("roots", ())),
    )
