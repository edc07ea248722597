"""What data costs: useful tokens per second of packing and of padding, rows tokenised per second, and memory.

    python benchmarks/data.py [--output benchmarks/results/data.jsonl] [--gigabytes 1.0]

Packing and padding train the same 512 conversations of lognormal lengths (median 120, at most 512 tokens)
in turns, one pass each, on one CPU process; the ratio is of target tokens per second. Tokenising reads a
file of lines of the size asked for, in a process of its own, whose largest resident set is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROWS, MEDIAN, LONGEST = 512, 120, 512
ROUNDS = 7
WORDS = [
    "the",
    "king",
    "and",
    "queen",
    "of",
    "hearts",
    "walked",
    "by",
    "river",
    "at",
    "night",
    "while",
    "moon",
    "was",
    "high",
    "a",
    "fox",
    "sang",
    "bread",
    "wine",
]


def conversations(path: Path, tokenizer: Any, count: int) -> None:
    """Rows whose lengths in tokens are lognormal; half of each is the assistant's."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(MEDIAN), 0.9, count), 16, LONGEST - 12).astype(int)
    with path.open("w") as file:
        for length in lengths.tolist():
            words = draw.choice(WORDS, length).tolist()
            while len(tokenizer(" ".join(words))["input_ids"]) > length - 10:
                words.pop()
            half = len(words) // 2
            turns = [("user", words[:half]), ("assistant", words[half:])]
            messages = [{"role": role, "content": " ".join(part) or "yes"} for role, part in turns]
            file.write(json.dumps({"messages": messages}) + "\n")


def packing(folder: Path, num_rows: int, rounds: int) -> dict[str, Any]:
    """Target tokens per second, packed and padded, in turns."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from toolkit.data import build
    from toolkit.data.samples.loader import TrainLoader
    from toolkit.data.templates.templates import MARKERS, use_template
    from toolkit.data.tokens.tokenizer import _train_byte_pairs
    from toolkit.objectives.causal_lm import CausalLM
    from toolkit.recipe.schema import DataSection

    torch.set_num_threads(1)
    tokenizer = _train_byte_pairs(iter([" ".join(WORDS)] * 9), 400, MARKERS["chatml"])
    use_template(tokenizer, "chatml")
    conversations(folder / "chats.jsonl", tokenizer, num_rows)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=LONGEST,
    )
    model = LlamaForCausalLM(config)
    samples, fill = {}, 0.0
    for packed in (True, False):
        values = {"train": str(folder / "chats.jsonl"), "max_length": LONGEST, "packing": packed}
        data = DataSection.model_validate({**values, "cache_dir": str(folder / "cache")})
        built = build.build(data, tokenizer, 0)
        samples[packed] = built.train
        fill = built.report.train.fill_rate or fill
        tokens = built.report.train.target_tokens
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for packed in (True, False):
            objective = CausalLM(model, packed)
            size = 2 if packed else 8  # rows of a micro-batch; of rows of 120 tokens more fit
            windows = TrainLoader(
                samples[packed],
                num_positions=len(samples[packed]),
                micro_batch_size=size,
                gradient_accumulation_steps=1,
                rank=0,
                world_size=1,
                seed=0,
                shuffle=True,
            )
            started = time.perf_counter()
            for [batch] in windows:
                objective.loss_sum(model, batch).backward()
                model.zero_grad()
            seconds[packed].append(time.perf_counter() - started)
    ratios = [padded / packed for packed, padded in zip(seconds[True], seconds[False], strict=True)]
    return {
        "what": "packing",
        "rows": num_rows,
        "target_tokens": tokens,
        "fill_rate": round(fill, 4),
        "packed_tokens_per_second": round(tokens / statistics.median(seconds[True])),
        "padded_tokens_per_second": round(tokens / statistics.median(seconds[False])),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_quartiles": [round(float(q), 3) for q in np.percentile(ratios, (25, 75))],
    }


def tokenise(file: Path, cache: Path, max_length: int) -> dict[str, Any]:
    """In this process: rows per second and the largest resident set."""
    from toolkit.data import build
    from toolkit.data.templates.templates import MARKERS, use_template
    from toolkit.data.tokens.tokenizer import _train_byte_pairs
    from toolkit.recipe.schema import DataSection

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = _train_byte_pairs(iter([" ".join(WORDS)] * 9), 400, MARKERS["chatml"])
    use_template(tokenizer, "chatml")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = DataSection.model_validate({"train": str(file), "max_length": max_length, "cache_dir": str(cache)})
    started = time.perf_counter()
    report = build.build(data, tokenizer, 0).report.to_dict()["train"]
    seconds = time.perf_counter() - started
    return {
        "what": "tokenising",
        "gigabytes": round(file.stat().st_size / 1e9, 3),
        "rows": report["read"],
        "tokens": report["tokens"],
        "rows_per_second": round(report["read"] / seconds),
        "megabytes_per_second": round(file.stat().st_size / 1e6 / seconds, 2),
        "resident_mib_before": before // 1024,
        "resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def large_file(path: Path, gigabytes: float, kind: str) -> None:
    """Lines of `kind`: conversations of about 2,000 characters, or plain texts of about 8,000."""
    draw = np.random.default_rng(0)
    size, limit = 0, gigabytes * 1e9
    with path.open("w") as file:
        while size < limit:
            words = draw.choice(WORDS, 1600).tolist()
            if kind == "text":
                line = json.dumps({"text": " ".join(words)}) + "\n"
            else:
                asked, answered = " ".join(words[:200]), " ".join(words[200:400])
                turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
                line = json.dumps({"messages": turns}) + "\n"
            size += file.write(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON lines to add to")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the file that is tokenised")
    parser.add_argument("--rows", type=int, default=ROWS, help="conversations that are packed and padded")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of packing and padding")
    parser.add_argument("--tokenise", nargs=3, metavar=("FILE", "CACHE", "MAX_LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tokenise:
        file, cache, max_length = options.tokenise
        print(json.dumps(tokenise(Path(file), Path(cache), int(max_length))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows.append(packing(folder, options.rows, options.rounds))
        print(json.dumps(rows[-1]))
        for kind, max_length in (("conversations", 1024), ("text", 2048)):
            large_file(folder / f"{kind}.jsonl", options.gigabytes, kind)
            command = [sys.executable, __file__, "--tokenise", str(folder / f"{kind}.jsonl"), str(folder / kind)]
            done = subprocess.run([*command, str(max_length)], check=True, capture_output=True, text=True)
            rows.append({**json.loads(done.stdout.splitlines()[-1]), "kind": kind})
            print(json.dumps(rows[-1]))
            (folder / f"{kind}.jsonl").unlink()
    if options.output is not None:
        from importlib.metadata import version

        versions = {package: version(package) for package in ("torch", "transformers", "datasets")}
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        with options.output.open("a") as file:
            for row in rows:
                file.write(
                    json.dumps({**row, "date": time.strftime("%Y-%m-%d"), "machine": machine, **versions}) + "\n"
                )


if __name__ == "__main__":
    main()
