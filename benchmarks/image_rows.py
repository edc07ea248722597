"""Rows with images: the toolkit beside TRL, useful tokens per second on the same conversations.

    python benchmarks/image_rows.py [--output benchmarks/results/image_rows.jsonl]

Both train one random-weight Qwen2.5-VL (14M parameters) on 256 conversations with answers of lognormal length, a third
of them without an image, the others with one or two of several sizes; 2 gloo ranks of one thread, float32, 4 rows a
micro-batch, AdamW, clipping, the vision tower frozen. Useful tokens are the tokens of answers, which both learn. TRL's
SFTTrainer refuses to pack rows with images, so that it pads them, and makes pixels in its collator. The variants take
turns (see turns.py). It needs the extra `vision`, and trl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import peers
import torch
import turns
from facts import facts, show, tell
from PIL import Image

ROWS, MEDIAN, SIGMA, LONGEST = 256, 60, 0.8, 400
SIDES = (56, 84, 112, 168, 224)
WORDS = [f"w{number}" for number in range(4000)]
SPECIAL = ("<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
PADDED, PACKED, TRL = "toolkit zero3, padded", "toolkit zero3, packed", "TRL"
WANTED = 2.0
"""Useful tokens per CPU second, packed: at least so many times TRL's."""


def save_model(folder: Path) -> None:
    """A small Qwen2.5-VL with random weights, its tokenizer of whole words, and its processor."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoConfig,
        AutoModelForImageTextToText,
        PreTrainedTokenizerFast,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    vocabulary = [*SPECIAL, "<|video_pad|>", "user", "assistant", *WORDS]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<|end|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, "<|video_pad|>"]})
    tokenizer.chat_template = TEMPLATE
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        image_token_id=vocabulary.index("<|image_pad|>"),
        video_token_id=vocabulary.index("<|video_pad|>"),
        vision_start_token_id=vocabulary.index("<|vision_start|>"),
        vision_end_token_id=vocabulary.index("<|vision_end|>"),
        text_config={
            "vocab_size": len(vocabulary), "hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 8,
            "num_attention_heads": 5, "num_key_value_heads": 1, "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e4},
            "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 320,
            "fullatt_block_indexes": [1],
        },
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(), tokenizer=tokenizer, video_processor=Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    tokenizer.save_pretrained(folder)


def write_rows(folder: Path, count: int) -> None:
    """Conversations as prompt and completion, with the names of their images: rows.jsonl."""
    draw = np.random.default_rng(0)
    (folder / "seen").mkdir()
    lines, number = [], 0
    for length in np.clip(draw.lognormal(np.log(MEDIAN), SIGMA, count), 8, LONGEST).astype(int):
        names = []
        for _ in range(int(draw.integers(0, 3))):
            width, height = draw.choice(SIDES, 2)
            Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(
                folder / f"seen/{number}.png"
            )
            names.append(f"seen/{number}.png")
            number += 1
        asked, answer = (" ".join(draw.choice(WORDS, n)) for n in (int(draw.integers(5, 20)), length))
        content = [*({"type": "image"} for _ in names), {"type": "text", "text": asked}]
        line = {
            "prompt": [{"role": "user", "content": content}],
            "completion": [{"role": "assistant", "content": [{"type": "text", "text": answer}]}],
            "images": names,
        }
        lines.append(json.dumps(line))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_recipe(folder: Path) -> None:
    import yaml

    recipe = {
        "model": {"name_or_path": str(folder / "model"), "train": ["language", "projector"]},
        "data": {
            "train": str(folder / "rows.jsonl"), "max_length": 1024, "shuffle": False,
            "cache_dir": str(folder / "cache"),
        },
        "optimizer": {"learning_rate": peers.ADAMW["lr"], "beta2": peers.ADAMW["betas"][1], "weight_decay": 0.0},
        "schedule": {"kind": "constant"},
        "training": {
            "output_dir": str(folder / "unused"), "max_steps": 10**6, "micro_batch_size": 4, "num_epochs": None,
            "max_grad_norm": peers.MAX_NORM,
        },
        "logging": {"every_steps": 10**6},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


def by_trl(gate: peers.Gate, job: peers.Job, _rank: int) -> None:
    """See `peers.train_by_trl`; with the tower frozen."""
    import trl  # noqa: F401
    from datasets import Dataset, Sequence
    from datasets import Image as Pixels
    from transformers import AutoModelForImageTextToText, AutoProcessor

    gate.imported()
    folder = Path(job.folder)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["images"] = [str(folder / name) for name in row["images"]]
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("visual" not in name or "merger" in name)
    peers.train_by_trl(
        gate,
        job,
        model,
        Dataset.from_list(rows).cast_column("images", Sequence(Pixels())),
        AutoProcessor.from_pretrained(folder / "model"),
        ddp_find_unused_parameters=True,
        max_length=None,
    )


VARIANTS: dict[str, Callable[[peers.Gate, peers.Job, int], None]] = {
    TRL: by_trl,
    PADDED: peers.by_toolkit("zero3", packing=False),
    PACKED: peers.by_toolkit("zero3", packing=True),
}


def work(pipe: Connection, variant: str, rank: int, ranks: int, meeting: str, job: peers.Job) -> None:
    """One rank of one variant."""
    peers.work_at(VARIANTS[variant], pipe, rank, ranks, meeting, job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="of a variant's turn")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--output", type=Path, help="file to which lines of JSON are added")
    options = parser.parse_args()
    told = facts("trl", "torchvision")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model")
        write_rows(folder, options.rows)
        write_recipe(folder)
        job = peers.Job(name, {}, 1024, 4, options.steps)
        ends = {variant: turns.start(work, variant, 2, name, job) for variant in VARIANTS}
        taken = turns.take(ends, options.rounds)
        for pipes in ends.values():
            turns.end(pipes)
    rates = {variant: [peers.rate(found, "cpu") for found in taken[variant]] for variant in VARIANTS}
    rows = []
    for variant, found in rates.items():
        ratio = turns.ratios(found, rates[TRL])
        wall = round(statistics.median(peers.rate(each, "wall") for each in taken[variant]), 1)
        peak = max(rank["peak"] for rank in taken[variant][-1])
        cpu = round(statistics.median(found), 1)
        tell(
            {
                **told, "ranks": 2, "rounds": options.rounds, "variant": variant, "tokens_per_second": wall,
                "tokens_per_cpu_second": cpu, "cpu_ratio": ratio, "peak_rank_bytes": peak,
            },
            options.output,
        )  # fmt: skip
        rows.append([variant, cpu, ratio["ratio"], f"{ratio['low']:.3f}-{ratio['high']:.3f}", wall, peak >> 20])
    show("Useful tokens (of answers)", ["", "tokens / CPU s", "of TRL", "quartiles", "tokens / s", "peak MiB"], rows)
    met = "met" if rows[-1][2] >= WANTED else "NOT met"
    print(f"goal: {PACKED} at least {WANTED} times {TRL}: {met}", file=sys.stderr)


if __name__ == "__main__":
    main()
