"""What answers take that a model writes while a run trains: keys and values of all tokens, and a forward with them."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from toolkit.model.adapters import base_of
from toolkit.model.fake_tensors import FakeTensorMode
from toolkit.planning.memory.fake import Ledger, give_parameters
from toolkit.planning.workload import Workload
from toolkit.sharding.apply import PRECISIONS

CACHES = ("past_key_values", "cache_params")
"""Names of a model's cache, in its outputs and among its arguments."""


@dataclass(frozen=True)
class Answering:
    """Bytes that a rank holds beside its weights while it writes a batch of answers.

    Attributes:
        cache: keys and values, or the states of recurrent layers, when the answers are whole; of an encoder-decoder
            the encoder's states, too.
        peak: the most at once, the cache included.
    """

    cache: int
    peak: int


def answering(workload: Workload, rows: int, prompt: int, answer: int, whole: bool) -> Answering:
    """Runs the model without memory: a forward that fills its cache, and one of a token more.

    The forward that fills it is of whole answers, a little more than of prompts alone.

    Args:
        rows: answers of a batch.
        prompt, answer: tokens of the longest ones.
        whole: as torch's DDP runs it; under mixed precision parameters are cast where they are used.
    """
    dtype = PRECISIONS[workload.mixed_precision]
    casts = whole and dtype is not None
    # Its own attention, as prompts of a batch are padded and masked.
    model, ledger = replace(workload, attention=None).model_copy().eval(), Ledger()
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        give_parameters(model, None if casts else dtype)
        for tensor in (*model.parameters(), *model.buffers()):
            ledger.see(tensor)
        before = ledger.current
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", dtype=dtype, enabled=casts))
        stack.enter_context(ledger)
        ledger.restart()
        kept = _fill(base_of(model), rows, prompt, answer)  # alive while it is counted
        torch.clear_autocast_cache()
        found = Answering(ledger.current - before, ledger.peak - before)
        del kept
        return found


def _fill(model: Any, rows: int, prompt: int, answer: int) -> dict[str, Any]:
    """The cache of whole answers, and of an encoder-decoder the encoder's states; models without one have none."""
    if model.config.is_encoder_decoder:
        mask = _ids(rows, prompt)
        states = model.get_encoder()(input_ids=_ids(rows, prompt), attention_mask=mask)
        read = {"encoder_outputs": states, "attention_mask": mask}
        cache = _cache_after(model, read | {"decoder_input_ids": _ids(rows, answer - 1)})
        cache = _cache_after(model, read | {"decoder_input_ids": _ids(rows, 1)} | cache)
        return {"states": states} | cache
    tokens = prompt + answer
    cache = _cache_after(model, {"input_ids": _ids(rows, tokens - 1), "attention_mask": _ids(rows, tokens - 1)})
    if not cache:  # it computes all tokens anew
        return {}
    return _cache_after(model, {"input_ids": _ids(rows, 1), "attention_mask": _ids(rows, tokens)} | cache)


def _ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.empty(rows, tokens, dtype=torch.long)


def _cache_after(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The cache behind a forward, by its name; empty where the model has none."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    out = model(**inputs, **last, use_cache=True)
    return {name: out[name] for name in CACHES if out.get(name) is not None}
