"""Whether documents that share a sample see each other: their logits together and alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import datasets
import torch
from torch import nn

from toolkit.export import relative_difference
from toolkit.verify.results import NOT_USED, Row, measured

PACKING_TOLERANCE = 1e-4
"""Of logits, as a share of the largest; a leak is orders of magnitude more, rounding less."""

PACKING_SAMPLES = 256
"""Samples among which the best packed one is looked for."""


def packing_row(model: nn.Module, samples: datasets.Dataset) -> Row:
    """Documents that share a sample must not see each other: their logits are those of each alone."""
    found = two_documents(samples)
    if found is None:
        return Row("packing", None, None, NOT_USED, "the samples have no position_ids, or hold too few tokens")
    first, second, origin = found
    apart = torch.cat([_logits(model, [first]), _logits(model, [second])])  # (T, V)
    together = _logits(model, [first, second])
    difference = relative_difference(together, apart)
    note = f"logits of two documents of {len(first)} and {len(second)} tokens, {origin}, together and alone"
    return measured("packing", difference, PACKING_TOLERANCE, note)


def two_documents(samples: datasets.Dataset) -> tuple[list[int], list[int], str] | None:
    """Token ids of two documents that share a sample, as long as there are, and where they are from."""
    if "position_ids" not in samples.column_names:
        return None
    rows = samples[: min(PACKING_SAMPLES, len(samples))]
    pairs = [pair for row in zip(rows["input_ids"], rows["position_ids"], strict=True) for pair in _neighbours(*row)]
    if pairs:
        first, second = max(pairs, key=lambda pair: min(map(len, pair)))
        return first, second, "which share a sample"
    half = len(rows["input_ids"][0]) // 2
    first, second = rows["input_ids"][0][:half], rows["input_ids"][-1][-half:]
    return (first, second, "joined from two samples") if half else None


def _neighbours(ids: list[int], positions: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    starts = [i for i in range(len(ids)) if i == 0 or positions[i] != positions[i - 1] + 1]
    for start, middle, end in zip(starts, starts[1:], [*starts[2:], len(ids)], strict=False):
        yield ids[start:middle], ids[middle:end]


@torch.no_grad()
def _logits(model: nn.Module, documents: list[list[int]]) -> torch.Tensor:
    """(T, V) of one row of documents, whose positions restart."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(itertools.chain(*documents))], device=device)
    positions = torch.tensor([[i for document in documents for i in range(len(document))]], device=device)
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float()  # type: ignore[no-any-return]
