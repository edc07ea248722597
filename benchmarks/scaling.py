"""How the cost of a step grows with the model, the length of rows, the vocabulary and the ranks.

    python benchmarks/scaling.py [--sweeps layers length ...] [--output benchmarks/results/scaling.jsonl]

Each is swept alone, the others stay. The points of a sweep take turns (see turns.py); what is measured is the
CPU time of all ranks together, in float32 under strategy zero3, through the stock `Accelerator`, with the
toolkit's loss. An exponent is the slope of log time against log size, by least squares; the same fit of the
arithmetic stands beside it: 6 N + 12 L H T operations per token (PaLM, arXiv 2204.02311), and an AdamW step; what
ranks exchange is not in it. Nothing else may grow faster than that. Smaller sizes have fixed costs too, so a slope
below the arithmetic's says little; the slope of the upper half of the points says what larger ones will cost.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import turns
from facts import facts, show, tell

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository itself, installed or not

OPTIMIZER_FLOPS = 16
"""Of AdamW and clipping, per parameter."""

TOLERANCE = 0.1
"""Of a measured exponent above the arithmetic's; fits on a shared machine differ by as much."""


@dataclass(frozen=True)
class Point:
    """A Llama, its rows and its ranks. `tokens`: of a step on each rank; `length`: of a row (tokens)."""

    layers: int = 2
    hidden: int = 256
    vocabulary: int = 2048
    length: int = 256
    tokens: int = 512
    ranks: int = 2

    def config(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.hidden // 64),
            num_key_value_heads=max(1, self.hidden // 64),
            max_position_embeddings=self.length,
            tie_word_embeddings=False,
            use_cache=False,
        )

    @property
    def parameters(self) -> int:
        """Of matrix products, the head's among them."""
        return self.layers * (4 + 9) * self.hidden**2 + self.vocabulary * self.hidden

    @property
    def flops(self) -> float:
        """Of a step, over all ranks; the optimizer's state is sharded, so it is stepped once."""
        attention = 12 * self.layers * self.hidden * self.length
        stored = self.parameters + self.vocabulary * self.hidden
        return self.ranks * self.tokens * (6 * self.parameters + attention) + OPTIMIZER_FLOPS * stored


SWEEPS: dict[str, tuple[str, list[Point]]] = {
    "layers": ("layers", [Point(layers=layers) for layers in (1, 2, 4, 8)]),
    "hidden": ("hidden", [Point(hidden=hidden) for hidden in (128, 256, 512, 768)]),
    "length": ("length", [Point(length=length, tokens=4096, ranks=1) for length in (256, 512, 1024, 2048, 4096)]),
    "rows": ("tokens", [Point(tokens=tokens) for tokens in (256, 512, 1024, 2048)]),
    "vocabulary": ("vocabulary", [Point(vocabulary=size, ranks=1) for size in (2048, 8192, 32768)]),
    "ranks": ("ranks", [Point(ranks=ranks) for ranks in (1, 2, 4)]),
}
"""Name -> the field that is swept, and the points."""


def tiny(point: Point) -> Point:
    """A point that says nothing about time."""
    return Point(
        layers=max(1, point.layers // 2),
        hidden=point.hidden // 4,
        vocabulary=point.vocabulary // 8,
        length=point.length // 8,
        tokens=point.tokens // 8,
        ranks=point.ranks,
    )


def work(pipe: Connection, _name: str, rank: int, ranks: int, meeting: str, point: Point, steps: int) -> None:
    """One rank of one point."""
    with turns.telling_errors(pipe):
        turns.join(rank, ranks, meeting)
        step = stepping(point, rank)
        pipe.send("ready")
        while pipe.recv() == "go":
            started = time.process_time()
            for _ in range(steps):
                step()
            pipe.send((time.process_time() - started) / steps)


def stepping(point: Point, rank: int) -> Any:
    from accelerate import Accelerator
    from transformers import LlamaForCausalLM

    from toolkit.data.samples.samples import IGNORED
    from toolkit.objectives.losses.find_head import find_head_loss
    from toolkit.objectives.losses.fused_linear_cross_entropy import HeadLoss
    from toolkit.sharding import sharding_kwargs

    accelerator = Accelerator(**sharding_kwargs("zero3"))
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(point.config()).train()
    head_loss = find_head_loss(model)
    assert isinstance(head_loss, HeadLoss)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(rank)
    shape = (max(1, point.tokens // point.length), point.length)

    def step() -> None:
        ids = torch.randint(0, point.vocabulary, shape, generator=generator)
        targets = F.pad(ids[:, 1:], (0, 1), value=IGNORED).flatten()
        accelerator.backward(head_loss.summed(model, {"input_ids": ids}, targets) / targets.numel())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(points: Sequence[Point], rounds: int, steps: int) -> list[float]:
    """CPU seconds of a step at each point, over all ranks: the median over the rounds."""
    with tempfile.TemporaryDirectory() as folder:
        ends = {
            f"point {number}": turns.start(work, f"point {number}", point.ranks, folder, point, steps)
            for number, point in enumerate(points)
        }
        taken = turns.take(ends, rounds)
        for pipes in ends.values():
            turns.end(pipes)
    return [statistics.median(sum(ranks) for ranks in every) for every in taken.values()]


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of log cost against log size."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def record(name: str, points: Sequence[Point], seconds: Sequence[float]) -> dict[str, Any]:
    field = SWEEPS[name][0]
    sizes = [getattr(point, field) for point in points]
    flops = [point.flops for point in points]
    upper = slice(len(points) // 2 - (len(points) < 4), None)
    found, wanted = exponent(sizes[upper], seconds[upper]), exponent(sizes[upper], flops[upper])
    return {
        "sweep": name,
        "sizes": sizes,
        "cpu_seconds": [round(value, 4) for value in seconds],
        "gflops": [round(value / 1e9, 3) for value in flops],
        "exponent": round(exponent(sizes, seconds), 3),
        "arithmetic": round(exponent(sizes, flops), 3),
        "upper_exponent": round(found, 3),
        "upper_arithmetic": round(wanted, 3),
        "no_worse": found <= wanted + TOLERANCE,
    }


def table(records: Sequence[dict[str, Any]]) -> None:
    rows = [
        [
            f"{row['sweep']}: {', '.join(f'{size:,}' for size in row['sizes'])}",
            ", ".join(f"{value:.3g}" for value in row["cpu_seconds"]),
            *(row[key] for key in ("exponent", "arithmetic", "upper_exponent", "upper_arithmetic")),
            "yes" if row["no_worse"] else "NO",
        ]
        for row in records
    ]
    columns = ["", "CPU s of a step", "exponent", "arithmetic", "upper half", "arithmetic", "no worse"]
    show("Cost of a step", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", nargs="+", choices=list(SWEEPS), default=list(SWEEPS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1, help="of a point's turn")
    parser.add_argument("--tiny", action="store_true", help="sizes of which the time says nothing")
    parser.add_argument("--output", type=Path, help="file to which lines of JSON are added")
    options = parser.parse_args()
    told, records = facts(), []
    for name in options.sweeps:
        points = [tiny(point) if options.tiny else point for point in SWEEPS[name][1]]
        seconds = measure(points, options.rounds, options.steps)
        records.append({**told, "rounds": options.rounds, **record(name, points, seconds)})
        tell(records[-1], options.output)
    table(records)


if __name__ == "__main__":
    main()
