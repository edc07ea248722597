"""Computes log-probabilities of given continuations of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from toolkit.errors import BadInputError
from toolkit.generation.text.complete import Shown, continuation_of, encode_continuation, fitting, image_arguments
from toolkit.generation.text.load import Loaded
from toolkit.generation.text.rows import PromptRow, all_right, row_with_images

if TYPE_CHECKING:
    import torch


class Continued(NamedTuple):
    """The tokens of a prompt and a continuation, the number of the continuation's, and the images of the prompt."""

    ids: list[int]
    num_tokens: int
    shown: Shown | None = None


def encode_choices(
    loaded: Loaded, rows: list[PromptRow], option: str, system: str | None, raw: bool
) -> list[list[Continued]]:
    """Encodes the choices of each row after its prompt.

    Raises:
        BadInputError: names the rows that cannot be encoded.
    """
    if loaded.encoder_decoder:
        raise BadInputError(
            f"{option}: choices are scored after their prompt, and {loaded.name!r} is an encoder-decoder; give rows "
            "without choices"
        )
    return all_right(option, [(row.place, partial(_encode_choices_of, loaded, row, system, raw)) for row in rows])


def _encode_choices_of(loaded: Loaded, row: PromptRow, system: str | None, raw: bool) -> list[Continued]:
    encoded, shown = [], None
    if row.images:
        text, shown = row_with_images(loaded, row, system, raw)
    for choice in row.choices:
        if shown is not None:
            prompt, continuation = continuation_of(loaded, text, False, choice)
        else:
            asked = row.asked(raw or loaded.tokenizer.chat_template is None)
            prompt, continuation = encode_continuation(loaded, asked, choice, system, raw, row.tools, row.arguments)
        if not continuation:
            raise BadInputError(f"the choice {choice!r} makes no token")
        encoded.append(Continued(fitting(loaded, prompt + continuation), len(continuation), shown))
    return encoded


def log_probabilities(loaded: Loaded, rows: list[list[Continued]], batch_size: int) -> Iterator[list[float]]:
    """Yields the log-probability (nats) of each row's choices; a forward takes `batch_size` choices."""
    for choices in rows:
        scores: list[float] = []
        for start in range(0, len(choices), batch_size):
            scores += scored(loaded, choices[start : start + batch_size])
        yield scores


def scored(loaded: Loaded, choices: Sequence[Continued]) -> list[float]:
    """Returns the log-probability (nats) of each choice after its prompt, in one forward."""
    import torch

    each = [choice.ids for choice in choices]
    width, device = max(map(len, each)), loaded.model.device
    # Padded on the right, where no token looks; the mask is for models that look both ways.
    ids = torch.tensor([own + own[-1:] * (width - len(own)) for own in each]).to(device)
    mask = torch.tensor([[1] * len(own) + [0] * (width - len(own)) for own in each]).to(device)
    images = image_arguments(loaded.model, [choice.shown for choice in choices], ids)
    with torch.no_grad():
        logits = loaded.model(input_ids=ids, attention_mask=mask, **images).logits
    return [_log_probability(logits[i], ids[i], len(own), choices[i].num_tokens) for i, own in enumerate(each)]


def _log_probability(logits: torch.Tensor, ids: torch.Tensor, length: int, count: int) -> float:
    """Sums the log-probabilities of the last `count` of `length` tokens; logits (T, V), ids (T,)."""
    # The logits of a token's place foretell the next one.
    foretold = logits[length - count - 1 : length - 1].float().log_softmax(-1)
    targets = ids[length - count : length].to(logits.device)
    return float(foretold.gather(1, targets[:, None]).sum())
