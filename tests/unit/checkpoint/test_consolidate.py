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
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama
from support.tiny_multimodal import FAMILIES
from test_manifest import PLAIN
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from toolkit import Recipe, finetune
from toolkit.checkpoint.consolidate import (
    STORED_NAMES,
    _base_as_it_was,
    _empty_model,
    _notes_on_names,
    export_run,
    exported_for_now,
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
    names = trained_names(_empty_model(config, replace(PLAIN, recipe=recipe)))
    found = {part for part in ("language_model", "projector", "vision_tower") if any(part in name for name in names)}
    assert found == ({"language_model"} if parts is None else {"language_model", "projector", "vision_tower"})


def run_of(base: Path, folder: Path, model: dict[str, str] | None = None, kind: str = "lora", **export: Any) -> None:
    """Trains an adapter for one step, or all weights."""
    write_rows(folder.parent / "rows.jsonl", ({"text": text} for text in make_texts(20)))
    values = recipe_values(base, folder.parent / "rows.jsonl", folder, folder.parent / "cache", max_steps=1)
    adapter = {"kind": "lora", "r": 2} if kind == "lora" else {}
    values |= {"adapter": adapter, "checkpoint": {"every_steps": 1}, "export": export}
    values["model"] |= model or {}
    finetune(Recipe.from_mapping(values))


def test_an_adapter_tells_of_the_base_that_it_was_trained_on(tmp_path: Path) -> None:
    """Also if that was edited, or is gone, by the time of its export."""
    base = save_llama(tmp_path / "base", make_texts(20), tied=False)
    told = {"fingerprint": fingerprint_of(base), "configuration": configuration_digest(base), "quantization": None}
    run_of(base, tmp_path / "run")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-2}))
    export_run(tmp_path / "run", tmp_path / "edited")
    shutil.rmtree(base)
    export_run(tmp_path / "run", tmp_path / "gone")
    exports = ("run/export", "edited", "gone")
    assert [json.loads((tmp_path / name / "base.json").read_text()) for name in exports] == [told] * 3


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


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("case", ["all", "all, asked", "merged", "adapter"])
def test_an_export_has_the_type_of_its_base_and_checkpoints_keep_masters(
    case: str, is_named: bool, tmp_path: Path
) -> None:
    """Whether config.json names the type or only the files have it."""
    base, run = save_llama(tmp_path / "base", make_texts(20), tied=False), tmp_path / "run"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({key: config[key] for key in config if is_named or key != "dtype"}))
    export: dict[str, Any] = {"merged": {"merge": True}, "all, asked": {"dtype": "float32"}}.get(case, {})
    run_of(base, run, kind="none" if "all" in case else "lora", **export)
    name = f"{'adapter_' if case == 'adapter' else ''}model.safetensors"
    dtype = torch.float32 if case in ("adapter", "all, asked") else torch.bfloat16
    written = load_file(run / "export" / name)
    assert {tensor.dtype for tensor in written.values()} == {dtype}
    if case == "merged":  # a checkpoint has no merged weights
        return
    with exported_for_now(str(run), "last") as done:
        again = load_file(done.folder / name)
    assert not list(run.glob(".checkpoint*")), "nothing is left"
    assert all(torch.equal(written[key], again[key]) for key in written)
    export_run(run, tmp_path / "masters", dtype="float32")
    masters = load_file(tmp_path / "masters" / name)
    assert all(torch.equal(masters[key].to(dtype), written[key]) for key in written)
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in masters.values())


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
    stored, found = _base_as_it_was(run, manifest)
    assert (stored, found) == (frozenset(names), base)
    save_llama(base, make_texts(20), tied=False, seed=1)
    assert _base_as_it_was(run, manifest) == (frozenset(names), None)
    (note,) = _notes_on_names(base, stored, None)
    assert note.startswith("the export lacks 1 tensor of the base: mtp.fc.weight, whose files are not here as")
    (run / "model" / STORED_NAMES).write_text(json.dumps(names))  # as older versions wrote it
    assert _base_as_it_was(run, manifest) == (frozenset(names), base)
