"""Checks before the first step that rows that share a sample do not see each other in this model.

In transformers restarting positions keep attention inside documents only without an attention mask and
without a cache, and not in every model and kernel; if they do not, logits are silently wrong.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn

from toolkit.checkpoint.export import relative_difference
from toolkit.data.samples.samples import Batch, Samples, sample_of, stack
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.attention import attention_of
from toolkit.model.attention.full_attention import attends_in_full
from toolkit.model.attention.positions import num_positions
from toolkit.model.structure.model_parts import sees
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.objectives.objective import Objective
from toolkit.run.checks.comparison import ROUNDED, SAME, logits_of, on_text_alone, refused
from toolkit.sharding.fsdp2.fsdp import class_name

SAMPLES = 256
"""Number of samples among which the one with the longest last document is chosen."""


MOST_TOKENS = 2048
"""The most tokens of the compared samples together: their logits are whole, and training on longer rows takes less
memory than those. The documents of a longer sample are shortened."""


MOST_DOCUMENTS = 16
"""The last documents of a longer sample, which are kept."""


FEW_TOKENS, FEW_DOCUMENTS = 96, 3
"""The same of a sample, in which all documents are shortened, if tokens meet in full attention alone: longer ones go
through no other code. For 135M parameters the three forwards take 0.9 s of CPU, and of 512 tokens 5.7 s."""


class LeakError(BadInputError):
    """Rows that share a sample see each other, or the model cannot run them.

    Args:
        why: what was found.
        mend: what to do, a sentence.
    """

    def __init__(self, why: str, mend: str) -> None:
        super().__init__(why, mend)  # ranks send it to each other: it is made again of these
        self.why = why

    def __str__(self) -> str:
        return f"data.packing: {'. '.join(self.args)}"


@torch.no_grad()
def check_leaks(
    model: nn.Module,
    objective: Objective,
    samples: Samples,
    micro_batch_size: int,
    device: torch.device,
    in_16_bits: bool,
    compiled: bool = False,
) -> tuple[float, float] | None:
    """Compares logits on a real micro-batch, or as much of it as is short. Every rank calls this, on the same samples.

    Args:
        compiled: whether blocks are compiled, for the shape of the micro-batch.

    Returns:
        The last document's change when the others are replaced, and its difference from its logits alone;
        None if no sample holds two documents, or the logits are not finite.

    Raises:
        LeakError: if they are too large.
    """
    few = not compiled and attends_in_full(model)
    most, in_all = (FEW_TOKENS, 2 * FEW_TOKENS) if few else (MOST_TOKENS, MOST_TOKENS)
    length = min(samples.max_length, most, num_positions(model) or most)  # a row may be longer than each document
    numbers = _numbers_to_compare(samples, min(micro_batch_size, in_all // length))
    if numbers is None:
        return None
    batch, pieces = samples.batch(numbers), _pieces(samples, numbers[0])
    alone_length = length if samples.is_packed and not few else None
    if few:
        rows = [_shortened(_pieces(samples, number)[-FEW_DOCUMENTS:], length) for number in numbers]
        batch, pieces = _stacked(rows, samples.pad_id), rows[0]
    elif batch["input_ids"].shape[1] > MOST_TOKENS:
        pieces = _shortened(pieces[-MOST_DOCUMENTS:], length)
        batch = _stacked([pieces], samples.pad_id, length)
    span = slice(sum(len(ids) for ids, _ in pieces[:-1]), sum(len(ids) for ids, _ in pieces))
    # Without position_ids the model uses its own, which RoBERTa's family counts from another number.
    by_itself = _stacked([pieces[-1:]], samples.pad_id, alone_length)
    ids = {"input_ids": by_itself["input_ids"]}
    what = f"{class_name(base_of(model))} with attention {attention_of(model)!r}"
    with without_dropout(model):
        with on_text_alone(model):
            alone = _few_logits(model, objective, ids, device, slice(span.stop - span.start))
        cannot = f"{what} cannot run rows that share a sample ({{error}})"
        with refused(cannot, partial(LeakError, mend=samples.keep_apart)):
            both = (batch, _others_replaced(batch, span.start))
            together, replaced = (_few_logits(model, objective, one, device, span) for one in both)
    found = (relative_difference(replaced, together), relative_difference(together, alone))
    if not all(map(math.isfinite, found)):
        return None  # the first step will say so
    require_apart(*found, in_16_bits, what, samples.keep_apart)
    return found


@torch.no_grad()
def check_causal(model: nn.Module, objective: Objective, device: torch.device) -> None:
    """Tests whether a token's logits depend on later ones, if the configuration leaves that open. All ranks call it.

    They do in encoders unless `is_decoder` is set, and in some models that read images (PaliGemma): the loss would
    be taken over tokens that the model sees.

    Raises:
        BadInputError: if they do, or if the model needs an image, sound or another input in addition to the text.
    """
    config = base_of(model).config.get_text_config()
    if getattr(config, "is_decoder", True) and not sees(base_of(model)):
        return  # the configuration has no `is_decoder`, or it is true
    ids = torch.arange(1, 17, device=device)[None] % config.vocab_size
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % config.vocab_size
    with without_dropout(model), on_text_alone(model):
        one, two = (objective.logits(model, {"input_ids": each})[0, :-1].float() for each in (ids, other))
    # Zero in a decoder, in 16 bits too: kernels and shapes are the same.
    if relative_difference(two, one) > SAME[False]:
        raise BadInputError(
            f"model.name_or_path: in {class_name(base_of(model))} the logits of a token depend on later tokens, so it "
            "would see what it is to predict; name a decoder, or set is_decoder to true in config.json"
        )


Pieces = list[tuple[list[int], list[bool]]]
"""The tokens of each document of a sample, and which of them are targets."""


def _pieces(samples: Samples, number: int) -> Pieces:
    return [(ids, [True] * len(ids)) for ids in samples.documents(number)]


def _shortened(pieces: Pieces, length: int) -> Pieces:
    """Returns the beginnings of documents, equal shares of `length` tokens."""
    share = length // len(pieces)
    return [(ids[:share], known[:share]) for ids, known in pieces]


def _stacked(rows: list[Pieces], pad_id: int, length: int | None = None) -> Batch:
    """Returns a batch (B, T) of samples; T is that of the longest without a length."""
    longest = max(sum(len(ids) for ids, _ in row) for row in rows)
    return stack([sample_of(row, length or longest, pad_id) for row in rows])


def _numbers_to_compare(samples: Samples, micro_batch_size: int) -> list[int] | None:
    """Returns the numbers of a micro-batch whose first sample holds several documents, the last as long as possible."""
    looked_at = range(min(SAMPLES, len(samples)))
    lengths = {number: [len(ids) for ids in samples.documents(number)] for number in looked_at}
    shared = {number: found[-1] for number, found in lengths.items() if len(found) > 1}
    if not shared:
        return None
    # The first of equally long ones, so that every rank uses the same samples.
    best = max(shared, key=lambda number: (shared[number], -number))
    return [best, *[number for number in looked_at if number != best][: micro_batch_size - 1]]


def _others_replaced(batch: Batch, end: int) -> Batch:
    """Returns the batch with the tokens of all but the last document of the first sample reversed."""
    ids = batch["input_ids"].clone()
    ids[0, :end] = ids[0, :end].flip(0).roll(1)
    return {**batch, "input_ids": ids}


def _few_logits(
    model: nn.Module, objective: Objective, batch: Batch, device: torch.device, tokens: slice
) -> torch.Tensor:
    """Returns the logits of some tokens of the first sample, (t, V), in float32."""
    # A copy: a view would keep the logits of all tokens.
    return logits_of(model, objective, batch, device)[0, tokens].to(torch.float32, copy=True)


def require_apart(changes: float, differs: float, in_16_bits: bool, what: str, mend: str, others: str = "") -> None:
    """Checks what was measured of a row that shares its sample.

    Args:
        changes: change of its logits with the others; kernels and shapes stay.
        differs: their difference from those of the row alone, with another rounding.
        what: names the model.
        others: what of the others was changed.

    Raises:
        LeakError: if one is too large.
    """
    if changes > SAME[in_16_bits]:
        how = f"change by {changes:.1e} of the largest when {others or 'the others are'} replaced, more than"
        how = f"{how} {SAME[in_16_bits]:.0e}"
    elif differs > ROUNDED[in_16_bits]:
        how = f"differ by {differs:.1e} of the largest from its own alone, more than {ROUNDED[in_16_bits]:.0e}"
    else:
        return
    raise LeakError(f"rows that share a sample see each other in {what}: the logits of one {how}", mend)
