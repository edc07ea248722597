"""Buffers that transformers would have in 16 bits are rounded, and saved as they were."""

from __future__ import annotations

import torch
from torch import nn

from toolkit.sharding.fsdp2.precision import round_buffers


def test_a_rounded_buffer_is_saved_as_it_was_unless_it_has_changed() -> None:
    whole = torch.tensor([1 / 3, 2 / 3])
    model = nn.BatchNorm1d(2)
    for name in ("running_mean", "running_var"):
        setattr(model, name, whole.clone())
    round_buffers(model, {"running_mean": torch.bfloat16, "running_var": torch.bfloat16})
    assert model.running_mean.dtype == torch.bfloat16
    model.running_var.add_(1)
    state = model.state_dict()
    assert torch.equal(state["running_mean"], whole)
    assert torch.equal(state["running_var"], whole.bfloat16() + 1)
