"""How much of a GPU is used: tokens per second, MFU and peak memory, with and without each lever.

    python benchmarks/mfu.py [--sizes 1b 3b] [--tokens 8192 32768] [--output benchmarks/results/mfu.jsonl]

Llama shapes with weights that mean nothing, one GPU, bf16, AdamW, clipping, through the stock `Accelerator`
with strategy zero3; full fine-tuning and LoRA of every linear layer. Levers are tried alone, then together.
MFU counts 6 N + 12 L H T per token (PaLM, arXiv 2204.02311), under LoRA 4 N for what is frozen; packed rows
count the T of their documents. What does not fit, or cannot run here, is a line that says so; nothing is
started after `--seconds`. Needs torch, Accelerate, transformers and rich, and peft for LoRA; neither datasets
nor pydantic. `--tiny` is a rehearsal on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from facts import facts, show, tell
from offload import SIZES, Job, config_of, loader_of
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository itself, installed or not

TARGET_MFU, TARGET_TOKENS = 0.55, 8192
MAX_NORM, LEARNING_RATE = 1.0, 1e-5
CHUNK_TOKENS = 1024
LEVERS: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "compile": frozenset({"compile"}),
    "loss without logits": frozenset({"no logits"}),
    "compile, loss without logits": frozenset({"compile", "no logits"}),
    "checkpointing": frozenset({"checkpointing"}),
    "offload": frozenset({"offload"}),
    "packed, masked": frozenset({"packed"}),
    "packed, flex": frozenset({"packed", "flex"}),
    "compile, loss without logits, checkpointing": frozenset({"compile", "no logits", "checkpointing"}),
    "compile, loss without logits, offload": frozenset({"compile", "no logits", "offload"}),
    "compile, loss without logits, packed, flex": frozenset({"compile", "no logits", "packed", "flex"}),
}

PLANNED = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
"""What a recipe says of the model."""


@dataclass(frozen=True)
class Case:
    """What is measured: a size of `offload.SIZES`, `full` or `lora`, a line of `LEVERS`, tokens of a step."""

    size: str
    training: str
    levers: str
    tokens: int

    def has(self, lever: str) -> bool:
        return lever in LEVERS[self.levers]

    @property
    def row(self) -> int:
        """Tokens of a row."""
        return SIZES[self.size].row


def build(case: Case) -> Any:
    """The model on the meta device, with what the levers change in it."""
    from accelerate import init_empty_weights
    from transformers import LlamaForCausalLM

    from toolkit.sharding import plan_units

    config = config_of(Job(case.size, case.tokens, 1))
    attention = "flex_attention" if case.has("flex") else "sdpa"
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    model.tie_weights()
    if case.has("no logits"):
        lose_logits(model)
    if case.training == "lora":
        model = with_adapters(model)
    if case.has("compile"):
        for unit in plan_units(model).blocks:
            for path in unit.modules:
                model.get_submodule(path).compile()
    return model.train()


def with_adapters(model: Any) -> Any:
    """LoRA of rank 16 in every linear layer of the blocks; what is frozen is in bf16."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model.to(torch.bfloat16), settings, autocast_adapter_dtype=True)


def lose_logits(model: Any) -> None:
    """The head gives the loss, a chunk of tokens at a time, whose logits are made again in backward."""
    head = model.lm_head

    def summed(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, head.weight).float(), labels, reduction="sum")

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        labels = model.wanted
        pairs = zip(hidden.flatten(0, 1).split(CHUNK_TOKENS), labels.flatten().split(CHUNK_TOKENS), strict=True)
        return torch.stack([checkpoint(summed, *pair, use_reentrant=False) for pair in pairs]).sum() / labels.numel()

    head.forward = forward


def loss_of(case: Case, model: Any, inner: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    labels = batch["labels"]
    given = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    if case.has("no logits"):
        inner.wanted = labels
        return model(**given).logits  # type: ignore[no-any-return]
    return F.cross_entropy(model(**given).logits.flatten(0, 1).float(), labels.flatten())


def documents(case: Case) -> list[int]:
    """Lengths of the documents of a row (tokens): one, or when packed of lognormal length."""
    if not case.has("packed"):
        return [case.row]
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(case.row, generator=generator).exp() * case.row / 16).int().clamp(min=4).tolist()
    ends = list(itertools.takewhile(lambda end: end < case.row, itertools.accumulate(lengths)))
    return [end - start for start, end in itertools.pairwise([0, *ends, case.row])]


