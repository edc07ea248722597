"""Accumulation by block: bytes, time, slow links and offload of a step, against zero3 by micro-batch.

    unshare --net python benchmarks/by_block.py [--parts bytes time links offload] [--rounds 5]
        [--output benchmarks/results/by_block.json]

Bytes are those of the loopback interface, and `links` slows that interface, so the benchmark wants a network
namespace of its own, and sets the interface up. Variants take turns (see turns.py); CPU time, of all ranks and threads
together, is the steadier figure where other programs use the machine. `--output` keeps the other parts of a file that
is there.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import facts
import torch
import torch.distributed as dist
import torch.nn.functional as F
import turns

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository itself, installed or not

VOCAB, MICRO_BATCHES = 2048, 8
WINDOWS = (1, 2, 4, 8, 16)
BY_BLOCK, BY_HAND = "by block", "fsdp2 by hand, checkpointed"
ALONE = "arithmetic alone, checkpointed"
OTHERS = ("zero3", "zero3, checkpointed", BY_HAND, ALONE)


@dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        tokens: of a micro-batch.
        lora: on a frozen base, instead of all parameters.
        offload: of the optimizer's state.
    """

    hidden: int = 256
    layers: int = 8
    tokens: int = 128
    micro_batches: int = MICRO_BATCHES
    ranks: int = 2
    lora: bool = False
    offload: bool = False

    def model(self, frozen_dtype: torch.dtype = torch.float32) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=self.hidden,
                intermediate_size=3 * self.hidden,
                num_hidden_layers=self.layers,
                num_attention_heads=8,
                num_key_value_heads=4,
                tie_word_embeddings=False,
            )
        )
        if self.lora:
            import peft

            model.to(frozen_dtype)
            model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
        return model

    def blocks(self, model: Any) -> Any:
        return (model.get_base_model() if self.lora else model).model.layers

    def checkpointed(self) -> Any:
        """The model, whose blocks recompute in backward."""
        from torch.utils.checkpoint import checkpoint

        model = self.model()
        for block in self.blocks(model):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return model

    def window(self, rank: int, step: int, micro_batches: int) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        rows = torch.randint(0, VOCAB, (micro_batches, 1, self.tokens), generator=generator)
        return [{"input_ids": i, "labels": i, "position_ids": torch.arange(self.tokens)[None]} for i in rows]

    def told(self) -> dict[str, Any]:
        model = self.model()
        return {
            "training": "lora" if self.lora else "full",
            "ranks": self.ranks,
            "parameters": sum(p.numel() for p in model.parameters()),
            "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "tokens_a_micro_batch": self.tokens,
        }

    def formula(self) -> int:
        """Bytes that a rank sends in a step by block: two gathers and a reduction of each unit, one gather of the tail.

        Float32 throughout; adapters and norms are small enough for padding not to count.
        """
        model = self.model()
        base = model.get_base_model() if self.lora else model
        whole = sum(p.numel() for p in model.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        tail = sum(p.numel() for part in (base.lm_head, base.model.norm) for p in part.parameters())
        return 4 * (2 * (whole - tail) + tail + trained) * (self.ranks - 1) // self.ranks


# A rank


def by_hand(work: Work, rank: int) -> Callable[[int], None]:
    """The loop that an expert writes: no metrics, no checks; each micro-batch is reduced, as in zero3."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = work.checkpointed()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in work.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return plain_steps(model, [p for p in model.parameters() if p.requires_grad], work, rank)


def alone(work: Work, rank: int) -> Callable[[int], None]:
    """The same forwards and backwards of whole weights, and an update of a rank's share of them.

    Nothing is gathered, reduced or copied, so its time is the least that a checkpointed step can take.
    """
    model = work.checkpointed()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    share = torch.nn.Parameter(torch.zeros(trained // work.ranks))
    share.grad = torch.zeros_like(share)
    step = plain_steps(model, [share], work, rank)

    def with_gradients(micro_batches: int) -> None:
        share.grad = torch.zeros_like(share)
        step(micro_batches)
        model.zero_grad()

    return with_gradients


def plain_steps(model: Any, updated: Sequence[torch.nn.Parameter], work: Work, rank: int) -> Callable[[int], None]:
    """Steps that sum the gradients of micro-batches, clip them, and update some parameters."""
    optimizer = torch.optim.AdamW(updated, lr=1e-3, fused=True)
    steps = iter(range(10**9))

    def step(micro_batches: int) -> None:
        for batch in work.window(rank, next(steps), micro_batches):
            logits = model(
                input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
            ).logits.float()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
            (loss / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(updated, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_toolkit(variant: str, work: Work, rank: int) -> Callable[[int], None]:
    """The trainer's own step."""
    from accelerate import Accelerator

    from toolkit import sharding_kwargs
    from toolkit.objectives.causal_lm import CausalLM
    from toolkit.optim.build import build_optimizer
    from toolkit.optim.schedule import build_schedule
    from toolkit.recipe.schema import OptimizerSection, ScheduleSection, TrainingSection
    from toolkit.sharding import Checkpointing, OffloadSettings
    from toolkit.sharding.blocks.by_block import ByBlock
    from toolkit.sharding.launched import accumulation_plugin
    from toolkit.training.trainer import Trainer

    offload = OffloadSettings(executor="cpu_torch", threads=1) if work.offload else None
    checkpointing = None if variant == "zero3" else Checkpointing(1)
    arguments: Any = sharding_kwargs("zero3", offload=offload, checkpointing=checkpointing)
    accelerator = Accelerator(gradient_accumulation_plugin=accumulation_plugin(MICRO_BATCHES), **arguments)
    model: Any = work.model()
    objective = CausalLM(model)
    optimizer: Any = build_optimizer(model, OptimizerSection(learning_rate=1e-3))
    model, optimizer = accelerator.prepare(model, optimizer)
    if work.offload:
        slow_down(model)
    schedule = build_schedule(optimizer.optimizer, ScheduleSection(kind="constant"), 10**6)
    settings = TrainingSection(output_dir="unused", max_steps=1)
    by_block = ByBlock(model, arguments["fsdp_plugin"].unit_plan) if variant == BY_BLOCK else None
    unused: Any = None
    trainer = Trainer(accelerator, model, optimizer, schedule, objective, settings, unused, by_block=by_block)
    model.train()
    steps = iter(range(10**9))

    def step(micro_batches: int) -> None:
        accelerator.step, accelerator.gradient_accumulation_steps = 0, micro_batches
        trainer.train_step(work.window(rank, next(steps), micro_batches))

    return step


host_seconds = [0.0]
"""So much longer takes the step of offloaded state on this rank's host."""


def slow_down(model: Any) -> None:
    """Has each unit's step take its share of `host_seconds`. It sleeps: the host's cores are not the device's."""
    from toolkit.sharding.offload import engine_of

    engine: Any = engine_of(model)
    whole = sum(unit.numel for unit in engine._executors)
    for executor in set(engine._executors.values()):
        step = executor.step

        def late(unit_step: Any, step: Any = step) -> Any:
            time.sleep(host_seconds[0] * unit_step.unit.numel / whole)
            return step(unit_step)

        executor.step = late


def work_on(pipe: Connection, variant: str, rank: int, ranks: int, meeting: str) -> None:
    """Takes up each work that it is sent, and gives the times of each step, of the work's micro-batches.

    An integer asks for so many micro-batches instead, a float for so many seconds more on the host.
    """
    from toolkit.sharding.plugin import reset_accelerate

    turns.join(rank, ranks, meeting)
    pipe.send("ready")
    step: Any = None
    while (told := pipe.recv()) != "stop":
        if isinstance(told, Work):
            work, step = told, None
            reset_accelerate()
            gc.collect()
            make = {BY_HAND: by_hand, ALONE: alone}.get(variant, functools.partial(by_toolkit, variant))
            step = make(work, rank)
            pipe.send("ready")
            continue
        if isinstance(told, float):
            host_seconds[0] = told
        if work.offload:
            step(work.micro_batches)  # whose update the next step hides, and nobody else's turn
        wall, cpu = time.perf_counter(), time.process_time()
        step(told if isinstance(told, int) else work.micro_batches)
        pipe.send((time.perf_counter() - wall, time.process_time() - cpu))


Ends = Mapping[str, Sequence[Connection]]
"""Of the ranks of each variant."""


@contextmanager
def ranks_of(variants: Sequence[str], ranks: int) -> Iterator[Ends]:
    with tempfile.TemporaryDirectory() as folder:
        ends = {variant: turns.start(work_on, variant, ranks, folder) for variant in variants}
        yield ends
        for pipes in ends.values():
            turns.end(pipes)


def take_up(ends: Ends, work: Work) -> None:
    """Has all ranks build what they train, and take two steps to warm up."""
    for pipes in ends.values():
        for told in (work, 1, 1):
            tell(pipes, told)


def tell(pipes: Sequence[Connection], told: Any) -> list[Any]:
    for pipe in pipes:
        pipe.send(told)
    return [pipe.recv() for pipe in pipes]


# The loopback interface


def sent() -> int:
    """Bytes that all ranks have sent over the loopback interface so far."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[9])


@contextmanager
def slowed(bytes_a_second: int, ranks: int) -> Iterator[None]:
    """Links of so many bytes a second and rank: all ranks send over one interface, which has the sum of theirs."""
    rate = 8 * bytes_a_second * ranks
    # What may be sent at once: as much as the rate allows in 4 ms, the longest tick of a kernel's clock.
    burst = max(131_072, rate // 8 // 250)
    limit = ["rate", f"{rate}bit", "burst", str(burst), "latency", "200ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *limit], check=True)
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)


def rate_of_interface(num_bytes: int = 2**26) -> float:
    """Bytes a second of one stream."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as end:
        other, _ = server.accept()
        thread = threading.Thread(target=end.sendall, args=(bytes(num_bytes),))
        start, found = time.perf_counter(), 0
        thread.start()
        with other:
            while found < num_bytes:
                found += len(other.recv(2**20))
        thread.join()
        return num_bytes / (time.perf_counter() - start)


# Parts


def measure_bytes(ends: Ends, _rounds: int) -> Iterator[dict[str, Any]]:
    for lora in (False, True):
        work = Work(tokens=16, lora=lora)
        yield from bytes_of(ends, work)
        with ranks_of((BY_BLOCK, "zero3"), 4) as four:
            yield from bytes_of(four, replace(work, ranks=4))


def bytes_of(ends: Ends, work: Work) -> Iterator[dict[str, Any]]:
    """Bytes that a rank sends in a step: for every number of micro-batches by block, and for one by micro-batch."""
    take_up(ends, work)
    for variant, pipes in ends.items():
        for micro_batches in WINDOWS if variant == BY_BLOCK else (MICRO_BATCHES,):
            before = sent()
            tell(pipes, micro_batches)
            row: dict[str, Any] = {"variant": variant, "micro_batches": micro_batches}
            row["sent"] = (sent() - before) // work.ranks
            row |= {"to_formula": round(row["sent"] / work.formula(), 4)} if variant == BY_BLOCK else {}
            yield work.told() | row


def measure_time(ends: Ends, rounds: int) -> Iterator[dict[str, Any]]:
    for work in (Work(), Work(lora=True)):
        take_up(ends, work)
        yield work.told() | {"micro_batches": work.micro_batches} | ratios(ends, rounds)


def ratios(ends: Mapping[str, Sequence[Connection]], rounds: int) -> dict[str, Any]:
    """Ratios of a step by block to the others'; the clock's of the slowest rank, CPU time of all."""
    seconds = {
        name: {"clock": [max(w for w, _ in turn) for turn in every], "cpu": [sum(c for _, c in turn) for turn in every]}
        for name, every in turns.take(ends, rounds).items()
    }
    others = [name for name in seconds if name != BY_BLOCK]
    return {
        other: {kind: turns.ratios(seconds[BY_BLOCK][kind], seconds[other][kind]) for kind in ("clock", "cpu")}
        for other in others
    }


LINKS = (10**9, 10**8)
LINKED = Work(hidden=512, tokens=8)


def measure_links(ends: Ends, rounds: int) -> Iterator[dict[str, Any]]:
    """Short micro-batches, so that the link is the limit: little is computed for each byte that is sent."""
    ends = {variant: ends[variant] for variant in (BY_BLOCK, "zero3")}
    for work in (LINKED, replace(LINKED, lora=True)):
        take_up(ends, work)
        told = work.told() | {"micro_batches": work.micro_batches}
        yield told | ratios(ends, rounds)
        for link in LINKS:
            with slowed(link, work.ranks):
                rate = {"link_bytes_a_second": link, "interface_bytes_a_second": round(rate_of_interface())}
                yield told | rate | ratios(ends, rounds)


HOST_STEPS = (4, 8)
"""Times as long as a micro-batch's forward is the host's step."""


def measure_offload(ends: Ends, rounds: int) -> Iterator[dict[str, Any]]:
    """The host's step hides behind the next step's forward: of one micro-batch, or by block of all."""
    ways = {variant: ends[variant] for variant in (BY_BLOCK, "zero3, checkpointed")}
    take_up(ways, Work(offload=True))
    # Forward, the same again, and backward, which takes twice as long.
    seconds = statistics.median(clock(ways["zero3, checkpointed"], 0.0) for _ in range(3)) / MICRO_BATCHES / 4
    for times in HOST_STEPS:
        host = times * seconds
        steps: dict[str, list[tuple[float, float]]] = {variant: [] for variant in ways}
        for _ in range(rounds):
            for variant, pipes in ways.items():
                steps[variant].append((clock(pipes, 0.0), clock(pipes, host)))
        for variant, both in steps.items():
            hidden = sorted(1 - (late - free) / host for free, late in both)
            row = {"variant": variant, "micro_batches": MICRO_BATCHES, "host_step_in_forwards": times}
            row |= {"host_step_seconds": round(host, 4), "hidden": round(statistics.median(hidden), 3)}
            row |= {"low": round(hidden[len(hidden) // 4], 3), "high": round(hidden[-1 - len(hidden) // 4], 3)}
            yield row | {"step_seconds": round(statistics.median(free for free, _ in both), 4)}


def clock(pipes: Sequence[Connection], delay: float) -> float:
    """Seconds of a step behind one whose update takes so much longer on the host."""
    return float(max(wall for wall, _ in tell(pipes, delay)))


PARTS = {
    "bytes": measure_bytes,
    "time": measure_time,
    "links": measure_links,
    "offload": measure_offload,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if sent():
        parser.error("the loopback interface is in use; start this with: unshare --net python benchmarks/by_block.py")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    found: dict[str, Any] = {}
    if options.output is not None and options.output.exists():
        found = json.loads(options.output.read_text(encoding="utf-8"))
    with ranks_of((BY_BLOCK, *OTHERS), 2) as ends:
        for part in options.parts:
            found[part] = {**facts.facts(), "rounds": options.rounds, "load_before": os.getloadavg()[0], "rows": []}
            for row in PARTS[part](ends, options.rounds):
                found[part]["rows"].append(row)
                print(json.dumps(row), flush=True)
            found[part]["load_after"] = os.getloadavg()[0]
            if options.output is not None:
                options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
