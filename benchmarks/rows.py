"""What it costs to make samples of conversations: read, rendered, masked, checked and packed; TRL beside it.

    python benchmarks/rows.py [--rows 20000] [--rounds 3] [--templates chatml llama3 qwen3 deepseek_r1_distill]
        [--output benchmarks/results/rows.jsonl]

Conversations have one to three questions and answers of lognormal lengths (medians 40 and 120 words), words of a
vocabulary of 30,000 by Zipf's law, and a chat template: ours of ChatML, or one of those that TRL holds. For templates
that drop the thoughts of earlier turns, answers have thoughts. The tokenizer is trained on the rows. The toolkit masks
all but the assistant's words, and reports on every row. TRL's SFTTrainer packs by the same algorithm, and is timed from
reading the file until it stands, with a model of one layer: once it learns the whole text (`trl`), once it makes the
same masks (`trl-masks`, assistant_only_loss). `toolkit-tokenizers` is the toolkit without the package fastokens. Each
tool works in a process of one thread; what counts is its CPU time after its imports, and the ratio of two in the same
round.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from facts import facts, show, tell
from turns import ratios

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
WORDS, MAX_LENGTH = 30_000, 2048
TOOLS = ("toolkit", "toolkit-tokenizers", "trl", "trl-masks")
TEMPLATES = ("chatml", "llama3", "qwen3", "deepseek_r1_distill")
THINKING = ("qwen3", "deepseek_r1_distill")
"""Templates for which answers have thoughts."""

MARKED_CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""What our ChatML writes, with the marks that TRL needs. It has such templates for the others."""


def write_rows(path: Path, count: int, thoughts: bool = False) -> None:
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
                    content = f"{words.capitalize()}."
                    if thoughts and role == "assistant":
                        content = f"<think>\n{' '.join(draw.choice(vocabulary, 60, p=zipf))}.\n</think>\n\n{content}"
                    messages.append({"role": role, "content": content})
            file.write(json.dumps({"messages": messages}) + "\n")


def train_tokenizer(rows: Path, folder: Path, template: str = "chatml", size: int = 16_000) -> None:
    import trl

    from toolkit.data.templates.templates import MARKERS, use_template
    from toolkit.data.tokens.tokenizer import _train_byte_pairs

    with rows.open(encoding="utf-8") as file:
        texts = [message["content"] for line in islice(file, 3000) for message in json.loads(line)["messages"]]
    held = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
    text = held.read_text(encoding="utf-8") if held.exists() else ""
    special = sorted(set(re.findall("<[|\uff5c][^<>]+[|\uff5c]>", text)) - {"<|endoftext|>"}) or MARKERS["chatml"]
    tokenizer = _train_byte_pairs(iter(texts), size, special)
    if text:
        ends = ("<|im_end|>", "<|eot_id|>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
        tokenizer.chat_template, tokenizer.bos_token = text, "<|endoftext|>"
        tokenizer.eos_token = next(end for end in ends if end in special)
    else:
        use_template(tokenizer, "chatml")
    tokenizer.save_pretrained(folder)


def by_toolkit(rows: str, tokenizer: Any, folder: str) -> tuple[Any, int]:
    import datasets  # noqa: F401 (the toolkit imports it when it reads the first rows)

    from toolkit.data import build
    from toolkit.recipe.schema import DataSection

    settings = {"train": rows, "max_length": MAX_LENGTH, "cache_dir": folder, "long_rows": "truncate", "num_proc": 1}
    started = time.process_time()
    made = build.build(DataSection.model_validate(settings), tokenizer, 0)
    return started, len(made.train)


def by_trl(rows: str, tokenizer: Any, folder: str, masks: bool = False) -> tuple[Any, int]:
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    from toolkit.data.templates.templates import TEMPLATES as OURS

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    if masks and tokenizer.chat_template == OURS["chatml"]:
        tokenizer.chat_template = MARKED_CHATML
    datasets.disable_progress_bars()
    config = SFTConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to=[], packing=True, packing_strategy="bfd",
        max_length=MAX_LENGTH, assistant_only_loss=masks,
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
        if tool == "toolkit-tokenizers":
            sys.modules["fastokens"] = None  # type: ignore[assignment]  # as if it were not installed
        makers = {
            "toolkit": by_toolkit,
            "toolkit-tokenizers": by_toolkit,
            "trl": by_trl,
            "trl-masks": partial(by_trl, masks=True),
        }
        started, samples = makers[tool](rows, loaded, folder)
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
    parser.add_argument("--templates", nargs="+", choices=TEMPLATES, default=TEMPLATES)
    parser.add_argument("--output", type=Path, help="JSON lines to add to")
    parser.add_argument("--work", nargs=3, metavar=("TOOL", "ROWS", "TOKENIZER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    for template in options.templates:
        compare(template, options.rows, options.rounds, options.output)


def compare(template: str, count: int, rounds: int, output: Path | None) -> None:
    seconds: dict[str, list[float]] = {tool: [] for tool in TOOLS}
    samples = {}
    with tempfile.TemporaryDirectory() as name:
        rows, tokenizer = Path(name, "rows.jsonl"), Path(name, "tokenizer")
        write_rows(rows, count, template in THINKING)
        train_tokenizer(rows, tokenizer, template)
        for number in range(rounds):
            for tool in TOOLS if number % 2 else reversed(TOOLS):
                found = measured(tool, rows, tokenizer)
                seconds[tool].append(found["cpu"])
                samples[tool] = found["samples"]
        size = rows.stat().st_size
    compared = {tool: ratios(seconds["toolkit"], seconds[tool]) for tool in TOOLS[1:]}
    per_second = {tool: round(count / statistics.median(found)) for tool, found in seconds.items()}
    record = {"template": template, "rows": count, "megabytes": round(size / 1e6, 1), "rounds": rounds}
    tell({**facts("trl", "datasets", "tokenizers"), **record, "samples": samples, "cpu_seconds": compared}, output)
    table = [[tool, statistics.median(seconds[tool]), per_second[tool], samples[tool]] for tool in TOOLS]
    show(f"CPU time of making samples, {template}", ["", "CPU s", "rows a CPU second", "samples"], table)
    for tool, found in compared.items():
        print(f"toolkit / {tool}: {found['ratio']} ({found['low']} to {found['high']})")


if __name__ == "__main__":
    main()
