"""Checks before the first step that a padded row next to another one has the logits that it has alone.

Padding follows a row. A model may mix it into the text, as convolutions, Fourier transforms and landmarks do, or
take the end of the padding for the end of the row.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from toolkit.data.report import DataReport
from toolkit.data.samples.documents_apart import FILLING, documents_apart, rows_without_padding
from toolkit.data.samples.samples import Batch, Samples
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.full_attention import attends_in_full
from toolkit.model.attention.positions import rotary_limit
from toolkit.objectives.objective import Objective
from toolkit.recipe.recipe import Recipe
from toolkit.run.checks.comparison import ROUNDED, Numbers, compared, logits_of, refused
from toolkit.run.stages.part import RunPart
from toolkit.run.stages.stages import BuiltRun
from toolkit.sharding.fsdp2.fsdp import class_name
from toolkit.terminal import LongAction

SAMPLES = 64
"""Number of samples among which the shortest and the longest row are chosen."""

CHECKED_TOKENS = 512
"""The most tokens of a compared row of text: its logits are whole, and training on longer rows takes less memory."""

FEW_TOKENS = 64
"""The same if tokens meet in full attention alone: longer rows go through no other code."""


class PaddedRows(RunPart):
    """Rows of a model in which padding changes a row have none, each in a micro-batch of its own."""

    def check(self, run: BuiltRun) -> None:
        why, training = _check_padding(run), self.recipe.training
        if why is None:
            if (told := changed_by_longer_rows(run.inner, self.recipe, run.data.report)) is not None:
                self.opened.console.warn(told)
            return
        if (size := training.micro_batch_size) > 1:
            samples = size * training.gradient_accumulation_steps
            raise BadInputError(
                f"training.micro_batch_size: {size} rows would be padded, and {why}; set training.micro_batch_size=1, "
                f"which pads none, and training.gradient_accumulation_steps={samples} for the same steps"
            )
        run.objective.pads = False
        self.facts["padding"] = f"none, a micro-batch is one row: {why}"


def _check_padding(run: BuiltRun) -> str | None:
    """Returns why rows must have no padding, or None if padding changes nothing. Collective.

    Raises:
        BadInputError: if padding changes rows, and the recipe needs padded rows.
    """
    opened, objective, samples = run.opened, run.objective, run.data.train
    recipe, spec = opened.recipe, opened.recipe.objective.spec
    if samples.has_images:
        return None
    pads = objective.apart if spec.compares_completions else not run.data.report.packing
    if not pads or recipe.sharding.sequence > 1:  # parts of rows are checked by themselves
        return None
    with LongAction(opened.console, "checking that padding changes no row"):
        why = changed_by_padding(run.inner, objective, samples, opened.device, opened.in_16_bits)
    if why is not None and (spec.compares_completions or spec.has_teacher):
        raise BadInputError(f"objective.kind: {spec.kind} pads rows, and {why}; train another model")
    return why


def changed_by_longer_rows(model: nn.Module, recipe: Recipe, report: DataReport) -> str | None:
    """Returns a warning if a long row changes the rotary embeddings of the others of its micro-batch, or None."""
    limit, longest = rotary_limit(model), recipe.data.max_length
    if limit is None or not (report.packing or recipe.training.micro_batch_size > 1):
        return None
    if report.train is not None and not report.streaming:  # of a stream it is the first window
        longest = min(longest, int(report.train.longest["tokens"]))
    if longest <= limit[1]:
        return None
    return (
        f"model.name_or_path: the rotary embeddings of {class_name(base_of(model))} ({limit[0]}) change for a whole "
        f"micro-batch if one row has more than {limit[1]:,} tokens, and the longest has {longest:,}: a shorter row is "
        f"not computed as it is alone. Set data.max_length={limit[1]}, or data.packing=false and "
        "training.micro_batch_size=1"
    )


@torch.no_grad()
def changed_by_padding(
    model: nn.Module, objective: Objective, samples: Samples, device: torch.device, in_16_bits: bool
) -> str | None:
    """Compares logits of a short and a long row in one batch with those of each alone. Every rank calls this.

    Returns:
        A description of what differs, or None if nothing does.

    Raises:
        BadInputError: if the model cannot run on a row of the data alone.
    """
    batch = _short_and_long(samples)
    if "segments" in batch:
        batch = {name: documents_apart(batch)[name] for name in ("input_ids", "labels", "position_ids", "lengths")}
    rows = rows_without_padding(batch)
    most = FEW_TOKENS if attends_in_full(model) else CHECKED_TOKENS
    if samples.continues_text and batch["input_ids"].shape[1] > most:
        rows, batch = _shortened(rows, most)
    name = class_name(base_of(model))

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
    numbers = range(min(SAMPLES, len(samples)))
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
