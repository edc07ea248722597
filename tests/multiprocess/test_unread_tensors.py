"""Tensors of a base that transformers does not load, such as layers that predict further tokens, are in its exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.every_multimodal import save_small
from support.ranks import run_on_ranks
from support.runs import finetuned
from support.tiny import recipe_values, tiny_config
from support.whole_models import LORA, TEXTS, tensors_of, write_texts

from toolkit.checkpoint.consolidate import export_run
from toolkit.model.weights.weights import unread_files

FURTHER = {"mtp.fc.weight": (32, 64), "mtp.layers.0.mlp.up_proj.weight": (48, 32), "mtp.norm.weight": (32,)}
"""As Qwen 3.5 has them on the hub, whose class in transformers passes over `mtp.*`."""


def save_base(folder: Path) -> dict[str, torch.Tensor]:
    save_small("qwen3_5", folder, TEXTS)
    further = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in FURTHER.items()}
    file = folder / "model.safetensors"
    save_file({**load_file(file), **further}, file, metadata={"format": "pt"})
    return further


def runs(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    for name, changes in cases.items():
        values = recipe_values(folder / "base", folder / "rows.jsonl", folder / name, folder / "cache")
        values["training"] |= {"max_steps": 2}
        finetuned(values, changes)


def test_they_are_in_full_and_merged_exports_and_in_those_of_checkpoints(tmp_path: Path) -> None:
    write_texts(tmp_path)
    further = save_base(tmp_path / "base")
    base = tensors_of(tmp_path / "base")
    files = {"export": {"max_shard_gib": 1e-4}, "checkpoint": {"every_steps": 2}}
    merged = {"adapter": LORA, "export": {"merge": True}}
    run_on_ranks(runs, 2, tmp_path, {"full": files, "merged": merged})
    export_run(tmp_path / "full", tmp_path / "again")
    for folder in (tmp_path / "full/export", tmp_path / "merged/export", tmp_path / "again"):
        found = tensors_of(folder)
        assert found.keys() == base.keys()
        for name, tensor in further.items():
            assert found[name].dtype == torch.bfloat16
            assert torch.equal(found[name], tensor)
    named = json.loads((tmp_path / "full/export/model.safetensors.index.json").read_text())["weight_map"]
    assert named.keys() == base.keys()


@pytest.mark.parametrize(
    "changes",
    [{"architectures": ["Qwen3_5ForCausalLM"]}, {"quantization_config": {"quant_method": "fp8"}}, {"vocab_size": 310}],
)
def test_none_are_taken_from_a_base_of_which_they_are_not(changes: dict[str, Any], tmp_path: Path) -> None:
    """Of another class, of 8 bits, or with fewer tokens."""
    from transformers import AutoModelForMultimodalLM

    save_base(tmp_path)
    model = AutoModelForMultimodalLM.from_pretrained(tmp_path)
    assert unread_files(tmp_path, model).keys() == FURTHER.keys()
    config = json.loads((tmp_path / "config.json").read_text())
    inner = config["text_config"] if "vocab_size" in changes else config
    inner.update(changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert unread_files(tmp_path, model) == {}


def test_blocks_of_the_model_itself_are_not_among_them(tmp_path: Path) -> None:
    """GLM-4.5's class passes over block 46, the further one of the small model, which the large one has itself."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config("glm4_moe"))
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.1.*", r"model\.layers\.2.*"]
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    assert any(name.startswith("model.layers.1.mlp.experts.0.") for name in stored)
    save_file({**stored, "model.layers.2.eh_proj.weight": torch.zeros(2)}, file, metadata={"format": "pt"})
    assert unread_files(tmp_path, model).keys() == {"model.layers.2.eh_proj.weight"}
