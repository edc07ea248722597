"""What greedy answers and an evaluation cost beside transformers by hand, in CPU time of one thread.

    python benchmarks/generation.py [--rounds 5] [--output benchmarks/results/generation.jsonl]

A Llama of 23M random weights in float32 that no stop token ends early. Answers: 32 prompts of 8 to 60 tokens, 48 new
tokens, batches of 8, `toolkit.generate` beside `generate` of transformers on prompts padded at the left. Both load
the model. Evaluation: 64 texts of 20 to 250 tokens, the trainer's own evaluation, packed in rows of 256, beside a
forward of transformers with padded batches of 8. Both take turns in one process; texts and losses must agree.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from facts import facts, show, tell
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from turns import ratios

WORDS, BATCH, NEW_TOKENS, LENGTH = 8000, 8, 48, 256


def write_model(folder: Path) -> None:
    words = {"<pad>": 0, "</s>": 1, **{f"w{number}": number + 2 for number in range(WORDS - 2)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=512, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def texts_of(count: int, shortest: int, longest: int) -> list[str]:
    draw = random.Random(0)
    lengths = [draw.randint(shortest, longest) for _ in range(count)]
    return [" ".join(f"w{draw.randrange(WORDS - 2)}" for _ in range(length)) for length in lengths]


def by_transformers(folder: Path, prompts: list[str]) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for start in range(0, len(prompts), BATCH):
        inputs = tokenizer(prompts[start : start + BATCH], return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        out = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        found += tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def by_toolkit(folder: Path, prompts: list[str]) -> list[str]:
    from toolkit import generate

    return generate(folder, prompts, raw=True, max_new_tokens=NEW_TOKENS, temperature=0.0, batch_size=BATCH)


@torch.no_grad()
def loss_by_transformers(model: Any, tokenizer: Any, texts: list[str]) -> float:
    """The mean loss of all targets; each text ends with a stop token, as in the recipe's rows."""
    total, count = 0.0, 0
    for start in range(0, len(texts), BATCH):
        inputs = tokenizer([f"{text} </s>" for text in texts[start : start + BATCH]], return_tensors="pt", padding=True)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        targets = int((labels[:, 1:] != -100).sum())
        out = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels)
        total, count = total + float(out.loss) * targets, count + targets
    return total / count


def evaluation_by_toolkit(folder: Path, texts: list[str], place: Path) -> tuple[float, float]:
    """CPU seconds of the last evaluation of a run of one step at a rate of almost 0, and the loss that it found."""
    from toolkit import Recipe, finetune
    from toolkit.training.trainer import Trainer

    file = place / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    values = {
        "model": {"name_or_path": str(folder)},
        "data": {"train": str(file), "validation": str(file), "max_length": LENGTH, "cache_dir": str(place / "cache")},
        "optimizer": {"learning_rate": 1e-30},
        "training": {"output_dir": tempfile.mkdtemp(dir=place), "max_steps": 1, "micro_batch_size": BATCH, "seed": 0},
        "export": {"enabled": False},
    }
    seconds: list[float] = []
    evaluate = Trainer.evaluate

    def timed(trainer: Trainer) -> None:
        seconds.append(cpu_of(lambda: evaluate(trainer))[0])

    Trainer.evaluate = timed  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            result = finetune(Recipe.from_mapping(values))
    finally:
        Trainer.evaluate = evaluate  # type: ignore[method-assign]
    return seconds[-1], [record["loss"] for record in result.metrics if record["split"] == "eval"][-1]


def cpu_of(action: Callable[[], Any]) -> tuple[float, Any]:
    before = time.process_time()
    found = action()
    return time.process_time() - before, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="file to which lines of JSON are added")
    options = parser.parse_args()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        folder = place / "model"
        write_model(folder)
        prompts, texts = texts_of(32, 8, 60), texts_of(64, 20, 250)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        rows = []
        for what in ("answers", "evaluation"):
            ours, theirs = [], []
            for _ in range(options.rounds):
                if what == "answers":
                    mine, found = cpu_of(lambda: by_toolkit(folder, prompts))
                    other, expected = cpu_of(lambda: by_transformers(folder, prompts))
                    equal = [text.strip() for text in found] == [text.strip() for text in expected]
                else:
                    mine, loss = evaluation_by_toolkit(folder, texts, place)
                    other, expected = cpu_of(lambda: loss_by_transformers(model, tokenizer, texts))
                    equal = abs(loss - expected) < 1e-5
                if not equal:
                    raise SystemExit(f"{what}: the toolkit and transformers do not agree")
                ours.append(mine)
                theirs.append(other)
            told = ratios(ours, theirs)
            tell({**facts(), "what": what, "rounds": options.rounds, "cpu": told}, options.output)
            rows.append([what, told["ratio"], told["low"], told["high"], told["ours"], told["theirs"]])
        show("CPU time beside transformers by hand", ["", "ratio", "low", "high", "ours s", "theirs s"], rows)


if __name__ == "__main__":
    main()
