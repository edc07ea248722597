"""The toolkit beside tools that need environments of their own: the same model, tokenizer and conversations.

    python benchmarks/peers_apart.py --python axolotl=PATH llamafactory=PATH ms-swift=PATH \\
        [--cells "packed full"] [--rounds 2] [--output benchmarks/results/peers_apart.jsonl]

PATH is the interpreter of an environment that has the tool; the toolkit and TRL run in this one. Each trains by its own
command, with settings that say the same: a random-weight Llama (23M parameters) on one CPU rank of one thread, float32,
AdamW, micro-batches of 4, rows in order, answers as targets; padded and packed, all weights and LoRA.

A run makes two epochs. What counts is the CPU time of all its processes between the losses that it prints for the last
steps of both epochs: imports, reading and saving are outside, without the noise of subtracting two runs. Every row is
trained on once in that time, so the rate is tokens of rows per CPU second; padding is none. The start is the CPU time
until the first loss. Tools take turns; ratios are of a round. Packing moves rows to other steps, and losses with them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from commands import Run, run
from facts import facts, show, tell
from peers import FULL, TINY
from rows import train_tokenizer
from turns import ratios

WORDS, MEDIAN, SIGMA, SHORTEST, MAX_LENGTH = 3000, 120, 0.8, 16, 512
BATCH, EPOCHS, RATE, RANK = 4, 2, 3e-4, 16
ROWS = 20
"""They fill micro-batches and packs: axolotl leaves out an epoch's last micro-batch of packs if it isn't full, and the
toolkit fills it from the next epoch."""
CELLS = {
    f"{way} {what}": (way == "packed", what == "LoRA") for way in ("padded", "packed") for what in ("full", "LoRA")
}
OURS = "toolkit"
TEMPLATE = """
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' -%}
{%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration -%}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML, with the tags that TRL wants around what is learned."""

# ---- what all get ----


def write_rows(path: Path, count: int) -> None:
    """Conversations of a question and an answer, which has three quarters of the words. A word is about a token."""
    draw = np.random.default_rng(0)
    letters = list("etaoinshrdlucmfwypvbgkjqxz")
    vocabulary = ["".join(draw.choice(letters, int(draw.integers(2, 8)))) for _ in range(WORDS)]
    often = 1.0 / np.arange(1, WORDS + 1)
    with path.open("w", encoding="utf-8") as file:
        for length in np.clip(draw.lognormal(np.log(MEDIAN), SIGMA, count), SHORTEST, 0.85 * MAX_LENGTH):
            words = draw.choice(vocabulary, int(length), p=often / often.sum())
            parts = zip(("user", "assistant"), np.split(words, [len(words) // 4]), strict=True)
            messages = [{"role": role, "content": " ".join(part)} for role, part in parts]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_inputs(folder: Path, count: int, tiny: bool) -> dict[str, int]:
    """Writes `model` and `data`. Returns how many rows, tokens of rows and parameters there are."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    write_rows(folder / "words.jsonl", 3000)
    train_tokenizer(folder / "words.jsonl", folder / "model", "chatml", FULL["vocab_size"])
    (folder / "model/chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    lines = (folder / "words.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    (folder / "data").mkdir()
    (folder / "data/rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    about = {"file_name": "rows.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    (folder / "data/dataset_info.json").write_text(json.dumps({"rows": about}), encoding="utf-8")  # LLaMA-Factory's

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lengths = [len(tokenizer.apply_chat_template(json.loads(line)["messages"])["input_ids"]) for line in lines]
    assert max(lengths) <= MAX_LENGTH, lengths
    torch.manual_seed(0)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**{**(TINY if tiny else FULL), **ends, "vocab_size": len(tokenizer)}))
    model.save_pretrained(folder / "model")
    counts = {"rows": count, "row_tokens": sum(lengths), "median_tokens": int(statistics.median(lengths))}
    return {**counts, "parameters": sum(p.numel() for p in model.parameters())}


# ---- each tool's configuration and command ----


