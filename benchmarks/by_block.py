"""Accumulation by block: bytes that a rank sends in a step, and the step's time against zero3 by micro-batch.

    unshare --net python benchmarks/by_block.py [--rounds 5] [--output benchmarks/results/by_block.json]

Bytes are those of the loopback interface, so the benchmark wants a network namespace of its own, and sets that
interface up. Times are of `MICRO_BATCHES` micro-batches a step, the variants in turn (see turns.py); CPU time, of
both ranks and all threads together, is the steadier of the two where other programs use the machine.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import facts
import torch
import torch.distributed as dist
import torch.nn.functional as F
import turns

RANKS, T, VOCAB, MICRO_BATCHES = 2, 128, 2048, 8
FIRST = (1, 1, 2, 4, MICRO_BATCHES)  # the first to warm up, the others for the bytes
BY_BLOCK = "by block"
OTHERS = ("zero3", "zero3, checkpointed", "fsdp2 by hand, checkpointed")


def make_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        )
    )


def window(rank: int, step: int, micro_batches: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows = torch.randint(0, VOCAB, (micro_batches, 1, T), generator=generator)
    return [{"input_ids": ids, "labels": ids, "position_ids": torch.arange(T)[None]} for ids in rows]


def by_hand(rank: int) -> Callable[[int], None]:
    """The loop that an expert writes: no metrics, no checks; each micro-batch is reduced, as in zero3."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint

    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    steps = iter(range(10**9))

    def step(micro_batches: int) -> None:
        for batch in window(rank, next(steps), micro_batches):
            logits = model(
                input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
            ).logits.float()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
            (loss / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_toolkit(variant: str, rank: int) -> Callable[[int], None]:
    """The trainer's own step."""
    from accelerate import Accelerator

    from toolkit import sharding_kwargs
    from toolkit.objectives.causal_lm import CausalLM
    from toolkit.optim.build import build_optimizer, build_schedule
    from toolkit.recipe.schema import OptimizerSection, ScheduleSection, TrainingSection
    from toolkit.sharding import Checkpointing
    from toolkit.sharding.by_block import ByBlock
    from toolkit.sharding.plugin import accumulation_plugin
    from toolkit.training.trainer import Trainer

    arguments: Any = sharding_kwargs("zero3", checkpointing=None if variant == "zero3" else Checkpointing(1))
    accelerator = Accelerator(gradient_accumulation_plugin=accumulation_plugin(MICRO_BATCHES), **arguments)
    model: Any = make_model()
    objective = CausalLM(model)
    optimizer: Any = build_optimizer(model, OptimizerSection(learning_rate=1e-3))
    model, optimizer = accelerator.prepare(model, optimizer)
    schedule = build_schedule(optimizer.optimizer, ScheduleSection(kind="constant"), 10**6)
    settings = TrainingSection(output_dir="unused", max_steps=1)
    by_block = ByBlock(model, arguments["fsdp_plugin"].unit_plan) if variant == BY_BLOCK else None
    unused: Any = None
    trainer = Trainer(accelerator, model, optimizer, schedule, objective, settings, unused, unused, by_block=by_block)
    model.train()
    steps = iter(range(10**9))

    def step(micro_batches: int) -> None:
        accelerator.step, accelerator.gradient_accumulation_steps = 0, micro_batches
        trainer.train_step(window(rank, next(steps), micro_batches))

    return step


def work(pipe: Connection, variant: str, rank: int, ranks: int, meeting: str) -> None:
    """The first turns have the micro-batches of `FIRST`."""
    turns.join(rank, ranks, meeting)
    step = by_hand(rank) if "by hand" in variant else by_toolkit(variant, rank)
    counts = itertools.chain(FIRST, itertools.repeat(MICRO_BATCHES))
    pipe.send("ready")
    while pipe.recv() == "go":
        wall, cpu = time.perf_counter(), time.process_time()
        step(next(counts))
        pipe.send((time.perf_counter() - wall, time.process_time() - cpu))


def sent() -> int:
    """Bytes that all ranks have sent over the loopback interface so far."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[9])


def formula() -> int:
    """Bytes that a rank sends in a step by block: two gathers and a reduction of each unit, one gather of the tail."""
    model = make_model()
    whole = sum(p.numel() for p in model.parameters())
    tail = sum(p.numel() for part in (model.lm_head, model.model.norm) for p in part.parameters())
    return 4 * (2 * (whole - tail) + tail + whole) * (RANKS - 1) // RANKS


def measure_bytes(ends: dict[str, list[Connection]]) -> list[dict[str, Any]]:
    rows = []
    for variant, pipes in ends.items():
        for number, micro_batches in enumerate(FIRST):
            before = sent()
            turns.turn(pipes)
            if number and (variant == BY_BLOCK or micro_batches == MICRO_BATCHES):
                found = (sent() - before) // RANKS
                row = {"variant": variant, "micro_batches": micro_batches, "sent": found}
                rows.append(row | ({"to_formula": round(found / formula(), 4)} if variant == BY_BLOCK else {}))
                print(rows[-1], flush=True)
    return rows


def measure_times(ends: dict[str, list[Connection]], rounds: int) -> dict[str, Any]:
    """Ratios of a step by block to the others'; the clock's of the slower rank, CPU time of both."""
    seconds = {
        name: {"clock": [max(w for w, _ in turn) for turn in every], "cpu": [sum(c for _, c in turn) for turn in every]}
        for name, every in turns.take(ends, rounds).items()
    }
    return {
        other: {kind: turns.ratios(seconds[BY_BLOCK][kind], seconds[other][kind]) for kind in ("clock", "cpu")}
        for other in OTHERS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if sent():
        parser.error("the loopback interface is in use; start this with: unshare --net python benchmarks/by_block.py")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    result: dict[str, Any] = facts.facts() | {
        "parameters": sum(p.numel() for p in make_model().parameters()),
        "rows": f"1 x {T} tokens a micro-batch, float32, clipping, {RANKS} gloo ranks",
        "formula": formula(),
        "load_before": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as folder:
        ends = {name: turns.start(work, name, RANKS, folder) for name in (BY_BLOCK, *OTHERS)}
        result["bytes"] = measure_bytes(ends)
        result["rounds"] = options.rounds
        result[f"time_by_block_at_{MICRO_BATCHES}"] = measure_times(ends, options.rounds)
        for pipes in ends.values():
            turns.stop(pipes)
    result["load_after"] = os.getloadavg()[0]
    print(json.dumps(result, indent=2))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
