"""The longest row: it fits, a longer one does not, and more ranks hold a longer one."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.errors import BadInputError
from toolkit.paths import GIB
from toolkit.planning.longest import STEP, longest_rows
from toolkit.planning.planner import HEADROOM, Planner
from toolkit.planning.setup import Setup
from toolkit.planning.time.hardware import presets
from toolkit.planning.workload.workload import UNMASKED, workload_of
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
HARDWARE = replace(presets()["h100_sxm"], memory_bytes=3 * GIB)


@pytest.mark.slow
def test_more_ranks_hold_a_longer_row_which_fits() -> None:
    recipe = Recipe.load("pretrain", {"model.config": {"model_type": "llama", **SIZES, **HEADS}})
    alone, shared = (longest_rows(recipe, HARDWARE, ranks, "bf16") for ranks in (1, 8))
    for rows in (alone, shared):
        for verdict, found in rows.items():
            need = found.row.peak.total * HEADROOM[verdict] + 2 * GIB
            assert need <= 3 * GIB
            assert need * (1 + 2 * STEP / found.tokens) > 0.99 * 3 * GIB, "there is no room for a longer one"
        assert rows["fits"].tokens < rows["tight"].tokens
    # 4 heads: two groups of 4 of the 8 ranks.
    assert "sharding.sequence=4" in shared["fits"].settings
    assert shared["fits"].tokens == pytest.approx(4 * alone["fits"].tokens, rel=0.1)


@pytest.mark.slow
def test_a_row_beyond_the_models_positions_is_told() -> None:
    sizes = {"model_type": "llama", **SIZES, **HEADS}
    recipe = Recipe.load("pretrain", {"model.config": {**sizes, "max_position_embeddings": 2048}})
    found = longest_rows(recipe, HARDWARE, 1, "bf16")["fits"]
    assert "the model itself ends at 2,048 positions" in found.describe()


def test_no_row_at_all_is_told() -> None:
    recipe = Recipe.load("pretrain", {"model.config": {"model_type": "llama", **SIZES, **HEADS}})
    with pytest.raises(BadInputError, match="--longest-row: no row of 1,024 tokens a device fits"):
        longest_rows(recipe, replace(HARDWARE, memory_bytes=GIB), 1, "bf16")


def test_offloaded_checkpoints_of_all_blocks_are_on_the_host() -> None:
    sizes = {**SIZES, **HEADS, "num_hidden_layers": 7}
    recipe = Recipe.load("pretrain", {"model.config": {"model_type": "llama", **sizes}, "data.max_length": 512})
    planner = Planner(recipe, replace(workload_of(recipe, "bf16"), attention=UNMASKED), HARDWARE)
    setup = Setup(STRATEGIES["zero3"], MeshShape(1, 2), False, Checkpointing(1, True), 1, 1)
    # The input of each block in bf16; positions, the embeddings of positions and such are small.
    assert planner.probe(setup).host_peak == pytest.approx(7 * 512 * 256 * 2, rel=0.2)


LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
LORA = {"adapter.kind": "lora", "export.merge": True, "model.dtype": "bfloat16"}


@pytest.mark.grid
@pytest.mark.parametrize(("kind", "ranks"), itertools.product(("full fine-tune", "LoRA"), (1, 8)))
def test_the_page_has_the_longest_rows_of_llama_8b(kind: str, ranks: int) -> None:
    page = (Path(__file__).parents[3] / "docs/long_rows.md").read_text()
    [told] = re.findall(rf"^\| {kind}, {ranks} GPUs? \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) GiB \|$", page, re.MULTILINE)
    recipe = Recipe.load("pretrain", {"model.config": LLAMA_8B, **(LORA if kind == "LoRA" else {})})
    found = longest_rows(recipe, presets()["h100_sxm"], ranks, "bf16")
    host = found["tight"].row.host_bytes / GIB
    assert [f"{found['fits'].tokens:,}", f"{found['tight'].tokens:,}", f"{host:,.0f}"] == list(told)


OTHERS = {
    "preference": {"objective.kind": "preference"},
    "kto": {"objective.kind": "kto"},
    "reward": {"objective.kind": "reward"},
    "classes": {"objective.kind": "sequence_classification", "objective.labels": ["a", "b"], "data.packing": None},
    "tags": {"objective.kind": "token_classification", "objective.labels": ["a", "b"], "data.packing": None},
}


@pytest.mark.parametrize(
    "kind", ["classes", *(pytest.param(kind, marks=pytest.mark.grid) for kind in OTHERS if kind != "classes")]
)
def test_every_objective_is_planned_on_shared_rows(kind: str) -> None:
    """Two ranks hold half of the activations each, but for what is as large whatever the row."""
    peaks = []
    for parts in (1, 2):
        changes = {"model.config": {"model_type": "llama", **SIZES, **HEADS}, "data.max_length": 4096}
        changes |= {"training.micro_batch_size": 1, "sharding.sequence": parts, **OTHERS[kind]}
        changes |= {"data.streaming": False, "data.long_rows": "error", "data.targets": None}
        recipe = Recipe.load("pretrain", changes)
        planner = Planner(recipe, replace(workload_of(recipe, "bf16"), attention=UNMASKED), HARDWARE)
        setup = Setup(STRATEGIES["zero3"], MeshShape(1, 2), False, None, 1, 1)
        peaks.append(max(event.peak for event in planner.probe(setup).events))
    assert peaks[1] == pytest.approx(peaks[0] / 2, rel=0.05)