def of_toolkit(inputs: Path, packing: bool, lora: bool) -> dict[str, Any]:
    return {
        "model": {"name_or_path": str(inputs / "model"), "dtype": "float32"},
        "data": {
            "train": str(inputs / "data/rows.jsonl"), "max_length": MAX_LENGTH, "packing": packing, "shuffle": False,
            "cache_dir": "cache",
        },
        "adapter": {"kind": "lora", "r": RANK, "alpha": 2 * RANK} if lora else {"kind": "none"},
        "optimizer": {"learning_rate": RATE, "beta2": 0.999, "weight_decay": 0.0},
        "schedule": {"kind": "constant"},
        "training": {"output_dir": "run", "num_epochs": EPOCHS, "micro_batch_size": BATCH},
        "export": {"enabled": False},
        "logging": {"every_steps": 1},
    }  # fmt: skip


def of_trainer() -> dict[str, Any]:
    """What the peers that take TrainingArguments have in common."""
    return {
        "output_dir": "run", "num_train_epochs": EPOCHS, "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": 1, "learning_rate": RATE, "lr_scheduler_type": "constant", "weight_decay": 0.0,
        "adam_beta2": 0.999, "max_grad_norm": 1.0, "optim": "adamw_torch_fused", "bf16": False, "use_cpu": True,
        "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "lora_alpha": 2 * RANK, "lora_dropout": 0.0,
    }  # fmt: skip


def of_trl(inputs: Path, packing: bool, lora: bool) -> dict[str, Any]:
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return {
        **of_trainer(), "model_name_or_path": str(inputs / "model"), "dtype": "float32", "max_length": MAX_LENGTH,
        "datasets": [{"path": "json", "data_files": str(inputs / "data/rows.jsonl")}], "assistant_only_loss": True,
        "packing": packing, "train_sampling_strategy": "sequential", "use_peft": lora, "lora_r": RANK,
        "lora_target_modules": linear,
    }  # fmt: skip


def of_axolotl(inputs: Path, packing: bool, lora: bool) -> dict[str, Any]:
    kernels = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)  # of CUDA alone
    adapter = {"adapter": "lora", "lora_r": RANK, "lora_alpha": 2 * RANK, "lora_target_linear": True, **kernels}
    rows = {"path": str(inputs / "data/rows.jsonl"), "ds_type": "json", "type": "chat_template"}
    return {
        "base_model": str(inputs / "model"), "datasets": [rows], "chat_template": "tokenizer_default",
        "dataset_prepared_path": "prepared", "output_dir": "run", "sequence_len": MAX_LENGTH,
        "sample_packing": packing, "shuffle_merged_datasets": False, "curriculum_sampling": True,
        "dataset_num_proc": 1, "val_set_size": 0, "num_epochs": EPOCHS, "micro_batch_size": BATCH,
        "gradient_accumulation_steps": 1, "learning_rate": RATE, "lr_scheduler": "constant", "weight_decay": 0.0,
        "adam_beta2": 0.999, "max_grad_norm": 1.0, "optimizer": "adamw_torch_fused", "bf16": False, "fp16": False,
        "tf32": False, "attn_implementation": "sdpa", "gradient_checkpointing": False, "logging_steps": 1,
        "save_strategy": "no", **(adapter if lora else {}),
    }  # fmt: skip


def of_llamafactory(inputs: Path, packing: bool, lora: bool) -> dict[str, Any]:
    return {
        **of_trainer(), "stage": "sft", "do_train": True, "model_name_or_path": str(inputs / "model"),
        "template": "chatml", "dataset": "rows", "dataset_dir": str(inputs / "data"), "cutoff_len": MAX_LENGTH,
        "packing": packing, "neat_packing": packing, "disable_shuffling": True, "flash_attn": "sdpa",
        "disable_gradient_checkpointing": True, "finetuning_type": "lora" if lora else "full", "lora_rank": RANK,
        "lora_target": "all",
    }  # fmt: skip


def of_swift(inputs: Path, packing: bool, lora: bool) -> dict[str, Any]:
    return {
        **of_trainer(), "model": str(inputs / "model"), "model_type": "llama", "template": "chatml",
        "torch_dtype": "float32", "dataset": str(inputs / "data/rows.jsonl"), "max_length": MAX_LENGTH,
        "packing": packing, "attn_impl": "sdpa", "train_dataloader_shuffle": False, "dataset_shuffle": False,
        "split_dataset_ratio": 0, "warmup_ratio": 0.0, "tuner_type": "lora" if lora else "full", "lora_rank": RANK,
        "target_modules": "all-linear",
    }  # fmt: skip


