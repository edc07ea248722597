"""Checks that documents that share a sample do not see each other, by their logits together and alone."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from toolkit.checkpoint.export import relative_difference
from toolkit.data.samples.samples import Samples
from toolkit.verify.results import NOT_USED, Row, measured

PACKING_TOLERANCE = 1e-4
"""Tolerance of logits, as a share of the largest one. A leak differs by orders of magnitude more, rounding by less."""

PACKING_SAMPLES = 256
"""The number of samples among which the check looks for the two longest documents that share one."""


def packing_row(model: nn.Module, samples: Samples) -> Row:
    """Returns the row that compares the logits of two documents in one sample with those of each alone."""
    if samples.asked_of_itself is not None:
        return Row("packing", None, None, NOT_USED, "the plain loop runs each completion alone")
    if not samples.is_packed:
        return Row("packing", None, None, NOT_USED, "no documents share a sample")
    found = two_documents(samples)
    if found is None:
        return Row("packing", None, None, NOT_USED, "the samples hold too few tokens")
    first, second, origin = found
    apart = torch.cat([_logits_of_row(model, [first]), _logits_of_row(model, [second])])  # (T, V)
    together = _logits_of_row(model, [first, second])
    difference = relative_difference(together, apart)
    note = f"logits of two documents of {len(first)} and {len(second)} tokens, {origin}, together and alone"
    return measured("packing", difference, PACKING_TOLERANCE, note)


def two_documents(samples: Samples) -> tuple[list[int], list[int], str] | None:
    """Returns the token ids of two documents that share a sample, as long as possible, and says where they are from.

    If no sample holds two documents, takes parts of two samples. Returns None if these have too few tokens.
    """
    looked_at = [samples.documents(number) for number in range(min(PACKING_SAMPLES, len(samples)))]
    pairs = [pair for documents in looked_at for pair in itertools.pairwise(documents)]
    if pairs:
        first, second = max(pairs, key=lambda pair: min(map(len, pair)))
        return first, second, "which share a sample"
    # No sample holds two documents: two halves are put together, no longer than a sample.
    first, second = looked_at[0][0], looked_at[-1][-1]
    half = min(len(first), len(second), samples.max_length) // 2
    return (first[:half], second[-half:], "joined from two samples") if half else None


@torch.no_grad()
def _logits_of_row(model: nn.Module, documents: list[list[int]]) -> torch.Tensor:
    """Returns the logits (T, V) of one row of documents. Positions restart at each document."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(itertools.chain(*documents))], device=device)
    positions = torch.tensor([[i for document in documents for i in range(len(document))]], device=device)
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float()  # type: ignore[no-any-return]
