"""Probes what answers take that a model writes during training: keys and values, and a forward with them."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from toolkit.model.adapters.adapters import base_of
from toolkit.model.structure.fake_tensors import FakeTensorMode
from toolkit.planning.memory.fake import Ledger, give_parameters
from toolkit.planning.workload.workload import Workload
from toolkit.sharding.apply import PRECISIONS


@dataclass(frozen=True)
class Answering:
    """What a rank holds in addition to its weights while it writes a batch of answers (bytes).

    Attributes:
        cache: keys and values, or the states of recurrent layers, at the end of the answers; in an encoder-decoder
            also the encoder's states.
        peak: the most at once, including the cache.
    """

    cache: int
    peak: int


def answering(workload: Workload, rows: int, prompt: int, answer: int, whole: bool) -> Answering:
    """Runs the model without memory: a forward that fills its cache, and one of a further token.

    The forward that fills the cache has whole answers, which takes a little more than prompts alone.

    Args:
        rows: answers of a batch.
        prompt, answer: tokens of the longest prompt and answer.
        whole: whether to run it as torch's DDP does: mixed precision casts parameters at their uses.
    """
    dtype = PRECISIONS[workload.mixed_precision]
    casts = whole and dtype is not None
    # With the model's own attention, because prompts of a batch are padded and masked.
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
        kept = _fill_cache(base_of(model), rows, prompt, answer)  # alive while it is counted
        torch.clear_autocast_cache()
        found = Answering(ledger.current - before, ledger.peak - before)
        del kept
        return found


def _fill_cache(model: Any, rows: int, prompt: int, answer: int) -> dict[str, Any]:
    """Returns the cache of whole answers, with the encoder's states of an encoder-decoder; empty without a cache."""
    if model.config.is_encoder_decoder:
        mask = _empty_ids(rows, prompt)
        states = model.get_encoder()(input_ids=_empty_ids(rows, prompt), attention_mask=mask)
        read = {"encoder_outputs": states, "attention_mask": mask}
        cache = _cache_after(model, read | {"decoder_input_ids": _empty_ids(rows, answer - 1)})
        cache = _cache_after(model, read | {"decoder_input_ids": _empty_ids(rows, 1)} | cache)
        return {"states": states} | cache
    tokens = prompt + answer
    cache = _cache_after(
        model, {"input_ids": _empty_ids(rows, tokens - 1), "attention_mask": _empty_ids(rows, tokens - 1)}
    )
    if not cache:  # the model computes all tokens again
        return {}
    return _cache_after(model, {"input_ids": _empty_ids(rows, 1), "attention_mask": _empty_ids(rows, tokens)} | cache)


def _empty_ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.empty(rows, tokens, dtype=torch.long)


def _cache_after(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the cache after a forward, by its name among arguments; empty if the model has none."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    cache = model(**inputs, **last, use_cache=True).get("cache")
    return {} if cache is None else {"cache": cache}