def batches(case: Case, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """`input_ids`, `labels` and `position_ids`, each (B, T); labels are shifted already."""
    generator = torch.Generator().manual_seed(0)
    shape = (max(1, case.tokens // case.row), case.row)
    positions = torch.cat([torch.arange(length) for length in documents(case)]).expand(shape).contiguous()
    while True:
        ids = torch.randint(0, SIZES[case.size].vocabulary, shape, generator=generator)
        batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": positions}
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def flops_per_token(case: Case, model: Any) -> float:
    """Forward and backward; of packed rows a token sees its own document alone."""
    from toolkit.training.usage import Counts, model_flops

    lengths = documents(case)
    counts = Counts(tokens=sum(lengths), pairs=sum(length**2 for length in lengths))
    return model_flops(model).of(counts) / counts.tokens


def planned_bytes(case: Case) -> int | None:
    """Peak of the GPU that the planner foretells; None without a planner, and for what it does not plan yet."""
    if not torch.cuda.is_available() or case.training == "lora" or case.has("no logits") or case.has("packed"):
        return None
    try:
        from toolkit.planning import plan
        from toolkit.planning.hardware import preset_of_device
        from toolkit.recipe.recipe import Recipe
    except ImportError:
        return None
    hardware = preset_of_device(torch.cuda.get_device_name())
    if hardware is None:
        return None
    fields = {
        key: value for key, value in config_of(Job(case.size, case.tokens, 1)).to_dict().items() if key in PLANNED
    }
    values = {
        "model": {"config": fields, "train_tokenizer_vocab_size": fields["vocab_size"]},
        "data": {"train": "unused.jsonl", "max_length": case.row, "packing": False},
        "optimizer": {"learning_rate": LEARNING_RATE},
        "training": {"output_dir": "unused", "max_steps": 1, "micro_batch_size": max(1, case.tokens // case.row)},
        "sharding": {"strategy": "zero3", "activation_checkpointing": 1 if case.has("checkpointing") else None},
    }
    found = plan(Recipe.model_validate(values), hardware, mixed_precision="bf16", offload=case.has("offload"))
    return found.asked.peak.total


def measure(case: Case, steps: int) -> dict[str, Any]:
    from accelerate import Accelerator

    from toolkit.planning.hardware import peak_flops_of
    from toolkit.sharding import Checkpointing, sharding_kwargs
    from toolkit.sharding.plugin import reset_accelerate
    from toolkit.training.usage import peak_device_bytes

    plugins: dict[str, Any] = sharding_kwargs(
        "zero3",
        checkpointing=Checkpointing(1) if case.has("checkpointing") else None,
        offload="optimizer" if case.has("offload") else "none",
    )
    accelerator = Accelerator(mixed_precision="bf16", **plugins)
    device = accelerator.device
    try:
        model: Any = build(case)
        plugins["fsdp_plugin"].load_weights = loader_of(model)
        planned = planned_bytes(case)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer: Any = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        inner = model.get_base_model() if case.training == "lora" else model
        source = batches(case, device)

        def step() -> torch.Tensor:
            loss = loss_of(case, model, inner, next(source))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        warming = seconds_of(step, 3, device)
        seconds = seconds_of(step, steps, device) / steps
        loss = float(step())
        tokens_per_second = max(1, case.tokens // case.row) * case.row / seconds
        peak = peak_flops_of(torch.cuda.get_device_name(), "bf16") if device.type == "cuda" else None
        return {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "step_seconds": round(seconds, 4),
            "warm_up_seconds": round(warming, 2),
            "tokens_per_second": round(tokens_per_second, 1),
            "mfu": round(tokens_per_second * flops_per_token(case, model) / peak, 4) if peak else None,
            "peak_device_bytes": peak_device_bytes(device) or None,
            "planned_device_bytes": planned,
            "loss": round(loss, 4),
        }
    finally:
        plugins["fsdp_plugin"].close()
        accelerator.free_memory()
        torch.distributed.destroy_process_group()
        reset_accelerate()


def seconds_of(step: Any, steps: int, device: torch.device) -> float:
    handle: Any = getattr(torch, device.type)
    handle.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    handle.synchronize()
    return time.perf_counter() - started


def attempt(case: Case, steps: int) -> dict[str, Any]:
    """The case's figures, or why there are none; what it held is freed."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return measure(case, steps)
    except Exception as error:  # the next case may still run
        lines = str(error).strip().splitlines()
        return {"left_out": f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]}
    finally:
        gc.collect()
        torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def table(records: list[dict[str, Any]]) -> None:
    rows = []
    for row in records:
        name = f"{row['model']} {row['training']}, {row['tokens_per_step']:,} tokens: {row['levers']}"
        if "left_out" in row:
            rows.append([f"{name} ({row['left_out']})"])
            continue
        peak, planned = (row[key] and row[key] / 2**30 for key in ("peak_device_bytes", "planned_device_bytes"))
        mfu = None if row["mfu"] is None else f"{row['mfu']:.1%}"
        rows.append([name, row["step_seconds"], row["tokens_per_second"], mfu, peak, planned])
    show("One device, bf16", ["", "step s", "tokens / s", "MFU", "peak GiB", "planned GiB"], rows)
    best = max(
        (row["mfu"] or 0.0 for row in records if row["tokens_per_step"] >= TARGET_TOKENS and "mfu" in row), default=0.0
    )
    if best:
        print(f"best MFU {best:.1%} at {TARGET_TOKENS:,} tokens and more; wanted on one H200: {TARGET_MFU:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1b", "3b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 32768], help="of a step")
    parser.add_argument("--training", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--levers", nargs="+", choices=list(LEVERS), default=list(LEVERS))
    parser.add_argument("--steps", type=int, default=6, help="that are timed")
    parser.add_argument("--seconds", type=float, default=480, help="no case is started after that")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, of which the speed says nothing")
    parser.add_argument("--output", type=Path, help="file to which lines of JSON are added")
    options = parser.parse_args()
    if options.tiny:
        options.sizes, options.tokens, options.steps = ["tiny"], [64], 2
    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    until = time.monotonic() + options.seconds
    told, records = facts("peft"), []
    for tokens, size, training, levers in itertools.product(
        options.tokens, options.sizes, options.training, options.levers
    ):
        case = Case(size, training, levers, tokens)
        found = attempt(case, options.steps) if time.monotonic() < until else {"left_out": "no time left"}
        named = {"model": size, "training": training, "levers": levers, "tokens_per_step": tokens}
        records.append({**told, **named, **found})
        tell(records[-1], options.output)
    table(records)


if __name__ == "__main__":
    main()
