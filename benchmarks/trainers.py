"""What the benchmarks of outcomes share: cells of a trainer and a seed, each trained in a process of its own."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from facts import tell

SEEDS = (1, 2, 3)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def package_folder(name: str, command: str) -> Path:
    """Returns the folder of a package. Raises SystemExit, with the command that installs it, if it is missing."""
    package = importlib.util.find_spec(name)
    if package is None or package.origin is None:
        raise SystemExit(command)
    return Path(package.origin).parent


def train_by_toolkit(base: Path, rows: Path, seed: int) -> None:
    """Runs the two commands of the README; `training.seed` is what differs from cell to cell. Writes `model`."""
    run = ["toolkit", "init", str(base), str(rows), "--cpu", "1", "--to", "recipe.yaml"]
    subprocess.run([*run, f"training.seed={seed}", "training.output_dir=run"], check=True)
    subprocess.run(["toolkit", "train", "recipe.yaml", "--cpu", "1"], check=True)
    os.replace("run/export", "model")


def run_cells(
    script: Path,
    arguments: argparse.Namespace,
    work: Path,
    score: Callable[[Path], dict[str, Any]],
    about: dict[str, Any],
) -> list[dict[str, Any]]:
    """Trains and scores each cell. Returns a record for each, and adds it to `arguments.output`.

    Args:
        script: the benchmark, which trains one cell if it gets `--train`.
        score: returns the figures of what was trained in a folder.
        about: facts for all records.
    """
    records = []
    for seed in arguments.seeds:
        for trainer in arguments.trainers:
            folder = work / f"{trainer}-{seed}"
            figures = _measure(script, trainer, work, seed, folder)
            records.append({"trainer": trainer, "seed": seed, **figures, **score(folder), **about})
            tell(records[-1], arguments.output)
    return records


def _measure(script: Path, trainer: str, work: Path, seed: int, folder: Path) -> dict[str, float]:
    """Trains in a process of `script`, in `folder`; minutes of CPU and of the clock, and the peak of memory in GiB."""
    folder.mkdir()
    words = [sys.executable, str(script.resolve()), "--train", trainer, "--work", str(work)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    start = time.perf_counter()
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        child = subprocess.Popen(
            [*words, "--seeds", str(seed)], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        _, status, used = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{trainer} failed: see {folder / 'log.txt'}")
    return {
        "cpu_minutes": (used.ru_utime + used.ru_stime) / 60,
        "minutes": (time.perf_counter() - start) / 60,
        "peak_gib": used.ru_maxrss / 2**20,
    }


def run_benchmark(
    about: str | None,
    trainers: Sequence[str],
    train: Callable[[str, Path, int], None],
    run: Callable[[argparse.Namespace, Path], None],
    tasks: Sequence[str] = (),
) -> None:
    """Reads the command line, and trains one cell or runs the benchmark.

    Args:
        about: the script's docstring, whose first line is its help.
        train: trains one cell, of a trainer and a seed, in the current folder.
        run: runs the benchmark in a folder.
        tasks: what `--task` chooses from; the first is the default.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--trainers", nargs="+", choices=trainers, default=list(trainers))
    if tasks:
        parser.add_argument("--task", choices=tasks, default=tasks[0])
    parser.add_argument("--work", type=Path, help="keep models and logs in this folder")
    parser.add_argument("--to", type=Path, help="add a line of JSON for each cell to this file")
    parser.add_argument("--train", choices=trainers, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train, arguments.work, arguments.seeds[0])
    elif arguments.work:
        arguments.work.mkdir(parents=True, exist_ok=True)
        run(arguments, arguments.work.resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            run(arguments, Path(folder))
