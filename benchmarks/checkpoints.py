"""What a checkpoint costs: how long training stands still, against a step's time, and the bytes written.

    python benchmarks/checkpoints.py [--ranks 2] [--rounds 8] [--output benchmarks/results/checkpoints.json]

Each round takes some steps, then saves synchronously, then asynchronously, with steps going on meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import turns
from offload import Job as Shape
from offload import batches, loader_of, loss_of, meta_model

STEPS = 4
TOKENS = 512


def work(pipe: Connection, variant: str, rank: int, ranks: int, meeting: str) -> None:
    from accelerate import Accelerator

    from toolkit.checkpoint.manifest import Manifest
    from toolkit.checkpoint.state import named_tensors, random_states
    from toolkit.checkpoint.writer import Checkpointer, Save
    from toolkit.recipe.schema import CheckpointSection
    from toolkit.sharding import sharding_kwargs

    turns.join(rank, ranks, meeting)
    shape = Shape("small", TOKENS, STEPS)
    accelerator = Accelerator(mixed_precision="bf16", **sharding_kwargs("zero3"))
    model = meta_model(shape)
    accelerator.state.fsdp_plugin.load_weights = loader_of(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    source = batches(shape, accelerator.device, rank)
    run = Path(meeting.removeprefix("file://") + "-run")
    problems: list[str] = []
    ways = {way: Checkpointer(run / way, _section(CheckpointSection, way), problems.append) for way in WAYS}
    numbers = iter(range(1, 10**6))

    def step() -> None:
        accelerator.backward(loss_of(model, next(source)))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def job() -> Save:
        number = next(numbers)
        manifest = Manifest(number, number, ranks, "zero3", "bf16", {}, "", {}, None, None, "", {})
        return Save(manifest, named_tensors(model, optimizer.optimizer), random_states(), [])

    def timed(action: Any) -> float:
        dist.barrier()
        started = time.perf_counter()
        action()
        return time.perf_counter() - started

    def steps() -> None:
        for _ in range(STEPS):
            step()

    steps()
    pipe.send("ready")
    while pipe.recv() == "go":
        found = {"step": timed(steps) / STEPS, "synchronous": timed(lambda: ways["synchronous"].save(job()))}
        dist.barrier()
        started = time.perf_counter()
        ways["asynchronous"].save(job())
        found["asynchronous stall"] = time.perf_counter() - started
        found["step while saving"] = timed(steps) / STEPS
        ways["asynchronous"].wait()
        found["asynchronous until written"] = time.perf_counter() - started
        assert not problems, problems
        tensors = named_tensors(model, optimizer.optimizer)
        state = sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in tensors.values())
        last = sorted((run / "synchronous" / "checkpoints").glob("step_*"))[-1]
        found["written"] = sum(path.stat().st_size for path in last.iterdir()) / ranks
        found["state"] = state
        pipe.send(found)


WAYS = ("synchronous", "asynchronous")


def _section(section: Any, way: str) -> Any:
    return section(every_steps=1, keep_last=1, asynchronous=way == "asynchronous")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        ends = turns.start(work, "zero3", options.ranks, folder)
        for _ in range(options.rounds):
            taken = turns.turn(ends)
            rounds.append({key: max(rank[key] for rank in taken) for key in taken[0]})
        turns.stop(ends)
    medians = {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {package: version(package) for package in ("torch", "accelerate", "transformers")},
        "ranks": options.ranks,
        "rounds": options.rounds,
        "parameters": sum(parameter.numel() for parameter in meta_model(Shape("small", TOKENS, STEPS)).parameters()),
        "seconds": {key: round(value, 4) for key, value in medians.items() if key not in ("written", "state")},
        "in_steps": {
            key: round(statistics.median(found[key] / found["step"] for found in rounds), 3)
            for key in ("synchronous", "asynchronous stall", "asynchronous until written", "step while saving")
        },
        "bytes_written_by_bytes_of_state": round(medians["written"] / medians["state"], 4),
    }
    print(json.dumps(result, indent=2))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
