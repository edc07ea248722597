"""The benchmarks run, in a size that says nothing about speed, and both sides of them do the same work."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.ranks import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]

ONCE = ("--tiny", "--rounds", "1")
SMALL = {
    "offload": ("--sizes", "tiny", "--tokens", "64", "--rounds", "2", "--steps", "1", "--variants", "ours, cpu_fused"),
    "data": ("--gigabytes", "0.002", "--rows", "40", "--rounds", "1"),
    "peers": (*ONCE, "--groups", "padded", "--variants", "toolkit zero3", "--steps", "1"),
    "peers_apart": (*ONCE, "--tools", "toolkit", "--cells", "packed LoRA", "--rows", "11"),
    "qlora": (*ONCE, "--ranks", "1"),
    "sequence": ("--tiny", "--rounds", "2", "--lengths", "64"),
    "tensor": ("--tiny", "--rounds", "2", "--tokens", "32"),
    "scaling": (*ONCE, "--sweeps", "vocabulary", "--steps", "1"),
    "mfu": ("--tiny", "--levers", "none", "offload"),
    "rows": ("--rows", "60", "--rounds", "1"),
    "head_loss": ("--sizes", "300,500,16", "--dtypes", "float32", "--rounds", "1"),
    "acceptance": ("--tiny",),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_and_prints_what_it_writes(name: str, tmp_path: Path) -> None:
    output = tmp_path / f"{name}.jsonl"
    command = [sys.executable, f"benchmarks/{name}.py", *SMALL[name]]
    keeps = [] if name == "data" else ["--output", str(output)]
    done = subprocess.run([*command, *keeps], cwd=ROOT, text=True, capture_output=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    written = output.read_text() if keeps else done.stdout
    records = [json.loads(line) for line in written.splitlines()]
    assert records
    for record in records:
        assert not {"left_out", "failed"} & record.keys()
        losses = list(record["losses"].values()) if isinstance(record.get("losses"), dict) else []
        assert all(other == pytest.approx(losses[0], rel=1e-3) for other in losses), "the same rows, in the same order"
        assert record.get("loss_difference", 0.0) < 1e-5
        assert record.get("passed", True)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_can_be_imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(path.parent))
    importlib.import_module(path.stem)


def test_rows_of_the_peers_are_those_of_the_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed, they meet other rows in a batch, but the same ones in all."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import peers

    from toolkit.data import build
    from toolkit.data.tokens import tokenizer
    from toolkit.recipe.recipe import Recipe

    job = peers.Job(str(tmp_path), peers.TINY, 64, 4, 1)
    peers.write_rows(job, 40)
    peers.write_recipe(job)
    recipe = Recipe.load(tmp_path / "recipe.yaml", ["data.packing=true"])
    words = tokenizer.load(recipe.model, recipe.data)
    samples: Any = build.build(recipe.data, words, 0).train
    found = [document for number in range(len(samples)) for document in samples.documents(number)]
    assert sorted(found) == sorted(job.rows())
