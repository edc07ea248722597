"""The head's loss: from its inputs, against full logits and torch's own `linear_cross_entropy`.

    python benchmarks/head_loss.py [--rounds 3] [--output benchmarks/results/head_loss.jsonl]

Forward and backward of the head and its loss alone, one thread. The variants take turns; times are ratios of CPU
time to full logits, round by round. Peaks are of the resident set in a process each, above what it held before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
import turns

from toolkit.objectives.losses.fused_linear_cross_entropy import summed_loss

SIZES = ["1024,8192,256", "1024,32768,512", "512,131072,512", "2048,131072,256"]
"""Tokens, vocabulary, hidden size."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TORCHS_CHUNK = 256
"""Tokens a chunk of torch's own, beside its default."""


def whole(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return summed_loss(hidden, weight, None, targets).squeeze()


def of_torch(chunk: int | None) -> Callable[..., torch.Tensor]:
    def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        options: Any = torch.nn.LinearCrossEntropyOptions(**({} if chunk is None else {"batch_chunk_size": chunk}))
        return F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)

    return loss


VARIANTS: dict[str, Callable[..., torch.Tensor]] = {"full logits": whole, "ours": ours}
if hasattr(F, "linear_cross_entropy"):
    VARIANTS |= {"torch": of_torch(None), f"torch, {TORCHS_CHUNK} tokens": of_torch(TORCHS_CHUNK)}


def inputs(tokens: int, vocabulary: int, width: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn((tokens, width), generator=draw).to(DTYPES[dtype])
    weight = (0.05 * torch.randn((vocabulary, width), generator=draw)).to(DTYPES[dtype])
    targets = torch.randint(0, vocabulary, (tokens,), generator=draw)
    return hidden.requires_grad_(), torch.nn.Parameter(weight), targets


def step(variant: str, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """Loss and gradients, in float32."""
    loss = VARIANTS[variant](*given)
    loss.backward()
    found = [loss.detach().float(), *(tensor.grad.float() for tensor in given[:2])]  # type: ignore[union-attr]
    for tensor in given[:2]:
        tensor.grad = None
    return found


def peak(variant: str, size: tuple[int, int, int], dtype: str) -> int:
    """Bytes, in this process, which must have held no more before."""
    step(variant, inputs(8, 64, 16, dtype))
    given = inputs(*size, dtype)
    before = psutil.Process().memory_info().rss
    VARIANTS[variant](*given).backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def measure(size: tuple[int, int, int], dtype: str, rounds: int) -> dict[str, Any]:
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        peaks = {variant: pool.apply(peak, (variant, size, dtype)) for variant in VARIANTS}
    given, exact = inputs(*size, dtype), inputs(*size, "float32")
    for tensor, rounded in zip(exact[:2], given[:2], strict=True):
        tensor.data = rounded.detach().float()
    expected = step("full logits", exact)
    del exact
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    errors: dict[str, list[float]] = {}
    for number in range(rounds):
        for variant in VARIANTS if number % 2 else reversed(VARIANTS):
            started = time.process_time()
            found = step(variant, given)
            seconds[variant].append(time.process_time() - started)
            if number == 0:
                pairs = zip(found, expected, strict=True)
                errors[variant] = [float(f"{((mine - true).norm() / true.norm()):.1e}") for mine, true in pairs]
            del found
    return {
        "tokens": size[0],
        "vocabulary": size[1],
        "hidden": size[2],
        "dtype": dtype,
        "rounds": rounds,
        "whole_logits_seconds": round(sorted(seconds["full logits"])[rounds // 2], 3),
        "cpu_time_ratio": {name: turns.ratios(taken, seconds["full logits"]) for name, taken in seconds.items()},
        "peak_mib": {name: peaks[name] // 2**20 for name in VARIANTS},
        "error_of_loss_hidden_weight": errors,
    }


def _numbers(size: str) -> tuple[int, int, int]:
    tokens, vocabulary, hidden = map(int, size.split(","))
    return tokens, vocabulary, hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON lines to add to")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="tokens,vocabulary,hidden")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size, dtype in itertools.product(options.sizes, options.dtypes):
        row = measure(_numbers(size), dtype, options.rounds)
        row |= {"date": time.strftime("%Y-%m-%d"), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
        row["torch"] = torch.__version__
        print(json.dumps(row), flush=True)
        if options.output is not None:
            with options.output.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
