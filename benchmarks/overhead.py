"""Time of an optimizer step: the toolkit's strategies against loops written by hand, in turn in one run.

    python benchmarks/overhead.py [--ranks 2] [--rounds 20] [--output benchmarks/results/overhead.json]

A round lets each variant do a few steps, one variant after the other (see turns.py). CPU time, of all
ranks and threads together, is the steadier of the two where other programs use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import turns
from torch import nn

STEPS_A_TURN = 3
ROWS, T, VOCAB = 4, 128, 2048
PAIRS = {"zero3": "fsdp2 by hand", "zero2": "fsdp2 by hand, no reshard", "ddp": "ddp by hand"}
Turn = Callable[[], float]


def make_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        )
    )


def batch(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, VOCAB, (ROWS, T), generator=generator)
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(T).expand(ROWS, T).contiguous()}


def by_hand(variant: str, rank: int) -> Turn:
    """The loop that an expert writes: no metrics, no checks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model: nn.Module = make_model()
    if variant == "ddp by hand":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.model.layers:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, reshard_after_forward="no reshard" not in variant)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    steps = iter(range(10**9))

    def step() -> float:
        rows = batch(rank, next(steps))
        logits = model(input_ids=rows["input_ids"], position_ids=rows["position_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows["labels"][:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def by_toolkit(strategy: str, rank: int) -> Turn:
    """The trainer's own step: global token count, gathered losses and memory, checks for non-finite values."""
    from accelerate import Accelerator

    from toolkit import sharding_kwargs
    from toolkit.objectives.causal_lm import CausalLM
    from toolkit.optim.build import build_optimizer
    from toolkit.optim.schedule import build_schedule
    from toolkit.recipe.schema import OptimizerSection, ScheduleSection, TrainingSection
    from toolkit.training.trainer import Trainer

    accelerator = Accelerator(**sharding_kwargs(strategy))
    model: Any = make_model()
    objective = CausalLM(model)
    optimizer: Any = build_optimizer(model, OptimizerSection(learning_rate=1e-3))
    model, optimizer = accelerator.prepare(model, optimizer)
    schedule = build_schedule(optimizer.optimizer, ScheduleSection(kind="constant"), 10**6)
    settings = TrainingSection(output_dir="unused", max_steps=1)
    unused: Any = None
    trainer = Trainer(accelerator, model, optimizer, schedule, objective, settings, unused)
    model.train()
    steps = iter(range(10**9))
    return lambda: trainer.train_step([batch(rank, next(steps))]).loss


def work(pipe: Connection, variant: str, rank: int, ranks: int, meeting: str) -> None:
    turns.join(rank, ranks, meeting)
    step = by_toolkit(variant, rank) if variant in PAIRS else by_hand(variant, rank)
    pipe.send("ready")
    while pipe.recv() == "go":
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(STEPS_A_TURN):
            step()
        dist.barrier()
        pipe.send(((time.perf_counter() - wall) / STEPS_A_TURN, (time.process_time() - cpu) / STEPS_A_TURN))


def measure(ranks: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(clock, CPU time) of a step: of the slowest rank, and of all ranks together; for every round."""
    variants = [name for pair in PAIRS.items() for name in pair]
    with tempfile.TemporaryDirectory() as folder:
        ends = {variant: turns.start(work, variant, ranks, folder) for variant in variants}
        seconds: dict[str, list[tuple[float, float]]] = {variant: [] for variant in variants}
        for number in range(rounds + 1):
            for variant in variants if number % 2 else reversed(variants):
                taken = turns.turn(ends[variant])
                if number:  # the first round warms up
                    seconds[variant].append((max(wall for wall, _ in taken), sum(cpu for _, cpu in taken)))
        for pipes in ends.values():
            turns.stop(pipes)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    seconds = measure(options.ranks, options.rounds)
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {package: version(package) for package in ("torch", "accelerate", "transformers")},
        "ranks": options.ranks,
        "rounds": options.rounds,
        "parameters": sum(p.numel() for p in make_model().parameters()),
        "rows": f"{ROWS} x {T} tokens per rank, float32, clipping",
    }
    print(f"{'strategy':<8}{'against':<28}{'clock':>8}{'quartiles':>16}{'CPU time':>10}{'quartiles':>16}")
    for ours, theirs in PAIRS.items():
        rows = {
            kind: turns.ratios([pair[at] for pair in seconds[ours]], [pair[at] for pair in seconds[theirs]])
            for at, kind in enumerate(("clock", "cpu"))
        }
        result[ours] = {"against": theirs, **rows}
        texts = [f"{row['ratio']:>8.3f}{row['low']:>9.3f}-{row['high']:.3f} " for row in rows.values()]
        print(f"{ours:<8}{theirs:<28}{'  '.join(texts)}")
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
