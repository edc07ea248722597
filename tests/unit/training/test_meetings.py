"""Host and device meet once a step: operators that make the host wait for the device are counted in whole steps.

tests/devices has all objectives, on a device that gives no value to the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from support.tiny import llama
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from toolkit.objectives.causal_lm import CausalLM
from toolkit.recipe.schema import TrainingSection
from toolkit.sharding.plugin import reset_accelerate
from toolkit.training import trainer as loop
from toolkit.training.trainer import Trainer

WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "bincount",
    "equal",
    "is_nonzero",
)
"""Operators whose result, or its size, the host has to know."""

VALUES = torch.arange(48).view(3, 16) % 100 + 1
POSITIONS = torch.cat([torch.arange(5), torch.arange(11)]).expand(3, 16).contiguous()


class Meetings(TorchDispatchMode):
    """Counts meetings but for those in `on_host`."""

    paused = 0

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in WAITING or by_mask:
            self.note(name)
        return func(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        if not Meetings.paused:
            self.found[name] += 1


@contextmanager
def on_host() -> Iterator[None]:
    """What runs in it works on tensors that lie on the host anyway."""
    Meetings.paused += 1
    yield
    Meetings.paused -= 1


def meetings_of_a_step(model: nn.Module, objective: Any, window: list[dict[str, torch.Tensor]]) -> Counter[str]:
    """The meetings of the second of two steps, which each have the micro-batches of `window`."""
    reset_accelerate()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(window))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    prepared = accelerator.prepare_optimizer(optimizer)
    settings = TrainingSection(output_dir="unused", max_steps=1, max_grad_norm=1.0)
    unused: Any = None
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    trainer = Trainer(accelerator, model, prepared, schedule, objective, settings, unused)
    trainer._upcoming = window
    seen = Meetings()
    tolist = torch.Tensor.tolist

    def listed(tensor: torch.Tensor) -> Any:
        seen.note("tolist")
        return tolist(tensor)

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((loop, "_counts"), (objective, "on_host")):
            patch.setattr(owner, name, paused(getattr(owner, name)))
        trainer.train_step(window)
        patch.setattr(torch.Tensor, "tolist", listed)
        with seen:
            trainer.train_step(window)
    reset_accelerate()
    return seen.found


def paused(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with on_host():
            return function(*args)

    return run


def texts() -> list[dict[str, torch.Tensor]]:
    """Two micro-batches of three rows of two documents."""
    return [{"input_ids": VALUES, "labels": VALUES, "position_ids": POSITIONS} for _ in range(2)]


def flash_by_hand(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """Attention document by document, as flash attention's kernel is told where they are."""
    bounds, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    assert mask is None
    assert kwargs["cu_seq_lens_k"] is bounds
    assert bounds.dtype == torch.int32
    assert type(longest) is type(kwargs["max_length_k"]) is int
    with on_host():
        sizes = bounds.diff().tolist()
        (expected, _), (most, _) = prepare_fa_kwargs_from_position_ids(POSITIONS.flatten())
        assert torch.equal(bounds, expected)
        assert longest == most
    parts = zip(*(tensor.split(sizes, dim=2) for tensor in (query, key, value)), strict=True)
    found = [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
    return torch.cat(found, dim=2).transpose(1, 2), None


def test_flash_attention_on_packed_rows_is_told_where_documents_are(monkeypatch: pytest.MonkeyPatch) -> None:
    AttentionInterface.register("varlen_by_hand", flash_by_hand)
    AttentionMaskInterface.register("varlen_by_hand", flash_attention_mask)
    model = llama("varlen_by_hand")
    with monkeypatch.context() as patch:  # transformers looks for a library behind every name with "flash" in it
        patch.setattr("toolkit.objectives.causal_lm.is_flash", lambda model: True)
        objective = CausalLM(model)
    plain = llama("sdpa")
    batch = texts()[0]
    losses = objective.loss_sum(model, objective.on_host(batch)), CausalLM(plain).loss_sum(plain, batch)
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    assert meetings_of_a_step(model, objective, texts()) == {"tolist": 1}


@pytest.mark.parametrize("packed", [True, False])
def test_rows_under_sdpa_have_one_meeting_a_step(packed: bool) -> None:
    model = llama("sdpa")
    assert meetings_of_a_step(model, CausalLM(model, packed), texts()) == {"tolist": 1}
