"""The same rewards and as many samples, three ways to learn from one's own samples: how many answers come out right?

    pip install trl
    python benchmarks/outcomes_samples.py [--seeds 1 2 3] [--output benchmarks/results/outcomes_samples.jsonl]

The Llama of a million parameters that `quickstart` trains guesses a time for reminders that name none. It shall ask.
Every way begins with this model, and samples 1,536 answers to the requests of recipes/data/preferences.jsonl, of which
a right one has the reward 1. Compared are `objective.kind: grpo` and TRL's GRPOTrainer with the same settings, 12 steps
of 16 requests with 8 answers each, and one round of rejection sampling: 8 answers to each of 192 requests, of which a
right one is learned.

One process of one thread each, float32. Every model answers the 60 requests of preferences_held_out.jsonl greedily. CPU
minutes and memory are those of the whole process: imports, sampling, training, and what each does of checks and export.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from facts import facts, show, tell
from trainers import read_rows, run_benchmark, run_cells

DATA = Path(__file__).parents[1] / "recipes/data"
HELD_OUT = DATA / "preferences_held_out.jsonl"
STEPS, PROMPTS, GROUP = 12, 16, 8
MOST_NEW_TOKENS, RATE = 64, 3e-4
TITLES = {
    "base": "before",
    "toolkit": "toolkit, grpo",
    "trl": "TRL, GRPOTrainer",
    "rejection": "toolkit, one round of rejection sampling",
}
TRAINERS = ("toolkit", "trl", "rejection")


def write_base(work: Path) -> None:
    """Writes the model that every way begins with."""
    import toolkit

    toolkit.finetune("quickstart", {"training.output_dir": str(work / "first"), **QUIET})


QUIET = {"training.eval_every_steps": 1000, "logging.held_out_samples": 0}


# ---- the ways ----


def train_by_toolkit(work: Path, seed: int) -> Path:
    import toolkit

    values = {
        "model": {"name_or_path": str(work / "first/export")},
        "data": {"train": str(DATA / "preferences.jsonl"), "max_length": 160},
        "objective": {
            "kind": "grpo",
            "group_size": GROUP,
            "max_new_tokens": MOST_NEW_TOKENS,
            "rewards": [{"name": "right", "compare": "strict"}],
        },
        "optimizer": {"learning_rate": RATE, "weight_decay": 0.0},
        "schedule": {"kind": "constant", "warmup_steps": 3},
        "training": {
            "output_dir": "run",
            "max_steps": STEPS,
            "micro_batch_size": PROMPTS * GROUP // 2,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 1.0,
            "seed": seed,
        },
    }
    result = toolkit.finetune(toolkit.Recipe.from_mapping(values))
    assert result.export_dir is not None
    return result.export_dir


def train_by_trl(work: Path, seed: int) -> Path:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    rows = [
        {"prompt": row["prompt"], "answer": row["chosen"][0]["content"]}
        for row in read_rows(DATA / "preferences.jsonl")
    ]
    arguments = GRPOConfig(
        output_dir="checkpoints",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * GROUP // 2,
        gradient_accumulation_steps=2,
        num_generations=GROUP,
        max_completion_length=MOST_NEW_TOKENS,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        seed=seed,
        save_strategy="no",
        report_to="none",
    )

    def right(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [float(completion[0]["content"] == expected) for completion, expected in pairs]

    base = work / "first/export"
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=right,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
    )
    trainer.train()
    trainer.save_model("model")
    return Path("model")


def train_by_rejection(work: Path, seed: int) -> Path:
    import toolkit

    rows = (DATA / "preferences.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    Path("asked.jsonl").write_text("".join(rows[: STEPS * PROMPTS]), encoding="utf-8")
    base = work / "first/export"
    sampling = {"samples": GROUP, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": MOST_NEW_TOKENS, "seed": seed}
    drawn = toolkit.sample(base, Path("asked.jsonl"), Path("samples"), batch_size=64, **sampling)
    values = {"model.name_or_path": str(base), "data.train": str(drawn.folder / "sft.jsonl"), **QUIET}
    values |= {"training.output_dir": "run", "training.num_epochs": 2, "optimizer.learning_rate": 5e-4}
    result = toolkit.finetune("quickstart", values | {"training.seed": seed})
    assert result.export_dir is not None
    return result.export_dir


def train(trainer: str, work: Path, seed: int) -> None:
    ways = {"toolkit": train_by_toolkit, "trl": train_by_trl, "rejection": train_by_rejection}
    Path("trained.txt").write_text(str(ways[trainer](work, seed).resolve()), encoding="utf-8")


# ---- all of it ----


def score(model: Path) -> dict[str, Any]:
    import toolkit

    found = toolkit.evaluate(model, HELD_OUT, max_new_tokens=MOST_NEW_TOKENS, batch_size=50)
    return {"right": found.exact, "rows": found.num_rows}


def tabulate(records: Sequence[dict[str, Any]]) -> None:
    rows = []
    for trainer, title in TITLES.items():
        found = [record for record in records if record["trainer"] == trainer]
        if found:
            right = [record["right"] for record in found]
            means = [statistics.mean(record.get(key, 0.0) for record in found) for key in ("cpu_minutes", "peak_gib")]
            rows.append((title, statistics.mean(right), ", ".join(map(str, right)), *means))
    columns = ("way", f"right of {records[0]['rows']}", "by seed", "CPU minutes", "peak GiB")
    show("A Llama of a million parameters, asking for what is missing", columns, rows)


def run(arguments: argparse.Namespace, work: Path) -> None:
    if not (work / "first/export").is_dir():
        write_base(work)
    about = facts("trl")
    records = [{"trainer": "base", "seed": None, **score(work / "first/export"), **about}]
    tell(records[0], arguments.output)
    read = lambda folder: score(Path((folder / "trained.txt").read_text(encoding="utf-8")))  # noqa: E731
    records += run_cells(Path(__file__), arguments, work, read, about)
    tabulate(records)


if __name__ == "__main__":
    run_benchmark(__doc__, TRAINERS, train, run)
