"""Exported tensors have the names, shapes and values that `save_pretrained` writes, a block in memory at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.every_model import causal_kinds
from support.tiny import tiny_config
from transformers import AutoModelForCausalLM

from toolkit.checkpoint.export import names_fact
from toolkit.model.weights.file_names import FileNames
from toolkit.sharding.fsdp2.shards import state_once

FAST = ("gpt2", "llama", "qwen3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "granitemoe", "jamba")
FAST += ("ernie4_5_moe", "dbrx", "phimoe", "lfm2_moe", "hunyuan_v1_moe")


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    "kind", [*FAST, *(pytest.param(k, marks=pytest.mark.grid) for k in causal_kinds() if k not in FAST)]
)
def test_the_names_are_those_of_save_pretrained(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32)
    expected = saved(model, tmp_path)
    for stored in (None, expected.keys()):  # of random weights, and of a base with these names
        found = dict(FileNames(model, stored).in_files(iter(state_once(model).items())))
        assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in expected.items()}
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_names_of_memory_stay_if_the_base_has_them() -> None:
    """As an export of before had them."""
    model = AutoModelForCausalLM.from_config(tiny_config("mixtral"), dtype=torch.float32)
    state = state_once(model)
    assert dict(FileNames(model, state.keys()).in_files(iter(state.items()))).keys() == state.keys()
    assert dict(FileNames(model, None).in_files(iter(state.items()))).keys() != state.keys()


def test_a_block_at_a_time() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("mixtral"), dtype=torch.float32)
    taken: list[str] = []

    def tensors() -> Any:
        for name, tensor in state_once(model).items():
            taken.append(name)
            yield name, tensor

    for name, _ in FileNames(model, None).in_files(tensors()):
        if name.startswith("model.layers.0."):
            assert not any(other.startswith("model.layers.1.") for other in taken[:-1]), "the next block has begun"


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        (None, None),
        ({"a", "b"}, None),
        ({"a", "b", "c", "d"}, "lacks 2 tensors of the base: c, d"),
        ({"a", "c"}, "lacks 1 tensor of the base: c and has 1 new tensor: b"),
    ],
)
def test_names_that_differ_from_the_bases_are_told(stored: set[str] | None, told: str | None, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert names_fact(tmp_path, stored) == told


def test_a_prefix_that_an_encoders_files_lack_is_not_told(tmp_path: Path) -> None:
    save_file({"bert.a": torch.zeros(1), "head.b": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert names_fact(tmp_path, {"a"}) is None
    assert names_fact(tmp_path, {"a", "c"}) == "lacks 1 tensor of the base: c and has 1 new tensor: head.b"
