"""docs/examples/more_trainers.py: others' trainers, sharded on 2 ranks, take the steps they take on one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from ranks import meet, run_on_ranks

EXAMPLE = Path(__file__).parents[2] / "docs/examples/more_trainers.py"
STEPS = 4


def losses(names: list[str], strategy: str | None, rows: int, folder: str) -> dict[str, Any]:
    from toolkit import ShardingMesh, ShardingPlugin

    spec = importlib.util.spec_from_file_location("more_trainers", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = {}
    for name in names:
        meet()
        mesh = ShardingMesh(plugin=ShardingPlugin(strategy)) if strategy is not None else None
        found[name] = example.train(name, f"{folder}/{name}-{strategy}", STEPS, mesh, rows)
    return found


def test_a_trainer_takes_the_steps_of_one_process(tmp_path: Path) -> None:
    names = ["reward", "seq2seq"]
    plain = run_on_ranks(losses, 1, names, None, 8, str(tmp_path))[0]
    for found in run_on_ranks(losses, 2, names, "zero3", 4, str(tmp_path)):
        for name in names:
            assert "FSDP" in found[name]["type"]
            assert len(plain[name]["losses"]) == STEPS
            assert found[name]["losses"] == pytest.approx(plain[name]["losses"], rel=1e-5), name
