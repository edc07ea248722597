"""Which tensors stay in float32 beside weights in 16 bits; rounded buffers are saved as they were."""

from __future__ import annotations

import torch
from support.moe import mixture
from torch import nn

from toolkit.sharding.fsdp2.precision import round_buffers, types_of_authors


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


def test_a_bias_that_is_learned_by_small_steps_stays_in_float32() -> None:
    model = mixture("deepseek_v3")
    types = types_of_authors(model, torch.bfloat16)
    kept = [name.partition(".mlp.")[2] for name, kind in types.items() if kind == torch.float32 and ".mlp." in name]
    assert sorted(kept) == ["gate.e_score_correction_bias"] * 2 + ["gate.weight"] * 2  # as transformers 5.24 says
