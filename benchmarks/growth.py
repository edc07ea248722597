"""How what stands beside a step grows: with the run's steps, rows, checkpoints, layers and ranks.

    python benchmarks/growth.py [--parts report records ...] [--output benchmarks/results/growth.jsonl]

Each size works in a process of its own. CPU time counts from the end of the imports; memory is the largest resident
set above that moment. An exponent is the slope of log CPU time against log size, by least squares: 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from facts import facts, show, tell

SIZES = {
    "report": (1_000, 10_000, 100_000),
    "records": (1_000, 10_000, 100_000),
    "rows": (100, 1_000, 10_000),
    "order": (10_000, 100_000, 1_000_000),
    "checkpoints": (1, 10, 100),
    "layers": (8, 80, 800),
    "ranks": (8, 80, 800),
}
"""Part -> its sizes, a tenfold step between two."""

Prepared = Callable[[], Any]


def records(count: int) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of a run of `count` steps with 20 evaluations."""
    found: list[dict[str, Any]] = []
    for step in range(1, count + 1):
        figures = {"loss": 2 + 5 / step, "gradient_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second": 1e4}
        found.append({"split": "train", "step": step, **figures, "step_seconds": 0.5, "targets": 8000 * step})
        if step % max(1, count // 20) == 0:
            found.append({"split": "eval", "step": step, "loss": 2 + 5 / step})
    return found


def report(size: int, folder: Path) -> Prepared:
    """The report of a run of `size` steps."""
    from toolkit.pages.run_page import RunSummary, write_report

    summary = RunSummary("run", "", records(size), {}, [], {}, {}, None)
    return lambda: write_report(folder / "report.html", summary)


def records_read(size: int, folder: Path) -> Prepared:
    """The records of `size` steps as a resumed run reads them and writes them again."""
    from toolkit.checkpoint.state import read_records
    from toolkit.training.durable_writes import LinesFile

    lines = [json.dumps(record) + "\n" for record in records(size)]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    again = LinesFile(folder / "again.jsonl", print)
    return lambda: again.replace([json.dumps(record) + "\n" for record in read_records(folder)])


def rows(size: int, folder: Path) -> Prepared:
    """`size` conversations read, rendered, masked, checked and packed, in one thread."""
    import torch
    from rows import train_tokenizer, write_rows
    from transformers import PreTrainedTokenizerFast

    from toolkit.data import build
    from toolkit.recipe.schema import DataSection

    torch.set_num_threads(1)
    write_rows(folder / "rows.jsonl", size)
    train_tokenizer(folder / "rows.jsonl", folder / "tokenizer", "chatml")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    settings = {"train": str(folder / "rows.jsonl"), "max_length": 2048, "cache_dir": str(folder / "cache")}
    section = DataSection.model_validate({**settings, "long_rows": "truncate"})
    return lambda: build.build(section, tokenizer, 0)


def order(size: int, folder: Path) -> Prepared:
    """The first sample of a resumed run, in the middle of the tenth pass over `size` samples."""
    from toolkit.data.samples.loader import EpochOrder

    found = EpochOrder(size, 0, shuffle=True)
    return lambda: found[size * 9 + size // 2]


def checkpoints(size: int, folder: Path) -> Prepared:
    """The newest of `size` checkpoints of a small run, found as at a start."""
    from toolkit.checkpoint.manifest import latest

    made = _small_run(folder)
    for number in range(2, size + 1):
        _copy_checkpoint(made, number)
    return lambda: latest(folder / "out")


def _small_run(folder: Path) -> Path:
    """The one checkpoint of a run of one step."""
    from toolkit import Recipe, finetune

    path = folder / "rows.jsonl"
    path.write_text('{"text": "a king and a queen walked by the river"}\n' * 8, encoding="utf-8")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    values = {
        "model": {"config": {"model_type": "llama", **sizes}, "train_tokenizer_vocab_size": 300},
        "data": {"train": str(path), "max_length": 32, "cache_dir": str(folder / "cache")},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"max_steps": 1, "output_dir": str(folder / "out")},
        "checkpoint": {"every_steps": 1},
        "export": {"enabled": False},
    }
    finetune(Recipe.from_mapping(values))
    (found,) = (folder / "out/checkpoints").glob("step_*")
    return found


def _copy_checkpoint(made: Path, number: int) -> None:
    target = made.with_name(f"step_{number:08d}")
    shutil.copytree(made, target)
    manifest = target / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 1,', f'"step": {number},'))


def layers(size: int, folder: Path) -> Prepared:
    """The plan of a Llama of `size` layers of 4,096 on 8 ranks."""
    return _planned(size, 8)


def ranks(size: int, folder: Path) -> Prepared:
    """The plan of a Llama of 32 layers of 4,096 on `size` ranks."""
    return _planned(32, size)


def _planned(num_layers: int, num_ranks: int) -> Prepared:
    from toolkit import Recipe
    from toolkit.planning.hardware import hardware_of
    from toolkit.planning.table import plan

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 128_256}
    config = {"model_type": "llama", **sizes, "num_key_value_heads": 8, "num_hidden_layers": num_layers}
    model = {"config": config, "train_tokenizer_vocab_size": 1000}
    data = {"train": "rows.jsonl", "max_length": 2048}
    others = {"optimizer": {"learning_rate": 1e-3}, "training": {"max_steps": 10, "output_dir": "out"}}
    recipe = Recipe.from_mapping({"model": model, "data": data, **others})
    return lambda: plan(recipe, hardware_of("h100_sxm"), num_ranks)


PARTS = {
    "report": report,
    "records": records_read,
    "rows": rows,
    "order": order,
    "checkpoints": checkpoints,
    "layers": layers,
    "ranks": ranks,
}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def work(part: str, size: int) -> None:
    """In a process of its own: prints the CPU seconds and the memory (bytes) of one size."""
    with tempfile.TemporaryDirectory() as folder:
        prepared = PARTS[part](size, Path(folder))
        before = resident_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # the largest resident set begins anew
        started = time.process_time()
        prepared()
        seconds = time.process_time() - started
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"cpu": round(seconds, 4), "bytes": max(0, int(peak.split()[1]) * 1024 - before)}))


def measured(part: str, size: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--work", part, str(size)]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": paths, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def exponent(sizes: tuple[int, ...], values: list[float]) -> float:
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(v) for v in values]).slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--output", type=Path, help="JSON lines to add to")
    parser.add_argument("--work", nargs=2, metavar=("PART", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work[0], int(options.work[1]))
        return
    table = []
    for part in options.parts:
        found = [measured(part, size) for size in SIZES[part]]
        slope = round(exponent(SIZES[part], [max(each["cpu"], 1e-4) for each in found]), 2)
        tell({**facts(), "part": part, "sizes": SIZES[part], "found": found, "exponent": slope}, options.output)
        for size, each in zip(SIZES[part], found, strict=True):
            table.append([f"{part} {size:,}", each["cpu"], round(each["bytes"] / 1e6, 1), slope])
    show("Beside the step", ["", "CPU s", "MB", "exponent"], table)


if __name__ == "__main__":
    main()
