"""The export of a checkpoint in one process is what the run itself would have written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.texts import make_texts
from support.tiny import recipe_values, save_llama
from support.tiny_multimodal import FAMILIES
from test_manifest import PLAIN
from transformers import AutoConfig, AutoTokenizer

from toolkit import Recipe, finetune
from toolkit.checkpoint.consolidate import (
    STORED_NAMES,
    _base_as_it_was,
    _empty_model,
    _notes_on_names,
    export_run,
    read_whole,
)
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import trained_names
from toolkit.paths import configuration_digest, fingerprint_of
from toolkit.recipe.schema import AdapterSection


@pytest.mark.parametrize("parts", [None, ["language", "projector", "vision"]])
def test_adapters_are_in_the_parts_that_the_run_trained(parts: list[str] | None) -> None:
    recipe = {"adapter": AdapterSection(kind="lora", r=2).model_dump()}
    recipe["model"] = {"name_or_path": None, "revision": None, "train": parts}
    config = AutoConfig.for_model("llava", **FAMILIES["llava"])
    names = trained_names(_empty_model(config, replace(PLAIN, recipe=recipe), Path("checkpoint")))
    found = {part for part in ("language_model", "projector", "vision_tower") if any(part in name for name in names)}
    assert found == ({"language_model"} if parts is None else {"language_model", "projector", "vision_tower"})


def run_of(base: Path, folder: Path, model: dict[str, str] | None = None, **export: Any) -> None:
    """Trains an adapter for one step."""
    (folder.parent / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in make_texts(20)))
    values = recipe_values(base, folder.parent / "rows.jsonl", folder, folder.parent / "cache", max_steps=1)
    values |= {"adapter": {"kind": "lora", "r": 2}, "checkpoint": {"every_steps": 1}, "export": export}
    values["model"] |= model or {}
    finetune(Recipe.from_mapping(values))


def test_an_adapter_tells_of_the_base_that_it_was_trained_on(tmp_path: Path) -> None:
    """Also if that was edited, or is gone, by the time of its export."""
    base = save_llama(tmp_path / "base", make_texts(20), tied=False)
    told = {"fingerprint": fingerprint_of(base), "configuration": configuration_digest(base), "quantization": None}
    run_of(base, tmp_path / "run", dtype="bfloat16")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-2}))
    export_run(tmp_path / "run", tmp_path / "edited", dtype="bfloat16")
    shutil.rmtree(base)
    export_run(tmp_path / "run", tmp_path / "gone")
    exports = ("run/export", "edited", "gone")
    assert [json.loads((tmp_path / name / "base.json").read_text()) for name in exports] == [told] * 3
    kept = {name: load_file(tmp_path / name / "adapter_model.safetensors") for name in exports}
    for name, whole in kept["gone"].items():
        assert whole.dtype == torch.float32
        for other in ("run/export", "edited"):
            assert torch.equal(kept[other][name], whole.bfloat16())


def test_a_float32_export_keeps_what_a_base_in_16_bits_would_round_away(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", make_texts(20), tied=False)
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "words")
    model = {"dtype": "bfloat16", "tokenizer": str(tmp_path / "words")}
    run_of(base, tmp_path / "run", model, merge=True, dtype="float32")
    export_run(tmp_path / "run", tmp_path / "adapter")
    files = (base / "model.safetensors", tmp_path / "run/export/model.safetensors")
    before, after, adapter = map(load_file, (*files, tmp_path / "adapter/adapter_model.safetensors"))
    name = "model.layers.0.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
    expected = before[f"{name}.weight"].bfloat16().float() + 2.0 * b @ a
    torch.testing.assert_close(after[f"{name}.weight"], expected, rtol=0, atol=1e-7)
    assert not torch.equal(expected, expected.bfloat16().float())


def test_a_checkpoint_that_its_run_has_just_deleted(tmp_path: Path) -> None:
    manifest = replace(PLAIN, tensors={"model.a": ["float32", [2]]})
    with pytest.raises(BadInputError, match="it has deleted it for a later checkpoint"):
        list(read_whole(tmp_path / "step_00000005", manifest, 2**20, average=False))


def test_tensors_that_only_the_base_has_are_taken_from_it_alone(tmp_path: Path) -> None:
    """Such as layers that predict further tokens: not from other weights under its name, and not without a word."""
    base, run = save_llama(tmp_path / "base", make_texts(20), tied=False), tmp_path / "run"
    (run / "model").mkdir(parents=True)
    names = [*load_file(base / "model.safetensors"), "mtp.fc.weight"]
    (run / "model" / STORED_NAMES).write_text(json.dumps({"names": names, "fingerprint": fingerprint_of(base)}))
    recipe = {"adapter": {"kind": "none"}, "model": {"name_or_path": str(base), "revision": None}}
    manifest = replace(PLAIN, recipe=recipe)
    stored, found = _base_as_it_was(run, manifest, run)
    assert (stored, found) == (frozenset(names), base)
    save_llama(base, make_texts(20), tied=False, seed=1)
    assert _base_as_it_was(run, manifest, run) == (frozenset(names), None)
    (note,) = _notes_on_names(base, stored, None)
    assert note.startswith("the export lacks 1 tensor of the base: mtp.fc.weight, whose files are not here as")
    (run / "model" / STORED_NAMES).write_text(json.dumps(names))  # as older versions wrote it
    assert _base_as_it_was(run, manifest, run) == (frozenset(names), base)
