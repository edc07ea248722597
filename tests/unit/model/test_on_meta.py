"""Models are built without a large parameter ever being on the host, and their buffers have their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny import tiny_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from toolkit.model.structure.on_meta import LARGE, build_on_meta


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor on the host."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.is_tensor(made) and made.device.type == "cpu":
            self.found = max(self.found, made.numel())
        return made


@pytest.mark.parametrize(
    ("kind", "width"), [("deepseek_v3", "moe_intermediate_size"), ("llama4_text", "intermediate_size")]
)
def test_a_stack_of_experts_is_never_on_the_host(kind: str, width: str) -> None:
    config = tiny_config(kind)
    setattr(config, width, 2 * LARGE // config.hidden_size // 4)
    config.num_local_experts = 4
    plain = AutoModelForCausalLM.from_config(tiny_config(kind))
    with Largest() as largest:
        model = build_on_meta(lambda: AutoModelForCausalLM.from_config(config))
    assert max(parameter.numel() for parameter in model.parameters()) >= LARGE
    assert all(parameter.is_meta for parameter in model.parameters())
    assert largest.found < LARGE
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


class Odd(nn.Module):
    """Asks for a value while it is built, which no tensor on the meta device has."""

    def __init__(self) -> None:
        super().__init__()
        width = int(torch.tensor(3).item())
        self.weight = nn.Parameter(torch.zeros(width, LARGE))
        self.register_buffer("mask", torch.ones(2, LARGE))


def test_a_model_that_needs_values_and_a_large_buffer_are_built_as_before() -> None:
    model: Any = build_on_meta(Odd)
    assert model.weight.is_meta
    assert float(model.mask.sum()) == 2 * LARGE


def test_a_size_that_is_a_tensor_of_one_number() -> None:
    """As the width of Inkling's norms."""

    def build() -> nn.Module:
        model = nn.Linear(LARGE, 1, bias=False)
        model.norm = nn.Parameter(torch.ones(torch.tensor(7, device="cpu")))
        return model

    built = build_on_meta(build)
    assert built.weight.is_meta
    assert tuple(built.norm.shape) == (7,)
