"""What it costs to make samples of conversations: read, rendered, masked, checked and packed; TRL beside it.

    python benchmarks/rows.py [--rows 20000] [--rounds 3] [--output benchmarks/results/rows.jsonl]

Conversations have one to three questions and answers of lognormal lengths (medians 40 and 120 words), words of a
vocabulary of 30,000 by Zipf's law, and a chat template of ChatML. The tokenizer is trained on them. The toolkit masks
all but the assistant's words, and reports on every row. TRL's SFTTrainer learns the whole text, packs by the same
algorithm, and is timed from reading the file until it stands, with a model of one layer. Each tool works in a process
of one thread; what counts is its CPU time after its imports, and the ratio of the two in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from facts import facts, show, tell
from turns import ratios

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
WORDS, MAX_LENGTH = 30_000, 2048
TOOLS = ("toolkit", "trl")


def write_rows(path: Path, count: int) -> None:
    draw = np.random.default_rng(0)
    often = 1 / np.arange(3, 3 + len(LETTERS))
    often /= often.sum()
    lengths = np.clip(draw.poisson(4, WORDS) + 1, 1, 14)
    vocabulary = ["".join(draw.choice(list(LETTERS), int(length), p=often)) for length in lengths]
    zipf = 1 / np.arange(1, WORDS + 1)
    zipf /= zipf.sum()
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            has_system = draw.random() < 0.3
            messages = [{"role": "system", "content": "You are a helpful assistant."}] if has_system else []
            for _ in range(int(draw.integers(1, 4))):
                for role, median in (("user", 40), ("assistant", 120)):
                    size = int(np.clip(draw.lognormal(np.log(median), 0.8), 2, 600))
                    words = " ".join(draw.choice(vocabulary, size, p=zipf))
                    messages.append({"role": role, "content": f"{words.capitalize()}."})
            file.write(json.dumps({"messages": messages}) + "\n")


def train_tokenizer(rows: Path, folder: Path) -> None:
    from toolkit.data.templates.templates import MARKERS, use_template
    from toolkit.data.tokens.tokenizer import _train_byte_pairs

    with rows.open(encoding="utf-8") as file:
        texts = [message["content"] for line in islice(file, 3000) for message in json.loads(line)["messages"]]
    tokenizer = _train_byte_pairs(iter(texts), 16_000, MARKERS["chatml"])
    use_template(tokenizer, "chatml")
    tokenizer.save_pretrained(folder)


def by_toolkit(rows: str, tokenizer: Any, folder: str) -> tuple[Any, int]:
    from toolkit.data import build
    from toolkit.recipe.schema import DataSection

    settings = {"train": rows, "max_length": MAX_LENGTH, "cache_dir": folder, "long_rows": "truncate"}
    started = time.process_time()
    made = build.build(DataSection.model_validate(settings), tokenizer, 0)
    return started, len(made.train)


def by_trl(rows: str, tokenizer: Any, folder: str) -> tuple[Any, int]:
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    datasets.disable_progress_bars()
    config = SFTConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to=[], packing=True, packing_strategy="bfd",
        max_length=MAX_LENGTH,
    )  # fmt: skip
    started = time.process_time()
    loaded = datasets.load_dataset("json", data_files=rows, split="train", cache_dir=folder)
    trainer = SFTTrainer(model=model, args=config, train_dataset=loaded, processing_class=tokenizer)
    return started, len(trainer.train_dataset)


def work(tool: str, rows: str, tokenizer: str) -> None:
    """In a process of its own: prints its CPU seconds and the number of samples."""
    import torch
    from transformers import PreTrainedTokenizerFast

    torch.set_num_threads(1)
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        started, samples = {"toolkit": by_toolkit, "trl": by_trl}[tool](rows, loaded, folder)
        print(json.dumps({"cpu": time.process_time() - started, "samples": samples}))


def measured(tool: str, rows: Path, tokenizer: Path) -> dict[str, Any]:
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, __file__, "--work", tool, str(rows), str(tokenizer)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON lines to add to")
    parser.add_argument("--work", nargs=3, metavar=("TOOL", "ROWS", "TOKENIZER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    seconds: dict[str, list[float]] = {tool: [] for tool in TOOLS}
    samples = {}
    with tempfile.TemporaryDirectory() as name:
        rows, tokenizer = Path(name, "rows.jsonl"), Path(name, "tokenizer")
        write_rows(rows, options.rows)
        train_tokenizer(rows, tokenizer)
        for number in range(options.rounds):
            for tool in TOOLS if number % 2 else reversed(TOOLS):
                found = measured(tool, rows, tokenizer)
                seconds[tool].append(found["cpu"])
                samples[tool] = found["samples"]
        size = rows.stat().st_size
    compared = ratios(seconds["toolkit"], seconds["trl"])
    per_second = {tool: round(options.rows / statistics.median(found)) for tool, found in seconds.items()}
    record = {"rows": options.rows, "megabytes": round(size / 1e6, 1), "rounds": options.rounds, "samples": samples}
    tell({**facts("trl", "datasets", "tokenizers"), **record, "cpu_seconds": compared}, options.output)
    table = [[tool, statistics.median(seconds[tool]), per_second[tool], samples[tool]] for tool in TOOLS]
    show("CPU time of making samples", ["", "CPU s", "rows a CPU second", "samples"], table)
    print(f"toolkit / TRL: {compared['ratio']} ({compared['low']} to {compared['high']})")


if __name__ == "__main__":
    main()
