"""Makes documents of a source's rows in this process or in several: the same ones, in the order of the rows.

This process alone reads the lines and writes the documents, which takes a fiftieth of the time; so one file feeds all
cores.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import psutil
import pyarrow as pa

from toolkit.data.documents.encode import Document, Encoder
from toolkit.data.documents.fast_tokens import OtherTokensError
from toolkit.data.layouts.layout import Layout
from toolkit.data.rows.readers import Row, Shard, mapped, row_of_line, stored_in
from toolkit.errors import DataError
from toolkit.ranks import usable_cores

BATCH_ROWS = 64
"""Number of rows that are tokenised in one call."""

ALONE_SECONDS = 5.0
"""CPU time that this process takes before `auto` starts others, which takes them about as much. Not wall time: on a
loaded machine a few rows would start them."""

PROCESS_BYTES = 2**30
"""Host memory that `auto` counts for a process: its libraries, a tokenizer and a few batches of rows."""


@dataclass(frozen=True)
class Batch:
    """Rows that follow each other in a shard.

    Attributes:
        number: of the shard.
        shard: without the table that its rows are in.
        before: number of rows of the shard that come before these.
        stored: rows, or the lines that hold them, which a process reads faster than it could unpack a row.
    """

    number: int
    shard: Shard
    before: int
    stored: list[Any]

    def rows(self) -> list[Row]:
        """Returns the rows, those of lines read."""
        if self.shard.kind != "lines":
            return self.stored
        first = self.shard.start == 0 and self.before == 0
        return [row_of_line(line, at_start=first and number == 0) for number, line in enumerate(self.stored)]


@dataclass(frozen=True)
class Work:
    """What makes documents of batches of rows. Each process has it once."""

    layout: Layout
    encoder: Encoder
    schema: pa.Schema

    def documents(self, batch: Batch) -> pa.RecordBatch:
        """Returns a record for each row, with the columns of `schema`."""
        encoder, rows = self.encoder, batch.rows()
        if encoder.images is not None:
            encoder = replace(encoder, image_root=image_root(batch.shard, encoder.image_root))
        if batch.shard.map is not None:
            rows = list(mapped(iter(rows), batch.shard.map, batch.shard, batch.before))
        try:
            documents: list[Document] = encoder.documents(rows, self.layout)
        except OtherTokensError as error:
            where = f"{batch.shard.path}, rows {batch.before + 1} to {batch.before + len(rows)}"
            raise OtherTokensError(f"{where}: {error}") from None
        columns = {name: [document[name] for document in documents] for name in self.schema.names if name != "shard"}
        return pa.RecordBatch.from_pydict({**columns, "shard": [batch.number] * len(rows)}, schema=self.schema)


def image_root(shard: Shard, named: Path | None) -> Path:
    """Returns the folder that paths of images start from: the one that the recipe names, or that of the rows."""
    return named if named is not None else Path(shard.path).expanduser().resolve().parent


def encoded(work: Work, shards: list[Shard], processes: int | Literal["auto"]) -> Iterator[pa.RecordBatch]:
    """Yields the documents of all rows, in order.

    Args:
        processes: how many tokenise. With `auto` this one does, and after a few CPU seconds as many as there are cores.

    Raises:
        DataError: if a file cannot be read, or a process is killed.
        BadInputError: if the user's function that maps rows fails.
    """
    unread = _batches(shards)
    if processes == "auto":
        started = time.process_time()
        while time.process_time() - started < ALONE_SECONDS and (batch := next(unread, None)) is not None:
            yield work.documents(batch)
        processes = affordable_processes()
    following = next(unread, None)
    if following is None:
        return
    unread = chain([following], unread)
    yield from map(work.documents, unread) if processes == 1 else _in_processes(work, unread, processes)


def affordable_processes() -> int:
    """Returns the number of processes for which there are cores and memory."""
    if multiprocessing.current_process().daemon:  # such a process may have no children
        return 1
    return max(1, min(usable_cores(), int(psutil.virtual_memory().available) // PROCESS_BYTES))


def _batches(shards: list[Shard]) -> Iterator[Batch]:
    for number, shard in enumerate(shards):
        bare, before, stored = replace(shard, table=None), 0, stored_in(shard)
        while some := list(islice(stored, BATCH_ROWS)):
            yield Batch(number, bare, before, some)
            before += len(some)


def _in_processes(work: Work, unread: Iterator[Batch], processes: int) -> Iterator[pa.RecordBatch]:
    """Yields the documents of each batch; at most a few batches more than there are processes are in memory."""
    waiting: deque[Future[pa.RecordBatch]] = deque()
    with _forking_from_a_fresh_process() as context:
        pool = ProcessPoolExecutor(processes, context, _begin, (work,))
        try:
            for batch in unread:
                waiting.append(pool.submit(_documents, batch))
                if len(waiting) > processes + 2:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "data.num_proc: a process that tokenises was killed, as happens where memory runs out; set a smaller "
                "number"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _forking_from_a_fresh_process() -> Iterator[multiprocessing.context.ForkServerContext]:
    """Starts processes from one that has imported the libraries and nothing else, which ends with the block.

    A fork of this process would keep locks that other threads hold at that moment, and processes that start from
    nothing import torch each.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["toolkit.data.build"])
    main = sys.modules["__main__"]
    # No process runs the caller's script, which so needs no `if __name__ == "__main__"`.
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield context
    finally:
        sys.modules["__main__"] = main
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # it would keep the libraries in memory


_work: list[Work] = []
"""In a process that tokenises, what it does."""


def _begin(work: Work) -> None:
    _work.append(work)
    atexit.register(_work.clear)  # readers of files do not close without their libraries
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that reads the rows
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _documents(batch: Batch) -> pa.RecordBatch:
    return _work[0].documents(batch)
