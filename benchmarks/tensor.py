"""What a step costs whose matrices two ranks cut (`sharding.tensor`), beside zero3 and transformers' own cuts.

    python benchmarks/tensor.py [--tokens 256 1024] [--rounds 7] [--output benchmarks/results/tensor.jsonl]

A Llama of random weights in float32, two rows of that many tokens a step, a thread a rank, over gloo. Under zero3 each
of the two ranks has a row; with tensor parallelism both have both. transformers' own is `DistributedConfig(tp_size=2)`.
All three run the same loop: forward, loss over full logits, backward, torch's AdamW. Variants take turns (see
turns.py); the ratios are of CPU time, of both ranks together, and of the slower rank's clock.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import peers
import torch
import torch.nn.functional as F
import turns
from facts import facts, show, tell

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository itself, installed or not

RANKS = 2
CONFIG = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TINY = {**CONFIG, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TENSOR, ZERO3, THEIRS = "tensor 2", "zero3", "transformers, tp_size 2"


def save_model(config: Mapping[str, int], folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**config, tie_word_embeddings=False, use_cache=False)).save_pretrained(folder)


def rows_of(step: int, tokens: int, vocabulary: int) -> torch.Tensor:
    """The two rows of a step, (2, tokens)."""
    return torch.randint(0, vocabulary, (2, tokens), generator=torch.Generator().manual_seed(step))


def by_toolkit(folder: Path, rows: Callable[[int], torch.Tensor], gate: peers.Gate, tensor: int) -> None:
    from accelerate import Accelerator
    from transformers import LlamaForCausalLM

    from toolkit import sharding_kwargs

    accelerator = Accelerator(cpu=True, **sharding_kwargs("zero3", tensor=tensor))
    model = LlamaForCausalLM.from_pretrained(folder)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    of_rank = slice(None) if tensor > 1 else slice(accelerator.process_index, accelerator.process_index + 1)
    train(model, optimizer, lambda step: rows(step)[of_rank], gate, accelerator.backward)


def by_transformers(folder: Path, rows: Callable[[int], torch.Tensor], gate: peers.Gate) -> None:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=RANKS)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, rows, gate, torch.Tensor.backward)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    rows: Callable[[int], torch.Tensor],
    gate: peers.Gate,
    backward: Callable[[torch.Tensor], None],
) -> None:
    step = 0
    while gate():
        ids = rows(step)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        gate.saw(float(loss.detach()), ids.numel())
        step += 1


def work(pipe: Connection, variant: str, rank: int, ranks: int, meeting: str, folder: str, job: peers.Job) -> None:
    """One rank of one variant."""
    run = {
        TENSOR: functools.partial(by_toolkit, tensor=RANKS),
        ZERO3: functools.partial(by_toolkit, tensor=1),
        THEIRS: by_transformers,
    }[variant]
    with turns.telling_errors(pipe), contextlib.redirect_stdout(sys.stderr):
        turns.join(rank, ranks, meeting)
        rows = functools.partial(rows_of, tokens=job.max_length, vocabulary=job.config["vocab_size"])
        run(Path(folder, "model"), rows, peers.Gate(pipe, job.steps))


def measure(config: dict[str, int], tokens: int, rounds: int) -> dict[str, Any]:
    """Ratios of CPU time and clock, and the losses of all variants: those of zero3 are the means over its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        job = peers.Job(folder, {**config, "max_position_embeddings": tokens}, tokens, 1, 1)
        save_model(job.config, Path(folder, "model"))
        ends = {name: turns.start(work, name, RANKS, folder, folder, job) for name in (TENSOR, ZERO3, THEIRS)}
        taken = turns.take(ends, rounds)
        for pipes in ends.values():
            turns.end(pipes)
    cpu, wall = turns.seconds(taken)
    losses = {
        name: [sum(rank["losses"][0] for rank in turn) / RANKS for turn in found] for name, found in taken.items()
    }
    against = {
        name: {"cpu": turns.ratios(cpu[TENSOR], cpu[name]), "wall": turns.ratios(wall[TENSOR], wall[name])}
        for name in (ZERO3, THEIRS)
    }
    return {"against": against, "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="a model that says nothing about speed")
    parser.add_argument("--output", type=Path, help="file to which lines of JSON are added")
    options = parser.parse_args()
    told, rows = facts(), []
    for tokens in options.tokens:
        found = measure(TINY if options.tiny else CONFIG, tokens, options.rounds)
        tell({**told, "what": TENSOR, "tokens": tokens, **found}, options.output)
        for name, ratios in found["against"].items():
            rows.append([f"{tokens:,} tokens / {name}", *ratios["cpu"].values(), *ratios["wall"].values()])
    kinds = [f"{kind} {name}" for kind in ("CPU", "clock") for name in ("ratio", "low", "high", "s, ours", "s, other")]
    show(f"A step of two rows: {TENSOR} beside the others", ["row", *kinds], rows)


if __name__ == "__main__":
    main()
