"""The benchmarks run, in a size that says nothing about speed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.ranks import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]

WITHOUT = """
import runpy, sys
class Missing:
    def find_spec(self, name, *_):
        if name.partition('.')[0] in ('datasets', 'pydantic'):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
sys.argv = sys.argv[1:]
sys.path.insert(0, 'benchmarks')
runpy.run_path(sys.argv[0], run_name='__main__')
"""
"""A Python without what a machine for measuring may lack."""


def run(arguments: list[str], output: Path, *python: str) -> list[dict[str, Any]]:
    """The records that a benchmark has written, which it has printed, too."""
    done = subprocess.run(
        [sys.executable, *python, *arguments, "--output", str(output)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")] == records
    assert all(record["versions"]["torch"] and record["machine"] and record["date"] for record in records)
    return records


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.grid
def test_the_offload_benchmark(tmp_path: Path) -> None:
    variants = ["no offload", "ours, cpu_fused"]
    output = tmp_path / "offload.jsonl"
    sizes = ["--sizes", "tiny", "--tokens", "64", "--rounds", "2", "--steps", "1"]
    done = subprocess.run(
        [sys.executable, "benchmarks/offload.py", *sizes, "--variants", *variants, "--output", str(output)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=LIMIT_SECONDS,
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


@pytest.mark.grid
def test_the_benchmark_of_data_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/data.py", "--gigabytes", "0.002", "--rows", "40", "--rounds", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["what"] for row in rows] == ["packing", "tokenising", "tokenising"]
    assert rows[0]["ratio"] > 0
    assert rows[1]["rows"] > 500


@pytest.mark.grid
def test_the_toolkit_beside_its_peers(tmp_path: Path) -> None:
    arguments = ["benchmarks/peers.py", "--tiny", "--groups", "padded", "--variants", "toolkit zero3"]
    records = run([*arguments, "--rounds", "1", "--steps", "1"], tmp_path / "peers.jsonl")
    by_hand, ours, target = records
    assert (by_hand["variant"], ours["variant"]) == ("DDP by hand", "toolkit zero3")
    assert ours["loss_difference"] < 1e-5  # the same rows, in the same order
    assert ours["first_loss"] == pytest.approx(math.log(512), rel=0.02)
    assert ours["tokens_per_cpu_second"] > 0
    assert ours["peak_rank_bytes"] > ours["peak_above_imports_bytes"] > 0
    assert target["cpu_ratio"] == ours["cpu_ratio"]


@pytest.mark.grid
def test_a_tool_beside_those_of_other_environments(tmp_path: Path) -> None:
    arguments = ["benchmarks/peers_apart.py", "--tiny", "--tools", "toolkit", "axolotl", "--cells", "packed LoRA"]
    # No interpreter for axolotl is given; 11 rows fill four packs.
    [record] = run([*arguments, "--rounds", "1", "--rows", "11"], tmp_path / "peers_apart.jsonl")
    assert record["tool"] == "toolkit"
    assert "failed" not in record
    assert record["losses"][0] == pytest.approx(math.log(7567), rel=0.02)
    assert len(record["losses"]) == 2  # epochs of one micro-batch
    assert record["rate_of_toolkits"]["ratio"] == 1
    assert record["tokens_per_cpu_second"] > 0
    assert record["row_tokens"] > record["rows"] * 100


@pytest.mark.grid
def test_the_benchmark_of_qlora(tmp_path: Path) -> None:
    records = run(["benchmarks/qlora.py", "--tiny", "--ranks", "1", "--rounds", "1"], tmp_path / "qlora.jsonl")
    assert {record["what"] for record in records} >= {"QLoRA / LoRA", "QLoRA / peft + bitsandbytes"}
    for record in records:
        ours, theirs = record["losses"].values()
        # Before its first step and after it: 4 bits, and rounding to 16, make a small difference.
        assert ours == pytest.approx(theirs, rel=1e-3)
        assert record["cpu"]["ratio"] > 0


@pytest.mark.grid
def test_the_benchmark_of_shared_rows(tmp_path: Path) -> None:
    arguments = ["benchmarks/sequence.py", "--tiny", "--lengths", "64", "--rounds", "2"]
    [record] = run(arguments, tmp_path / "sequence.jsonl")
    alone, shared = record["losses"].values()
    assert alone == pytest.approx(shared, rel=1e-5), "the same rows, in the same order"
    assert len(alone) == 2
    assert record["tokens"] == 64
    assert record["cpu"]["ratio"] > 0
    assert record["wall"]["ratio"] > 0


@pytest.mark.grid
def test_the_benchmark_of_tensor_groups(tmp_path: Path) -> None:
    """On the same rows and weights as the others."""
    [record] = run(["benchmarks/tensor.py", "--tiny", "--tokens", "32", "--rounds", "2"], tmp_path / "tensor.jsonl")
    ours, zero3, theirs = record["losses"].values()
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours == pytest.approx(zero3, rel=1e-5)
    assert all(ratios["cpu"]["ratio"] > 0 for ratios in record["against"].values())


def test_rows_of_the_peers_are_those_of_the_toolkit(tmp_path: Path, modules: None) -> None:
    """Packed, they meet other rows in a batch, but the same ones in all."""
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


@pytest.mark.grid
def test_the_benchmark_of_scaling(tmp_path: Path) -> None:
    arguments = ["benchmarks/scaling.py", "--tiny", "--sweeps", "vocabulary", "--rounds", "1", "--steps", "1"]
    [record] = run(arguments, tmp_path / "scaling.jsonl")
    assert record["sizes"] == [256, 1024, 4096]
    assert all(seconds > 0 for seconds in record["cpu_seconds"])
    assert math.isfinite(record["exponent"])


def test_exponents(modules: None) -> None:
    import scaling

    assert scaling.exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
    points = scaling.SWEEPS["length"][1]
    quadratic = [1e-9 * point.length**2 for point in points]
    as_arithmetic = [1e-9 * point.flops for point in points]
    assert not scaling.record("length", points, quadratic)["no_worse"]
    assert scaling.record("length", points, as_arithmetic)["no_worse"]


def test_the_arithmetic_of_scaling(modules: None) -> None:
    """As counted on a model itself: two operations for each weight and token, three times with backward."""
    import scaling
    from transformers import LlamaForCausalLM

    point = scaling.Point(layers=2, hidden=64, vocabulary=96, length=16, tokens=32, ranks=2)
    model = LlamaForCausalLM(point.config())
    matrices = [p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    assert point.parameters == sum(matrices)
    attention = 3 * (2 * 2 * point.length * point.hidden * point.layers)  # scores and values, of all positions
    optimizer = 16 * (sum(matrices) + 96 * 64)
    assert point.flops == 2 * 32 * (6 * sum(matrices) + attention) + optimizer


@pytest.mark.grid
def test_the_benchmark_of_mfu_without_datasets(tmp_path: Path) -> None:
    levers = ["none", "loss without logits", "offload"]
    arguments = ["benchmarks/mfu.py", "--tiny", "--levers", *levers]
    records = run(arguments, tmp_path / "mfu.jsonl", "-c", WITHOUT)
    assert [(record["training"], record["levers"]) for record in records] == [
        (training, lever) for training in ("full", "lora") for lever in levers
    ]
    assert all("left_out" not in record for record in records)
    for plain, other in ((records[0], records[1]), (records[3], records[4])):
        assert other["loss"] == pytest.approx(plain["loss"], abs=2e-3)  # in bf16, other sums


@pytest.mark.grid
def test_the_benchmark_of_rows(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    [record] = run(["benchmarks/rows.py", "--rows", "60", "--rounds", "1"], tmp_path / "rows.jsonl")
    # Both pack the same tokens by the same algorithm.
    assert record["samples"]["toolkit"] == record["samples"]["trl"] > 1
    assert record["cpu_seconds"]["ours"] > 0 < record["cpu_seconds"]["theirs"]


@pytest.mark.grid
def test_the_benchmark_of_starting(tmp_path: Path, modules: None) -> None:
    import startup

    config = str(ROOT / "accelerate_configs/cpu_2.yaml")
    parts = startup.launch(tmp_path, 0, "quickstart", config, ["data.max_validation_samples=8"])
    names = [
        "tokenizer",
        "data",
        "model",
        "prepare, with weights",
        "check of packing",
        "first evaluation",
        "first step",
    ]
    assert list(parts) == ["launcher", "interpreter", "imports", "accelerator", *names, "between", "all"]
    assert all(part["seconds"] >= 0 for part in parts.values())
    assert parts["all"]["seconds"] > parts["imports"]["seconds"] > 0
    assert "json" not in startup.by_library("import json, packaging.version", tmp_path)
    assert startup.by_library("import packaging.version", tmp_path)["packaging"] > 0


def test_the_benchmark_of_the_heads_loss_runs(tmp_path: Path) -> None:
    output = tmp_path / "head_loss.jsonl"
    sizes = ["--sizes", "300,500,16", "--dtypes", "float32", "--rounds", "1", "--output", str(output)]
    subprocess.run([sys.executable, "benchmarks/head_loss.py", *sizes], cwd=ROOT, check=True, timeout=LIMIT_SECONDS)
    record = json.loads(output.read_text())
    assert max(record["error_of_loss_hidden_weight"]["ours"]) <= 1e-6
    assert record["cpu_time_ratio"]["whole logits"]["ratio"] == 1.0
    assert record["peak_mib"].keys() == record["cpu_time_ratio"].keys() >= {"whole logits", "ours"}


def test_one_size_of_the_growth_benchmark(modules: None) -> None:
    import growth

    assert growth.measured("order", growth.SIZES["order"][0])["cpu"] > 0


def test_an_exponent_is_the_slope_of_logarithms(modules: None) -> None:
    import growth

    assert growth.exponent((10, 100, 1000), [3.0, 300.0, 30_000.0]) == pytest.approx(2)


@pytest.mark.grid
def test_the_acceptance_script_runs_through(tmp_path: Path) -> None:
    """Every step of it, on the CPU."""
    output = tmp_path / "acceptance.jsonl"
    done = subprocess.run(
        [sys.executable, "benchmarks/acceptance.py", "--tiny", "--output", str(output)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert all(json.loads(line)["passed"] for line in output.read_text().splitlines())
