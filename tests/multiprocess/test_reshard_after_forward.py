"""Units that a group of ranks keeps from forward to backward; what they learn is in test_all_pairs.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.moe import mixture
from support.ranks import run_on_ranks
from support.tiny import llama
from torch.distributed.device_mesh import init_device_mesh

from toolkit.errors import BadInputError
from toolkit.sharding import plan_units
from toolkit.sharding.apply import apply
from toolkit.sharding.fsdp2.fsdp import fsdp_groups
from toolkit.sharding.plan.strategy import STRATEGIES


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    apply(model, plan_units(model), STRATEGIES["zero3"], mesh, "bf16", lambda: True, reshard_after_forward=2)
    return model


def copies() -> list[int]:
    """Bytes that the units keep for backward: after a forward, after its backward, after an evaluation."""
    with pytest.raises(BadInputError, match=r"reshard_after_forward: a stack of 3 experts \(3, .* on 4 ranks"):
        sharded(mixture("mixtral", num_local_experts=3))
    model, ids = sharded(llama(num_hidden_layers=3)), torch.arange(16)[None]
    loss = model(input_ids=ids, labels=ids).loss
    found = [kept(model)]
    loss.backward()
    found.append(kept(model))
    with torch.no_grad():
        model(input_ids=ids)
    return [*found, kept(model)]


def kept(model: Any) -> int:
    parameters = [parameter for group in fsdp_groups(model) for parameter in group.fsdp_params]
    tensors = [getattr(p, "_sharded_post_forward_param_data", None) for p in parameters]
    return sum(data.nbytes for data in tensors if data is not None)


def test_a_group_keeps_a_copy_in_the_type_of_compute_from_forward_to_backward() -> None:
    model = llama(num_hidden_layers=3)
    tail = sum(p.numel() for part in (model.lm_head, model.model.norm) for p in part.parameters())
    whole = sum(p.numel() for p in model.parameters())
    # The embeddings of 131 tokens are padded to 132.
    assert run_on_ranks(copies, 4) == [[2 * (whole - tail + 32) // 2, 0, 0]] * 4
