"""An adapter of stacked experts, written by expert: exact, under the names of the base's files, or not at all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from support.tiny import tiny_config
from torch import nn
from transformers import AutoModelForCausalLM

from toolkit.model.adapters.adapters import add_adapter, write_adapter
from toolkit.model.adapters.per_expert import write_per_expert
from toolkit.model.adapters.targets import stacked_experts
from toolkit.recipe.adapter_file import PER_EXPERT
from toolkit.recipe.schema import AdapterSection

IN_FILES = {
    "mixtral": ("model.layers.{}.block_sparse_moe.experts.{}.", {"gate_up_proj": "w1 w3", "down_proj": "w2"}),
    "qwen2_moe": ("model.layers.{}.mlp.experts.{}.", {"gate_up_proj": "gate_proj up_proj", "down_proj": "down_proj"}),
    "nemotron_h": ("backbone.layers.{}.mixer.experts.{}.", {"up_proj": "up_proj", "down_proj": "down_proj"}),
}
"""Family -> where its files have an expert, and the matrices that each parameter in memory holds."""


def write(family: str, folder: Path, targets: str = "all-linear") -> tuple[Any, dict[str, torch.Tensor]]:
    """Writes an adapter of small whole numbers, with which sums are exact. Returns the model and peft's tensors."""
    base = AutoModelForCausalLM.from_config(tiny_config(family))
    base.save_pretrained(folder / "base")
    adapted = add_adapter(base, AdapterSection(kind="lora", r=2, target_modules=targets), None)
    tensors = {name: torch.randint(-3, 4, each.shape).float() for name, each in adapted.named_parameters()}
    state = write_adapter(adapted, tensors.items(), folder)
    write_per_expert(adapted, state, folder)
    return adapted, state


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *((family, "all-linear") for family in IN_FILES),
        ("qwen2_moe", r".*\.experts\..*_proj"),
    ],  # without shared experts
)
def test_each_expert_has_its_rows_and_columns(family: str, targets: str, tmp_path: Path) -> None:
    adapted, stacked = write(family, tmp_path, targets)
    plain = nn.Module()  # with a layer for each matrix of the files, as transformers 4 has it
    for name, weight in load_file(tmp_path / "base/model.safetensors").items():
        if weight.ndim == 2 and "embed" not in name:
            *path, last, _ = name.split(".")
            owner: nn.Module = plain
            for word in path:
                if not hasattr(owner, word):
                    owner.add_module(word, nn.Module())
                owner = getattr(owner, word)
            owner.add_module(last, nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    config = peft.PeftConfig.from_pretrained(str(tmp_path / PER_EXPERT))
    config.task_type = None
    found, read = load_file(tmp_path / PER_EXPERT / "adapter_model.safetensors"), peft.get_peft_model(plain, config)
    assert peft.get_peft_model_state_dict(read).keys() == found.keys()  # and no router or head has one
    peft.set_peft_model_state_dict(read, found)
    place, files = IN_FILES[family]
    for name in stacked_experts(adapted.get_base_model()):
        holder, _, leaf = name.replace(".base_layer", "").rpartition(".")
        inner = "" if leaf == "down_proj" else ".base_layer"
        a, b = (stacked[f"base_model.model.{holder}{inner}.lora_{half}.weight"] for half in "AB")
        (layer,) = re.findall(r"layers\.(\d+)", holder)
        for expert in range(4):  # alpha is twice the rank
            change = 2 * b[:, expert::4] @ a[2 * expert : 2 * expert + 2]
            for part, last in zip(change.chunk(len(files[leaf].split())), files[leaf].split(), strict=True):
                split = read.base_model.model.get_submodule(place.format(layer, expert) + last)
                assert torch.equal(split.get_delta_weight("default"), part)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *((family, "all-linear") for family in ("gpt_oss", "granitemoe", "jetmoe")),  # stacked in files
        ("mixtral", r".*experts\.down_proj"),  # vLLM wants every matrix of an expert
        ("mixtral", r".*_proj"),
    ],
)
def test_what_no_server_names_is_not_written(family: str, targets: str, tmp_path: Path) -> None:
    write(family, tmp_path, targets)
    assert (tmp_path / PER_EXPERT).is_dir() == (targets == r".*_proj")
