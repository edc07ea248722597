"""Sizes of the parts of models that read more than text, against sums written out by name; and who tells them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.every_multimodal import on_meta
from support.refusals import finetune
from support.texts import make_texts, write_rows
from support.tiny import llama, recipe_values
from support.tiny_multimodal import save_multimodal
from torch import nn
from typer.testing import CliRunner

from toolkit.cli.app import app
from toolkit.model.adapters.adapters import add_adapter, quantise
from toolkit.model.part_sizes import PartSize, adapter_fact, describe_parts, part_sizes
from toolkit.model.structure.model_parts import LANGUAGE, freeze_untrained
from toolkit.recipe.schema import AdapterSection

TEXTS = [" ".join(text.split()[:6]) for text in make_texts(24, seed=4)]


TABLES = ("embed_tokens.weight", "position_embedding.weight", "lm_head.weight")
"""Matrices that no adapter is asked to be on."""


def llava() -> Any:
    model = on_meta("llava", small=True)
    freeze_untrained(model, (LANGUAGE,))
    return model


def count(model: nn.Module, *words: str, matrices: bool = False) -> int:
    """Parameters with one of the words in their names; of blocks' matrices alone without embeddings and head."""
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if any(word in name for word in words) and not (matrices and (parameter.ndim < 2 or name.endswith(TABLES)))
    )


def test_a_model_trained_in_full() -> None:
    model = llava()
    assert part_sizes(model) == {
        "language": PartSize(count(model, "language_model", "lm_head"), count(model, "language_model", "lm_head")),
        "projector": PartSize(count(model, "projector")),
        "vision": PartSize(count(model, "vision_tower")),
    }
    assert sum(size.parameters for size in part_sizes(model).values()) == count(model, "")


@pytest.mark.parametrize("bits", ["none", "nf4"])
def test_adapters_cover_the_language_model_alone(bits: str) -> None:
    plain, model = llava(), llava()
    section = AdapterSection(kind="lora", r=2, target_modules="all-linear", quantize=bits)
    quantise(model, section)
    adapted = add_adapter(model, section, None)
    blocks = count(plain, "language_model", matrices=True)
    rank_times_sides = sum(  # of A, (r, inputs), and B, (outputs, r)
        2 * sum(parameter.shape)
        for name, parameter in plain.named_parameters()
        if "language_model" in name and parameter.ndim == 2 and "embed" not in name
    )
    assert blocks
    assert part_sizes(adapted) == {
        "language": PartSize(count(plain, "language_model", "lm_head"), rank_times_sides, 1.0),
        "projector": PartSize(count(plain, "projector"), 0, 0.0),
        "vision": PartSize(count(plain, "vision_tower"), 0, 0.0),
    }
    whole = blocks + count(plain, "projector", "vision_tower", matrices=True)
    assert adapter_fact(adapted, (LANGUAGE,)) == f"on {blocks / whole:.1%} of the blocks' weights", "towers are frozen"


def test_some_layers_alone() -> None:
    model = llava()
    queries = sum(p.numel() for n, p in model.named_parameters() if "language_model" in n and "q_proj" in n)
    share = queries / count(model, "language_model", matrices=True)
    adapted = add_adapter(model, AdapterSection(kind="lora", target_modules=["q_proj"]), None)
    assert part_sizes(adapted)["language"].adapted == pytest.approx(share)
    assert "none on mlp.down_proj, mlp.gate_proj" in adapter_fact(adapted, (LANGUAGE,))


def test_a_model_of_text_has_no_parts() -> None:
    assert part_sizes(llama()) == {}


def test_the_line() -> None:
    sizes = {"vision": PartSize(1000), "language": PartSize(5000, 40, 0.5)}
    assert describe_parts(sizes) == (
        "language 5,000 (40 trained, adapters on 50.0% of its blocks' weights); "
        "vision 1,000 (frozen, without gradients and optimizer state)"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    save_multimodal("llava", folder / "model", TEXTS)
    write_rows(folder / "rows.jsonl", ({"text": text} for text in TEXTS))
    values = recipe_values(folder / "model", folder / "rows.jsonl", folder / "run", folder / "cache")
    (folder / "recipe.yaml").write_text(json.dumps(values))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [[], ["adapter.kind=lora"]])
def test_plan_init_and_a_run_tell_them(folder: Path, adapter: list[str]) -> None:
    model = llava()
    language = count(model, "language_model", "lm_head")
    asked = ["plan", str(folder / "recipe.yaml"), "--cpu", "1", *adapter]
    planned = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)["parts"]
    assert {part: size["parameters"] for part, size in planned.items()} == {
        "language": language,
        "projector": count(model, "projector"),
        "vision": count(model, "vision_tower"),
    }
    assert [part for part, size in planned.items() if size["trained"]] == ["language"]
    assert planned["language"]["adapted"] == (1.0 if adapter else None)
    assert f"parts: language {language:,} (" in CliRunner().invoke(app, asked).stdout
    method = ["--method", "lora" if adapter else "pretrain"]
    options = ["init", str(folder / "model"), str(folder / "rows.jsonl"), "--cpu", "1", *method, "--force"]
    suggested = CliRunner().invoke(app, [*options, "--to", str(folder / "mine.yaml")])
    assert f"parts: language {language:,} (" in suggested.stdout, suggested.output
    told = finetune(str(folder / "recipe.yaml"), *adapter, "--dry-run").told
    assert f"parts: language {language:,} (" in told, told
