"""Checks before the first step that a padded row next to another one has the logits that it has alone.

Padding follows a row. A model may mix it into the text, as convolutions, Fourier transforms and landmarks do, or
take the end of the padding for the end of the row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from toolkit.data.samples.documents_apart import FILLING, documents_apart
from toolkit.data.samples.samples import Batch, Samples
from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.full_attention import attends_in_full
from toolkit.objectives.objective import Objective
from toolkit.objectives.rows_alone import rows_without_padding
from toolkit.run.checks.comparison import ROUNDED, Numbers, compared, logits_of, refused
from toolkit.sharding.fsdp2.fsdp import class_name

SAMPLES = 64
"""Number of samples among which the shortest and the longest row are chosen."""

CHECKED_TOKENS = 512
"""The most tokens of a compared row of text: its logits are whole, and training on longer rows takes less memory."""

FEW_TOKENS = 64
"""The same if tokens meet in full attention alone: longer rows go through no other code."""


@torch.no_grad()
def changed_by_padding(
    model: nn.Module, inner: nn.Module, objective: Objective, samples: Samples, device: torch.device, in_16_bits: bool
) -> str | None:
    """Compares logits of a short and a long row in one batch with those of each alone. Every rank calls this.

    Args:
        inner: the model without its wrappers, for its name.

    Returns:
        A description of what differs, or None if nothing does.

    Raises:
        BadInputError: if the model cannot run on a row of the data alone.
    """
    batch = _short_and_long(samples)
    if "segments" in batch:
        batch = {name: documents_apart(batch)[name] for name in ("input_ids", "labels", "position_ids", "lengths")}
    rows = rows_without_padding(batch)
    most = FEW_TOKENS if attends_in_full(inner) else CHECKED_TOKENS
    if samples.continues_text and batch["input_ids"].shape[1] > most:
        rows, batch = _shortened(rows, most)
    name = class_name(base_of(inner))

    def alone() -> Numbers:
        mend = "use the tokenizer that belongs to the model, or train another one"
        with refused(f"data.train: {name} cannot run on a row of it ({{error}}); {mend}"):
            return {str(n): _finite(logits_of(model, objective, row, device)) for n, row in enumerate(rows)}

    def together() -> Numbers:
        padded = _finite(logits_of(model, objective, batch, device))
        return {str(n): padded[n : n + 1] for n in range(len(rows))}

    # All or none: ranks whose rounding differs must run the same forwards.
    outcome = compared(model, alone, together)
    if outcome.error:
        return f"{name} cannot run on padded rows ({outcome.error})"
    if outcome.difference > ROUNDED[in_16_bits]:
        return f"padding changes the logits of a row by {outcome.difference:.1e} of the largest in {name}"
    return None


def _short_and_long(samples: Samples) -> Batch:
    """Returns the shortest and the longest of the first samples, with all their completions if these are compared."""
    numbers: Any = range(min(SAMPLES, len(samples)))
    lengths = [int(samples.batch([number])["lengths"][0]) for number in numbers]
    return samples.batch([lengths.index(min(lengths)), lengths.index(max(lengths))])


def _shortened(rows: list[Batch], most: int) -> tuple[list[Batch], Batch]:
    """Returns beginnings of rows, of at most so many tokens, every other one half as long, and a padded batch."""
    names = ("input_ids", "labels", "position_ids")
    short = []
    for number, row in enumerate(rows):
        tokens = most // 2 if number % 2 == 0 else most
        cut = {name: row[name][:, :tokens] for name in names}
        short.append({**cut, "lengths": torch.tensor([cut["input_ids"].shape[1]])})
    filling = {**FILLING, "position_ids": 0}
    padded = {name: pad_sequence([row[name][0] for row in short], True, filling[name]) for name in names}
    return short, {**padded, "lengths": torch.cat([row["lengths"] for row in short])}


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """Returns logits (B, T, V) or (B, C) as float32, zeros if some are not finite, which the first step reports."""
    return logits.float() if bool(logits.isfinite().all()) else torch.zeros_like(logits, dtype=torch.float32)
