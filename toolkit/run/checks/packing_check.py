"""Checks before the first step that rows that share a sample do not see each other in this model.

In transformers restarting positions keep attention inside documents only without an attention mask and
without a cache, and not in every model and kernel; if they do not, logits are silently wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from toolkit import ranks
from toolkit.checkpoint.export import relative_difference
from toolkit.data.samples.image_samples import ImageSamples, image_samples_of
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
from toolkit.run.stages.part import RunPart
from toolkit.run.stages.rows import may_pad, without_packing
from toolkit.run.stages.stages import BuiltRun
from toolkit.sharding.fsdp2.fsdp import class_name, sharded_modules
from toolkit.terminal import Pass

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
    _require_documents(batch, samples, numbers)
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


def _require_documents(batch: Batch, samples: Samples, numbers: list[int]) -> None:
    """Requires that a micro-batch holds its documents one after the other, and that positions restart with each."""
    for row, number in enumerate(numbers):
        end = 0
        for ids in samples.documents(number):
            start, end = end, end + len(ids)
            assert batch["input_ids"][row, start:end].tolist() == ids, "tokens of a sample are not its documents'"
            assert batch["position_ids"][row, start:end].tolist() == list(range(len(ids))), "positions do not restart"


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


# ---- Checks before the first step, on the run's rows, that images reach their own row in the model and no other ----

LOOKED_AT = 256
"""Number of samples among which rows are chosen."""

TRIED = 8
"""Number of rows with images that are each tried alone."""


class SightError(BadInputError):
    """Rows with images do not reach the model as they should."""


@dataclass(frozen=True)
class SightCheck:
    """Measured differences, as shares of the largest logit.

    Attributes:
        seen: change of a row's logits with its image.
        leaks: change of the logits of rows next to it; 0 if none shares the sample.
        alone: the largest difference of a row next to others from the row alone.
        shared: whether several rows share the sample.
    """

    seen: float
    leaks: float
    alone: float
    shared: bool


@torch.no_grad()
def check_images(
    model: nn.Module, objective: Objective, samples: ImageSamples, device: torch.device, in_16_bits: bool
) -> SightCheck | None:
    """Compares logits on a real sample with an image. Every rank calls this, on the same samples.

    Returns:
        The measured differences, or None if no sample has an image, or the logits are not finite.

    Raises:
        SightError: if an image has no effect or is learned as text, or the model cannot take it on every rank.
        LeakError: if rows that share a sample see each other.
    """
    found = next((n for n in _shared_samples_first(samples) if samples.has_image(n)), None)
    if found is None:
        return None
    require_no_targets(samples)
    with without_dropout(model):
        _require_features(model, objective, samples, device)
        _require_units(model, objective, samples, found, device)
        check = _measure(model, objective, samples, found, device)
    if not all(map(math.isfinite, (check.seen, check.leaks, check.alone))):
        return None  # the first step will say so
    name = _row_name(samples, found, _first_seen(samples, found))
    if check.seen == 0.0:
        raise SightError(
            f"{name}: its image changes no logit of {_class(model)}, so it would not be seen; train another model"
        )
    require_apart(check.leaks, check.alone, in_16_bits, f"{_class(model)} ({name})", MEND, "the image of another is")
    return check


def require_no_targets(samples: ImageSamples) -> None:
    """Checks that no token that stands for an image is learned.

    Raises:
        SightError: if one is.
    """
    placeholders = np.array(sorted(samples.images.token_ids))
    for number in _looked_at(samples):
        for place, (ids, targets) in enumerate(samples.tokens(number)):
            if np.any(np.isin(ids, placeholders) & np.asarray(targets, dtype=bool)):
                raise SightError(
                    f"{_row_name(samples, number, place)}: tokens that stand for an image would be learned as text; "
                    "report this"
                )


def _require_features(model: nn.Module, objective: Objective, samples: ImageSamples, device: torch.device) -> None:
    """Tries rows with different images alone: transformers refuses one if features and places differ in number.

    Next to others, a row with too many could balance one with too few.
    """
    for number, place in _rows_of_unlike_sizes(samples):
        name = _row_name(samples, number, place)
        with refused(f"{name}: {_class(model)} cannot take its images: {{error}}", SightError):
            _logits(model, objective, samples.alone(number, place), device)


def _require_units(
    model: nn.Module, objective: Objective, samples: ImageSamples, shown: int, device: torch.device
) -> None:
    """Raises SightError if a sample with images runs other units than one without: ranks would wait for each other."""
    blind = next((number for number in _looked_at(samples) if not samples.has_image(number)), None)
    if blind is None:
        return
    of_shown, of_blind = (_units_run(model, objective, samples.batch([n]), device) for n in (shown, blind))
    if of_shown != of_blind:
        other = sorted(set(of_shown) ^ set(of_blind)) or ["the same ones in another order"]
        name = _row_name(samples, shown, _first_seen(samples, shown))
        raise SightError(
            f"{name}: with its images {_class(model)} runs other units than without any ({', '.join(other[:3])}), so "
            "that ranks would deadlock; report this"
        )


def _units_run(model: nn.Module, objective: Objective, batch: Batch, device: torch.device) -> list[str]:
    """Returns the names of the units that a forward gathers, in their order."""
    found: list[str] = []
    names = {id(module): name or "the root" for name, module in model.named_modules()}
    units: list[Any] = list(sharded_modules(model))
    hooks = [unit.register_forward_pre_hook(lambda module, _: found.append(names[id(module)])) for unit in units]
    try:
        _logits(model, objective, batch, device)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _measure(
    model: nn.Module, objective: Objective, samples: ImageSamples, number: int, device: torch.device
) -> SightCheck:
    """Measures a sample in which the first row with an image gets another image."""
    seen, first = samples.seen(number), _first_seen(samples, number)
    others_seen = [*seen[:first], [_changed_image(seen[first][0]), *seen[first][1:]], *seen[first + 1 :]]
    together, changed = (
        _logits(model, objective, samples.batch([number], [images]), device) for images in (seen, others_seen)
    )
    # The small image of a batch without any is after all pieces.
    alone = [_logits(model, objective, samples.alone(number, place), device)[0] for place in range(len(seen))]
    pairs = list(zip(changed, together, strict=True))[: len(seen)]
    others = [pair for place, pair in enumerate(pairs) if place != first]
    return SightCheck(
        seen=relative_difference(*pairs[first]),
        leaks=max((relative_difference(*pair) for pair in others), default=0.0),
        alone=max(relative_difference(together[place], one) for place, one in enumerate(alone)),
        shared=len(pairs) > 1,
    )


def _looked_at(samples: ImageSamples) -> range:
    return range(min(LOOKED_AT, len(samples)))


def _first_seen(samples: ImageSamples, number: int) -> int:
    """Returns the place of the first piece of a sample that has an image."""
    return next(place for place, (_, found) in enumerate(samples.records(number)) if found)


def _rows_of_unlike_sizes(samples: ImageSamples) -> list[tuple[int, int]]:
    """Returns sample and place of pieces with images of different sizes: the longest ones, and the shortest."""
    by_sizes: dict[str, tuple[int, int, int]] = {}
    for number in _looked_at(samples):
        pieces = zip(samples.records(number), samples.tokens(number), strict=True)
        for place, ((_, records), (ids, _)) in enumerate(pieces):
            if records:
                sizes = str(sorted(str(record.get("size")) for record, _ in records))
                by_sizes.setdefault(sizes, (len(ids), number, place))
    in_order = sorted(by_sizes.values(), reverse=True)
    chosen = in_order if len(in_order) <= TRIED else [*in_order[: TRIED - 1], in_order[-1]]
    return [(number, place) for _, number, place in chosen]


def _row_name(samples: ImageSamples, number: int, place: int) -> str:
    name: str = samples.rows.name(samples.records(number)[place][0])
    return name


def _class(model: nn.Module) -> str:
    return class_name(base_of(model))


MEND = "Set data.packing=false, or another model.attention"


def _shared_samples_first(samples: ImageSamples) -> list[int]:
    """Returns the numbers of samples, those of several rows first."""
    return sorted(_looked_at(samples), key=lambda number: (len(samples.places(number)) < 2, number))


def _changed_image(image: Image.Image) -> Image.Image:
    """Returns another image of the same size with half of the bits flipped, so that no image stays the same."""
    pixels = np.asarray(image)
    return Image.fromarray(pixels ^ np.random.default_rng(0).integers(0, 256, pixels.shape, dtype=np.uint8))


def _logits(model: nn.Module, objective: Objective, batch: Batch, device: torch.device) -> list[torch.Tensor]:
    """Returns the logits of each document of a sample, (t, V), without padding, as training computes them."""
    prepared = objective.on_host(batch)
    found: list[torch.Tensor] = []
    logits = logits_of(model, objective, prepared, device).float()
    for row, positions, length in zip(logits, prepared["position_ids"], prepared["lengths"].tolist(), strict=True):
        starts = (positions[:length] == 0).nonzero().flatten().tolist()
        found += [row[start:end] for start, end in zip(starts, [*starts[1:], length], strict=True)]
    return found


# ---- Rows that share a sample: the run trains on them only if they do not see each other ----


class PackedRows(RunPart):
    """Where rows see each other, and the recipe leaves packing open, each gets a sample of its own."""

    def check(self, run: BuiltRun) -> None:
        sharded, on_meta = run.sharded, run.on_meta
        fact, leak = check_packing(run)
        if leak is not None:
            sharded.padded, sharded.data = leak, without_packing(self.recipe, on_meta.tokenizer)
            sharded.objective = on_meta.build_objective(packed=False, apart=True)
        self.facts["packing"] = fact if sharded.padded is None else f"none, each row is padded: {sharded.padded}"


def check_packing(run: BuiltRun) -> tuple[str, str | None]:
    """Checks that no token attends to later ones, and that packed rows do not attend to each other. Collective.

    Returns:
        What the summary says of packed rows, and why rows must not share samples if the recipe leaves packing open.

    Raises:
        BadInputError: if they see each other, and the recipe asks for packing.
    """
    opened, objective, data = run.opened, run.objective, run.data
    recipe, model, device = opened.recipe, run.inner, opened.device
    if recipe.objective.spec.predicts_next_tokens and recipe.sharding.sequence == 1:
        check_causal(model, objective, device)
    train = data.train
    with_images = image_samples_of(train)
    # Both completions of a pair share a sample, whether or not it is packed, until the objective keeps them apart.
    if with_images is None and not train.is_packed and (objective.apart or not train.shares_samples):
        return "", None
    found, leak, size = None, None, recipe.training.micro_batch_size
    try:
        with Pass(opened.console, "checking that packed rows do not attend to each other"):
            if with_images is not None:
                seen = check_images(model, objective, with_images, device, opened.in_16_bits)
                found = (seen.leaks, seen.alone) if seen is not None and seen.shared else None
            else:
                compiled = recipe.training.compile
                found = check_leaks(model, objective, train, size, device, opened.in_16_bits, compiled)
    except LeakError as error:
        leak = error
    # All or none: ranks whose rounding differs must not train on different samples.
    leak = next((of_rank for of_rank in ranks.gather_objects(leak) if of_rank is not None), None)
    if leak is not None:
        if not may_pad(recipe, data):
            raise leak
        return "", leak.why
    if not train.is_packed:
        return "", None
    report = data.report.train
    assert report is not None
    assert report.fill_rate is not None, "rows are packed"
    if found is None:
        checked = "no sample holds two rows"
    else:
        checked = "checked: packed rows do not attend to each other (change {:.0e}, alone {:.0e})".format(*found)
    return f"{report.fill_rate:.1%} of the tokens are used; {checked}", None
