"""Adapters to go on from that are broken in one place each: a dry run refuses them with one clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.cases import cases
from support.refusals import Outcome, finetune, unclear
from transformers import AutoModelForCausalLM

from toolkit.paths import fingerprint_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"

Spoil = Callable[[Path], object]


def configured(**fields: Any) -> Spoil:
    """adapter_config.json with other fields; None takes one out."""

    def spoil(folder: Path) -> None:
        values = json.loads((folder / CONFIG).read_text()) | fields
        kept = {key: value for key, value in values.items() if fields.get(key, "") is not None}
        (folder / CONFIG).write_text(json.dumps(kept))

    return spoil


def changed(edit: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    """The weights, after `edit`."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        edit(tensors)
        save_file(tensors, folder / WEIGHTS)

    return spoil


def written(name: str, content: str) -> Spoil:
    return lambda folder: (folder / name).write_text(content)


def of_another_configuration(folder: Path) -> None:
    told = {"fingerprint": fingerprint_of(folder.parent / "model"), "configuration": "0", "quantization": None}
    (folder / "base.json").write_text(json.dumps(told))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def as_run(folder: Path) -> None:
    """A run's folder, in which the adapter is the export."""
    shutil.copytree(folder, folder / "export")
    (folder / CONFIG).unlink()


WAYS: dict[str, Callable[..., Spoil]] = {"configured": configured, "written": written}
REFUSED: dict[str, tuple[Spoil, list[str], str]] = {
    **{
        name: (WAYS[way](**given) if isinstance(given, dict) else WAYS[way](*given), overrides, says)
        for name, (way, given, overrides, says) in cases(__file__)["REFUSED"].items()
    },
    "no folder": (lambda folder: shutil.rmtree(folder), [], "does not exist; name the folder of an adapter"),
    "no configuration": (lambda folder: (folder / CONFIG).unlink(), [], "holds no adapter (adapter_config.json)"),
    "a run's folder": (as_run, [], "/export'"),
    "a pickle": (pickled, [], "adapter_model.bin is a pickle, which can run code"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), [], "adapter_config.json without adapter_model"),
    "a tensor is missing": (changed(lambda t: t.pop(B)), [], "lacks weights of base_model.model.model.layers.0"),
    "a tensor too many": (changed(lambda t: t.update(other=t[B].clone())), [], "has other, which nothing here takes"),
    "a weight of the base": (
        changed(lambda t: t.update({"base_model.model.lm_head.weight": t[B].clone()})),
        [],
        "has base_model.model.lm_head.weight, which",
    ),
    "stored as integers": (
        changed(lambda t: t.update({B: t[B].to(torch.int8)})),
        [],
        f"{B} are stored as I8 in adapter_model.safetensors; allowed: F64, F32, F16, BF16",
    ),
    "stored in 8 bits": (
        changed(lambda t: t.update({B: t[B].to(torch.float8_e5m2)})),
        [],
        f"{B} are stored as F8_E5M2 in adapter_model.safetensors",
    ),
    "of another configuration": (of_another_configuration, [], "its config.json says something else, so that the same"),
    "told nowhere": (lambda folder: (folder / "base.json").symlink_to("gone"), [], "base.json cannot be read"),
}
"""Name -> what is done to a good adapter, overrides, and what the error names."""


@pytest.fixture(scope="module")
def good(place: Path) -> Callable[[], Path]:
    """Makes a copy of a good adapter, in place of the last one, where adapter.yaml goes on from it."""
    base = AutoModelForCausalLM.from_pretrained(place / "model")
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"])
    peft.get_peft_model(base, settings).save_pretrained(place / "good")
    configured(target_modules=["v_proj", "q_proj"])(place / "good")  # of a set, whose order is any
    values = yaml.safe_load((place / "recipe.yaml").read_text())
    (place / "adapter.yaml").write_text(
        yaml.safe_dump(values | {"adapter": {"kind": "lora", "start_from": "./adapter"}})
    )

    def make() -> Path:
        shutil.rmtree(place / "adapter", ignore_errors=True)
        return Path(shutil.copytree(place / "good", place / "adapter"))

    return make


def test_refused_adapters(place: Path, good: Callable[[], Path]) -> None:
    def outcome(spoil: Spoil, overrides: list[str]) -> Outcome:
        spoil(good())
        return finetune(str(place / "adapter.yaml"), *overrides, "--dry-run")

    given = REFUSED.items()
    assert unclear((name, outcome(spoil, overrides), named) for name, (spoil, overrides, named) in given) == []


def test_what_the_file_decides_and_what_is_other_now_is_told(place: Path, good: Callable[[], Path]) -> None:
    folder, arguments = good(), [str(place / "adapter.yaml"), "--dry-run"]
    told = finetune(*arguments).told
    assert "start: goes on from the adapter adapter (r 3, alpha 5)\n" in told
    configured(base_model_name_or_path="somebody/base", lora_dropout=0.1)(folder)
    told = " ".join(finetune(*arguments).told.split())
    assert "(r 3, alpha 5); dropout 0, and 0.1 before; its file names the base somebody/base, and this run " in told
    assert finetune(*arguments, "adapter.r=3", "adapter.target_modules=[q_proj, v_proj]").code == 0, "as the file says"