class Tool(NamedTuple):
    """`command`: see commands.run. `packages`: whose versions are told."""

    command: list[str]
    settings: Callable[[Path, bool, bool], dict[str, Any]]
    packages: list[str]


TOOLS = {
    OURS: Tool(["toolkit", "train", "SETTINGS", "--cpu", "1"], of_toolkit, []),
    "TRL": Tool(["trl", "sft", "--config", "SETTINGS"], of_trl, ["trl"]),
    "axolotl": Tool(["axolotl", "train", "SETTINGS", "--launcher", "python"], of_axolotl, ["axolotl"]),
    "llamafactory": Tool(["llamafactory-cli", "train", "SETTINGS"], of_llamafactory, ["llamafactory"]),
    "ms-swift": Tool(["swift", "sft", "SETTINGS"], of_swift, ["ms_swift"]),
}


# ---- all of them ----


def versions_of(python: str, packages: Sequence[str]) -> dict[str, str]:
    code = "import json, importlib.metadata as m; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    installed = json.loads(subprocess.check_output([python, "-c", code], text=True))
    return {name: installed[name] for name in ("torch", "transformers", *packages) if name in installed}


def record(runs: Sequence[Run], ours: Sequence[Run], tokens: int) -> dict[str, Any]:
    """Medians over the rounds, and the ratios of rates to the toolkit's in the same cell and round."""
    if failed := next((run.failed for run in runs if run.failed), None):
        return {"failed": failed}
    seconds = [run.last_epoch_seconds(EPOCHS) for run in runs]
    compared = bool(ours) and not any(run.failed for run in ours)
    return {
        "tokens_per_cpu_second": round(tokens / statistics.median(seconds), 1),
        "rate_of_toolkits": ratios([run.last_epoch_seconds(EPOCHS) for run in ours], seconds) if compared else None,
        "start_cpu_seconds": round(statistics.median(run.cpu[0] for run in runs), 1),
        "peak_bytes": max(run.peak_bytes for run in runs),
        "losses": runs[0].losses,
    }


def table(records: Sequence[dict[str, Any]]) -> None:
    columns = ["", "tokens / CPU s", "of the toolkit's", "start, CPU s", "peak MiB", "steps", "first loss", "last loss"]
    rows = []
    for row in records:
        name = f"{row['cell']}: {row['tool']}"
        if "failed" in row:
            rows.append([f"{name} ({row['failed']})"])
            continue
        speed = [row["tokens_per_cpu_second"], (row["rate_of_toolkits"] or {}).get("ratio"), row["start_cpu_seconds"]]
        rows.append([name, *speed, row["peak_bytes"] >> 20, len(row["losses"]), row["losses"][0], row["losses"][-1]])
    show("The second epoch on one CPU rank", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="*", default=[], metavar="NAME=PATH", help="interpreters of the peers")
    parser.add_argument("--tools", nargs="+", choices=list(TOOLS), default=list(TOOLS))
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--tiny", action="store_true", help="a model that says nothing about speed")
    parser.add_argument("--output", type=Path, help="file to which lines of JSON are added")
    options = parser.parse_args()
    pythons = {OURS: sys.executable, "TRL": sys.executable, **dict(pair.split("=", 1) for pair in options.python)}
    names = [name for name in options.tools if name in pythons]
    records = []
    with tempfile.TemporaryDirectory() as place:
        counts = write_inputs(Path(place), options.rows, options.tiny)
        told = {**facts(), "rounds": options.rounds, **counts}
        for cell in options.cells:
            runs: dict[str, list[Run]] = {name: [] for name in names}
            for number in range(options.rounds):
                for name in reversed(names) if number % 2 else names:
                    if not any(done.failed for done in runs[name]):
                        tool, settings = TOOLS[name], TOOLS[name].settings(Path(place), *CELLS[cell])
                        runs[name].append(run(pythons[name], tool.command, settings, EPOCHS))
            for name in names:
                about = {"versions": versions_of(pythons[name], TOOLS[name].packages), "cell": cell, "tool": name}
                figures = record(runs[name], runs.get(OURS, []), counts["row_tokens"])
                records.append({**told, **about, **figures})
                tell(records[-1], options.output)
    table(records)


if __name__ == "__main__":
    main()
