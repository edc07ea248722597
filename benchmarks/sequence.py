"""What a step costs whose row two ranks share (`sharding.sequence`), beside the same row on one rank.

    python benchmarks/sequence.py [--lengths 2048 6144] [--rounds 5] [--output benchmarks/results/sequence.jsonl]

A Llama of random weights in float32, one row of that many tokens a step, a thread a rank, over gloo. Both run what
`finetune` runs, from the recipe to `Trainer.fit`, under zero3. They take turns (see turns.py); the ratios are of CPU
time, of all ranks together, and of the slowest rank's clock: 0.5 would be two ranks that work for nothing else. Two
rows of half the length show, on one rank and on two, what a second rank costs when no row is shared.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import peers
import turns
from facts import facts, show, tell

ROWS = 32
CONFIG = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
TINY = {**CONFIG, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
ALONE, SHARED = "one rank", "two ranks"
HALVES_ALONE, HALVES = "one rank, two rows of half", "two ranks, a row of half each"


def variants(length: int) -> dict[str, tuple[int, Callable[[peers.Gate, peers.Job, int], None]]]:
    half = {"data.max_length": length // 2, "data.long_rows": "truncate"}
    return {
        ALONE: (1, peers.by_toolkit("zero3", packing=False)),
        SHARED: (2, peers.by_toolkit("zero3", packing=False, **{"sharding.sequence": 2})),
        HALVES_ALONE: (1, peers.by_toolkit("zero3", packing=False, **half, **{"training.micro_batch_size": 2})),
        HALVES: (2, peers.by_toolkit("zero3", packing=False, **half)),
    }


def work(pipe: Connection, variant: str, rank: int, ranks: int, meeting: str, job: peers.Job) -> None:
    """One rank of one variant."""
    with turns.telling_errors(pipe), contextlib.redirect_stdout(sys.stderr):
        turns.join(rank, ranks, meeting)
        variants(job.max_length)[variant][1](peers.Gate(pipe, job.steps), job, rank)


def measure(config: dict[str, int], length: int, rounds: int) -> dict[str, Any]:
    """Ratios of both kinds, and the losses of both."""
    with tempfile.TemporaryDirectory() as folder:
        job = peers.Job(folder, {**config, "max_position_embeddings": length}, length, 1, 1)
        peers.write_rows(job, ROWS, full=True)
        peers.write_recipe(job)
        ends = {name: turns.start(work, name, ranks, folder, job) for name, (ranks, _) in variants(length).items()}
        taken = turns.take(ends, rounds)
        for pipes in ends.values():
            turns.end(pipes)
    cpu, wall = turns.seconds(taken)
    return {
        "cpu": turns.ratios(cpu[SHARED], cpu[ALONE]),
        "wall": turns.ratios(wall[SHARED], wall[ALONE]),
        "halves": turns.ratios(cpu[HALVES], cpu[HALVES_ALONE]),
        "losses": {name: [turn[0]["losses"][0] for turn in taken[name]] for name in (ALONE, SHARED)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 6144])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a model that says nothing about speed")
    parser.add_argument("--output", type=Path, help="file to which lines of JSON are added")
    options = parser.parse_args()
    told, rows = facts(), []
    for length in options.lengths:
        found = measure(TINY if options.tiny else CONFIG, length, options.rounds)
        tell({**told, "what": f"{SHARED} / {ALONE}", "tokens": length, **found}, options.output)
        rows.append([f"{length:,} tokens", *found["cpu"].values(), *found["wall"].values()])
        print(f"{length:,} tokens as two rows of half: two ranks / one rank, CPU time {found['halves']['ratio']}")
    kinds = [f"{kind} {name}" for kind in ("CPU", "clock") for name in ("ratio", "low", "high", "s, two", "s, one")]
    show(f"A step of one row, {SHARED} / {ALONE}", ["row", *kinds], rows)


if __name__ == "__main__":
    main()
