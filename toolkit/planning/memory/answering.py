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
        cache: keys and values, or the states of recurrent layers, when the answers are whole.
        peak: the most at once, the cache included.
    """

    cache: int
    peak: int


def answering(workload: Workload, rows: int, tokens: int, whole: bool) -> Answering:
    """Runs the model without memory: a forward that fills its cache, and one of a token more.

    The forward that fills it is of whole answers, a little more than of prompts alone.

    Args:
        rows: answers of a batch.
        tokens: of the longest prompt and its answer.
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
        model = base_of(model)
        cache = _cache_after(model, rows, tokens - 1, tokens - 1, {})
        if cache:  # models without one compute all tokens anew
            cache = _cache_after(model, rows, 1, tokens, cache)
        torch.clear_autocast_cache()
        return Answering(ledger.current - before, ledger.peak - before)


def _cache_after(model: Any, rows: int, new: int, seen: int, cache: dict[str, Any]) -> dict[str, Any]:
    """The cache behind a forward of `new` tokens, the last of `seen`, by its name; empty where the model has none."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    ids, mask = torch.empty(rows, new, dtype=torch.long), torch.empty(rows, seen, dtype=torch.long)
    out = model(input_ids=ids, attention_mask=mask, use_cache=True, **last, **cache)
    return {name: out[name] for name in CACHES if out.get(name) is not None}
