"""Finds the tokens that end what is learned, and answers that do not end with one."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from toolkit.data.documents.documents import Documents
from toolkit.data.samples.samples import Samples
from toolkit.data.templates.stops import turn_ends

SAMPLES_LOOKED_AT = 256
"""Number of samples in which these tokens are searched: a template has one or two."""


def learned_ends(samples: Samples, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the tokens that the samples teach as the end of a text or of a turn.

    The last target is not enough to know: in Harmony's earlier turns it may be a token that ends a channel, and a long
    text is cut anywhere.
    """
    possible = turn_ends(tokenizer) | {tokenizer.eos_token_id}
    found: set[int] = set()
    for number in range(min(len(samples), SAMPLES_LOOKED_AT)):
        for ids, targets in samples.tokens(number):
            learned = np.flatnonzero(targets)
            if len(learned):
                found.add(int(ids[learned[-1]]))
    return frozenset(found & possible)


def without_end(source: Documents, special: Set[int]) -> Any:
    """Returns the numbers of the rows with an answer whose last token is not in `special`.

    The targets of the rows must be whole answers.
    """
    found, before = [], 0
    for batch in source.table.to_batches():
        ids, targets = (batch.column(name) for name in ("input_ids", "targets"))
        edges = targets.offsets.to_numpy() - targets.offsets[0].as_py()
        learned = targets.flatten().to_numpy(zero_copy_only=False)
        last = learned.copy()
        last[:-1] &= ~learned[1:]
        rows = np.flatnonzero(edges[1:] > edges[:-1])
        ends = edges[1:][rows] - 1
        last[ends] = learned[ends]  # the next row's first token continues nothing
        places = np.flatnonzero(last)
        unclosed = places[~np.isin(ids.flatten().to_numpy()[places], list(special))]
        found.append(before + np.unique(np.searchsorted(edges, unclosed, side="right") - 1))
        before += len(batch)
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)
