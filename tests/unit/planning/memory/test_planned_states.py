"""State space layers that a plan runs by few products: they take what transformers' own loop over tokens takes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.tiny import tiny_config

from toolkit.model.structure.fake_tensors import grouped_products, without_logs
from toolkit.planning.memory import probe
from toolkit.planning.memory.probe import Probe, Prober
from toolkit.planning.workload.workload import workload_of
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.blocks.checkpointing import Checkpointing


def probed(kind: str, folder: Path, tokens: int, precision: str, whole: bool, checkpointed: bool) -> Probe:
    tiny_config(kind).save_pretrained(folder)
    recipe = Recipe.from_mapping(
        {
            "model": {"name_or_path": str(folder)},
            "data": {"train": "rows.jsonl", "max_length": tokens},
            "optimizer": {"learning_rate": 1e-3},
            "training": {"output_dir": "run", "max_steps": 3},
        }
    )
    with without_logs(), grouped_products():
        return Prober(workload_of(recipe, precision), whole).probe(2, Checkpointing(1) if checkpointed else None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "precision", "whole", "checkpointed"),
    [
        ("mamba", "bf16", False, False),
        ("mamba", "bf16", True, True),
        pytest.param("falcon_mamba", "no", False, True, marks=pytest.mark.grid),
        pytest.param("jamba", "bf16", False, True, marks=pytest.mark.grid),
        ("zamba", "bf16", False, False),
    ],
)
def test_memory_is_that_of_a_loop_over_tokens(
    kind: str, precision: str, whole: bool, checkpointed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = probed(kind, tmp_path, 40, precision, whole, checkpointed)
    monkeypatch.setattr(probe, "few_products", lambda *_: nullcontext())
    loop = probed(kind, tmp_path, 40, precision, whole, checkpointed)
    assert [(event.kind, event.unit) for event in few.events] == [(event.kind, event.unit) for event in loop.events]
    for most in ("peak", "level"):
        found, expected = (max(getattr(event, most) for event in each.events) for each in (few, loop))
        assert 1.0 <= found / expected < 1.1, most


def test_as_many_operators_run_for_longer_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, on_operator = [0], probe._Run._on_operator

    def counted(*args: Any) -> Any:
        counts[-1] += 1
        return on_operator(*args)

    monkeypatch.setattr(probe._Run, "_on_operator", counted)
    for tokens in (32, 4096):
        probed("mamba", tmp_path, tokens, "bf16", False, True)
        counts.append(0)
    assert counts[0] == counts[1] > 0
