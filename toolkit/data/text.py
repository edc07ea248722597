"""Plain text to samples: documents become one stream of tokens, cut into blocks of equal length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

IGNORED = -100
"""The label of a token that is no target; torch's cross-entropy skips it."""


ROWS_SHOWN = 20
"""Row numbers listed for each reason of dropping."""


@dataclass
class RowCount:
    """What became of the rows. `dropped` holds row numbers by reason, the first few of each."""

    read: int = 0
    kept: int = 0
    dropped: dict[str, list[int]] = field(default_factory=dict)
    num_dropped: int = 0

    def keep(self, problem: str | None, row: int) -> bool:
        """Counts one row; whether it is kept."""
        self.read += 1
        if problem is None:
            self.kept += 1
            return True
        self.num_dropped += 1
        rows = self.dropped.setdefault(problem, [])
        if len(rows) < ROWS_SHOWN:
            rows.append(row)
        return False


def problem_of(text: object) -> str | None:
    """Why a row's text cannot be trained on; None where it can."""
    if text is None:
        return "null"
    if not isinstance(text, str):
        return f"not text but {type(text).__name__}"
    return None if text.strip() else "empty"


def cut_blocks(documents: Iterable[list[int]], max_length: int, pad_id: int) -> Iterator[dict[str, list[int]]]:
    """Blocks of exactly `max_length` tokens that together hold every token as a target once.

    A block starts with the last token of the block before, so that its own first token is predicted
    too; only the first token of a document, which nothing precedes, is no target. Positions restart
    with each document, by which transformers keeps attention inside documents. The last block is
    filled up with `pad_id`, which is no target.

    Args:
        documents: token ids, the end-of-text token included.
        max_length: T, at least 2.

    Yields:
        `input_ids`, `labels` and `position_ids`, each of length T.
    """
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for document in documents:
        tokens += document
        labels += [IGNORED, *document[1:]]
        positions += range(len(document))
        start = 0
        while len(tokens) - start >= max_length:
            yield _block(tokens, labels, positions, slice(start, start + max_length))
            start += max_length - 1
        del tokens[:start], labels[:start], positions[:start]
    if any(label != IGNORED for label in labels[1:]):
        missing = max_length - len(tokens)
        last = positions[-1]
        yield _block(
            tokens + [pad_id] * missing,
            labels + [IGNORED] * missing,
            positions + list(range(last + 1, last + 1 + missing)),
            slice(0, max_length),
        )


def _block(tokens: list[int], labels: list[int], positions: list[int], span: slice) -> dict[str, list[int]]:
    """One sample; the document it starts in restarts at position 0, the ones after keep theirs."""
    found = positions[span]
    restart = next((i for i in range(1, len(found)) if found[i] != found[i - 1] + 1), len(found))
    return {
        "input_ids": tokens[span],
        "labels": [IGNORED, *labels[span][1:]],
        "position_ids": [*range(restart), *found[restart:]],
    }
