"""The benchmarks run, in a size that says nothing about speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_offload_benchmark(tmp_path: Path) -> None:
    variants = ["no offload", "ours, cpu_fused"]
    output = tmp_path / "offload.jsonl"
    sizes = ["--sizes", "tiny", "--tokens", "64", "--rounds", "2", "--steps", "1"]
    done = subprocess.run(
        [sys.executable, "benchmarks/offload.py", *sizes, "--variants", *variants, "--output", str(output)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["variant"] for record in records] == variants
    for record in records:
        assert "left_out" not in record
        assert record["tokens_per_second"] > 0
        assert record["step_ratio"]["ratio"] > 0
        assert record["tokens_per_step"] == 64
        assert record["versions"]["torch"]
    assert [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")] == records
    assert all(variant in done.stdout.splitlines()[-2 + i] for i, variant in enumerate(variants))
    assert output.with_suffix(".png").stat().st_size > 0


def test_the_benchmark_of_data_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/data.py", "--gigabytes", "0.002", "--rows", "40", "--rounds", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["what"] for row in rows] == ["packing", "tokenising", "tokenising"]
    assert rows[0]["ratio"] > 0
    assert rows[1]["rows"] > 500


def test_the_benchmark_of_the_heads_loss_runs(tmp_path: Path) -> None:
    output = tmp_path / "head_loss.jsonl"
    sizes = ["--sizes", "300,500,16", "--dtypes", "float32", "--rounds", "1", "--output", str(output)]
    subprocess.run([sys.executable, "benchmarks/head_loss.py", *sizes], cwd=ROOT, check=True, timeout=240)
    record = json.loads(output.read_text())
    assert max(record["error_of_loss_hidden_weight"]["ours"]) <= 1e-6
    assert record["cpu_time_ratio"]["whole logits"]["ratio"] == 1.0
    assert record["peak_mib"].keys() == record["cpu_time_ratio"].keys() >= {"whole logits", "ours"}
