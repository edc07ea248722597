"""What a step over a 4-bit base costs: QLoRA beside LoRA in bf16, both beside peft and bitsandbytes by hand.

    python benchmarks/qlora.py [--ranks 1 2] [--rounds 5] [--output benchmarks/results/qlora.jsonl]

A Llama of random weights with adapters of rank 16 on all linear layers, nf4 with double quantisation, computed in bf16;
a row of `T` tokens a rank and step. The toolkit runs what `finetune` runs, from the recipe to `Trainer.fit`; by hand
is transformers' own 4-bit loading, peft, autocast and a plain loop, in one process. Variants take turns (see turns.py);
the ratios are of CPU time, of all ranks together, and of the slowest rank's clock.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import peers
import torch
import turns
import yaml
from facts import facts, show, tell

T, ROWS, STEPS_A_TURN = 512, 256, 2
CONFIG = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
}
TINY = {**CONFIG, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
DOUBLE = {"adapter.quantize": "nf4", "adapter.double_quantization": True}


def write_job(folder: str, config: dict[str, int]) -> peers.Job:
    """The base in bf16, its tokenizer, rows of T tokens, and the recipe of LoRA."""
    job = peers.Job(folder, config, T, 1, STEPS_A_TURN)
    peers.write_rows(job, ROWS, full=True)
    peers.whole_model(job).bfloat16().save_pretrained(Path(folder, "base"))
    peers.write_recipe(job)
    recipe = yaml.safe_load(Path(folder, "recipe.yaml").read_text(encoding="utf-8"))
    recipe["model"] = {
        "name_or_path": str(Path(folder, "base")),
        "tokenizer": str(Path(folder, "words")),
        "dtype": "bfloat16",
    }
    recipe["adapter"] = {"kind": "lora", "r": 16, "target_modules": "all-linear"}
    recipe["training"]["mixed_precision"] = "bf16"
    Path(folder, "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return job


def by_hand(quantised: bool) -> Callable[[peers.Gate, peers.Job, int], None]:
    def train(gate: peers.Gate, job: peers.Job, rank: int) -> None:
        import peft
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        gate.imported()
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        base: Any = AutoModelForCausalLM.from_pretrained(
            Path(job.folder, "base"), dtype=torch.bfloat16, quantization_config=how if quantised else None
        )
        config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(base, config).train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True, **peers.ADAMW)
        rows, step = job.rows(), 0
        while gate():
            ids = torch.tensor([rows[step % len(rows)]])
            step += 1
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, peers.MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            gate.saw(loss.item(), T - 1)

    return train


VARIANTS: dict[str, Callable[[peers.Gate, peers.Job, int], None]] = {
    "LoRA": peers.by_toolkit("zero3", packing=False),
    "QLoRA": peers.by_toolkit("zero3", packing=False, **DOUBLE),
    "QLoRA, single": peers.by_toolkit("zero3", packing=False, **{"adapter.quantize": "nf4"}),
    "peft": by_hand(quantised=False),
    "peft + bitsandbytes": by_hand(quantised=True),
}
RATIOS = [
    ("QLoRA", "LoRA"),
    ("QLoRA, single", "LoRA"),
    ("peft + bitsandbytes", "peft"),
    ("LoRA", "peft"),
    ("QLoRA", "peft + bitsandbytes"),
]


def work(pipe: Connection, variant: str, rank: int, ranks: int, meeting: str, job: peers.Job) -> None:
    """One rank of one variant."""
    peers.work_at(VARIANTS[variant], pipe, rank, ranks, meeting, job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a model that says nothing about speed")
    parser.add_argument("--output", type=Path, help="file to which lines of JSON are added")
    options = parser.parse_args()
    told, rows = facts("peft", "bitsandbytes"), []
    with tempfile.TemporaryDirectory() as folder:
        job = write_job(folder, TINY if options.tiny else CONFIG)
        told["parameters"] = sum(parameter.numel() for parameter in peers.whole_model(job).parameters())
        for ranks in options.ranks:
            variants = [variant for variant in VARIANTS if ranks == 1 or "peft" not in variant]
            ends = {variant: turns.start(work, variant, ranks, folder, job) for variant in variants}
            taken = turns.take(ends, options.rounds)
            for pipes in ends.values():
                turns.end(pipes)
            seconds = {
                "cpu": {name: [sum(r["cpu"] for r in turn) for turn in found] for name, found in taken.items()},
                "wall": {name: [max(r["wall"] for r in turn) for turn in found] for name, found in taken.items()},
            }
            for ours, theirs in RATIOS:
                if ours in taken and theirs in taken:
                    ratios = {kind: turns.ratios(found[ours], found[theirs]) for kind, found in seconds.items()}
                    losses = {name: taken[name][0][0]["losses"] for name in (ours, theirs)}
                    tell(
                        {**told, "ranks": ranks, "what": f"{ours} / {theirs}", **ratios, "losses": losses},
                        options.output,
                    )
                    rows.append([f"{ours} / {theirs}, {ranks}", *ratios["cpu"].values(), *ratios["wall"].values()])
    kinds = [f"{kind} {name}" for kind in ("CPU", "clock") for name in ("ratio", "low", "high", "s", "s")]
    show(f"Seconds of {STEPS_A_TURN} steps", ["variants, ranks", *kinds], rows)


if __name__ == "__main__":
    main()
