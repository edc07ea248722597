"""What transformers' whole model learns from rows of text, row by row, beside what a run made of it."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForMultimodalLM, AutoTokenizer

from support.four_bits import as_dequantised
from support.peft_by_hand import adapted
from support.plain_loop import plain_loop
from support.ranks import meet
from support.texts import write_rows
from support.tiny import recipe_values, with_sections

STEPS, ROWS, RATE = 3, 4, 0.1
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "went", "away", "from", "all", "of", "us"]
WORDS += ["for", "good"]
TEXTS = [" ".join(WORDS[(5 * i + j) % len(WORDS)] for j in range(2 + i % 7)) for i in range(STEPS * ROWS)]
OPTIMIZER = {"beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0, "eps": 10.0}
"""An update is nearly 0.01 times the gradient, so that weights tell gradients of any size."""


@dataclass(frozen=True)
class Case:
    """Something that a recipe asks for.

    Attributes:
        changes: to the recipe, by section.
        packed: whether rows share samples, all of them in each step; otherwise a step has the next `ROWS`.
        rate: the learning rate.
        looks: whether each step looks at what is held for frozen parameters.
    """

    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    packed: bool = False
    rate: float = RATE
    looks: bool = False


LORA = {"kind": "lora", "r": 2, "target_modules": "all-linear"}
BY_BLOCK = {"strategy": "zero3", "accumulate": "by_block", "activation_checkpointing": 1}
TWO_MICRO_BATCHES = {"micro_batch_size": 1, "gradient_accumulation_steps": 2}
CASES = {
    "full": Case(looks=True),
    # Zero at first, its second half learns at a hundredth of the rate of the other weights.
    "lora": Case({"adapter": LORA}, rate=100 * RATE, looks=True),
    "merged": Case({"adapter": LORA, "export": {"merge": True}}, rate=100 * RATE, looks=True),
    "packed": Case({"sharding": {"strategy": "zero3"}, "training": {"micro_batch_size": 1}}, packed=True),
    "by_block": Case({"sharding": BY_BLOCK, "training": TWO_MICRO_BATCHES}),
    "shared_rows": Case({"sharding": {"strategy": "zero3", "sequence": 2}, "training": TWO_MICRO_BATCHES}, packed=True),
    "experts": Case({"sharding": {"strategy": "zero3", "experts": 2}}),
    "nf4": Case({"adapter": {**LORA, "quantize": "nf4"}, "sharding": {"strategy": "zero3"}}),
}


Outcome = list[dict[str, Any]] | str
"""Of a run: the records of its steps, or what was said: `refused: ...` or `crashed: ...`."""


def write_texts(folder: Path) -> None:
    """The rows that every run reads."""
    write_rows(folder / "rows.jsonl", ({"text": text} for text in TEXTS))


def recipe_of(folder: Path, kind: str, name: str) -> dict[str, Any]:
    """A recipe of `STEPS` steps on two ranks, for the model in `folder / kind`."""
    case, out = CASES[name], folder / f"{kind}-{name}"
    values = recipe_values(folder / kind, folder / "rows.jsonl", out, folder / "cache")
    # Two samples hold all rows if they are packed: one for each rank, or one after another for both.
    max_length = sum(map(len, rows_of(folder / kind))) // 2 + 8
    values["data"] |= {"max_length": max_length} if case.packed else {"max_length": 64, "packing": False}
    values["objective"] = {"kind": "causal_lm", "router_aux_coef": 0.0}
    values["optimizer"] = {"learning_rate": case.rate, **OPTIMIZER}
    values["schedule"] = {"kind": "constant"}
    values["training"] = {"output_dir": str(out), "max_steps": STEPS, "micro_batch_size": 2, "max_grad_norm": None}
    values["training"]["seed"] = 3
    values["checkpoint"] = {"every_steps": STEPS}
    return with_sections(values, case.changes)


def bytes_beside_frozen(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of gradients of this process's frozen parameters, and of their state in the optimizer."""
    parameters = [each for each in gc.get_objects() if isinstance(each, nn.Parameter) and not each.is_meta]
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    state = [tensor for parameter in frozen for tensor in optimizer.state.get(parameter, {}).values()]
    return sum(tensor.nbytes for tensor in [*state, *(p.grad for p in frozen if p.grad is not None)])


def runs(folder: Path, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], Outcome]:
    """On every rank: by type and case, the records of the steps, or what was said."""
    from toolkit import Recipe, finetune
    from toolkit.errors import BadInputError

    found: dict[tuple[str, str], Outcome] = {}
    held: list[int] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if CASES[name].looks:
            held.append(bytes_beside_frozen(optimizer))

    register_optimizer_step_post_hook(look)
    for kind, name in pairs:
        meet()
        held.clear()
        try:
            result = finetune(Recipe.from_mapping(recipe_of(folder, kind, name)))
            assert held == [0] * STEPS * CASES[name].looks, f"{held} bytes for frozen parameters"
            found[kind, name] = [record for record in result.metrics if record["split"] == "train"]
        except BadInputError as error:
            found[kind, name] = f"refused: {error}"
        except Exception as error:  # the next types are tried all the same
            found[kind, name] = f"crashed: {type(error).__name__}: {error}"
    return found


def rows_of(folder: Path) -> list[list[int]]:
    """The texts in tokens of a model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in TEXTS]


def windows(folder: Path, records: list[dict[str, Any]]) -> list[list[list[int]]]:
    """The rows of each step: all, or the next ones, as many as have the targets that were counted."""
    rows, found, begin, before = rows_of(folder), [], 0, 0
    for record in records:
        counted, end = record["target_tokens"] - before, begin
        while end < len(rows) and sum(len(row) - 1 for row in rows[begin:end]) < counted:
            end += 1
        assert sum(len(row) - 1 for row in rows[begin:end]) == counted
        found.append(rows[begin:end])
        begin, before = end % len(rows), record["target_tokens"]
    return found


def trained_by_hand(model: Any, steps: list[list[list[int]]], rate: float = RATE) -> list[float]:
    """Trains the model; what no row has reached has no gradient, and stays."""

    def loss_of(rows: list[list[int]]) -> torch.Tensor:
        sums = []
        for ids in (torch.tensor([row]) for row in rows):
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            sums.append(F.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        return torch.stack(sums).sum() / sum(len(row) - 1 for row in rows)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    betas = (OPTIMIZER["beta1"], OPTIMIZER["beta2"])
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=betas, weight_decay=0.0, eps=OPTIMIZER["eps"])
    return plain_loop(model, steps, loss_of, max_norm=None, optimizer=optimizer).losses


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model's or an adapter's files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' whole model."""
    return AutoModelForMultimodalLM.from_pretrained(folder, dtype=dtype)


def wrong_in_full(folder: Path, kind: str, case: str, records: list[dict[str, Any]]) -> list[str]:
    """What differs between a run of all weights and the plain loop: losses, names, what was trained, and how far."""
    base, out = tensors_of(folder / kind), folder / f"{kind}-{case}"
    exported, losses = tensors_of(out / "export"), [record["loss"] for record in records]
    model = loaded(folder / kind)
    expected = trained_by_hand(model, windows(folder / kind, records))
    model.save_pretrained(out / "plain")
    plain = tensors_of(out / "plain")
    if {n: (t.shape, t.dtype) for n, t in base.items()} != {n: (t.shape, t.dtype) for n, t in exported.items()}:
        return [f"names: without {sorted(base.keys() - exported)[:3]}, with {sorted(exported.keys() - base)[:3]}"]
    wrong = [] if losses == pytest.approx(expected, rel=1e-6) else [f"losses {losses} instead of {expected}"]
    changed = {name for name in base if not torch.equal(base[name], exported[name])}
    reached = {name for name in base if not torch.equal(base[name], plain[name])}
    if changed != reached:
        wrong.append(f"not trained {sorted(reached - changed)[:3]}, trained {sorted(changed - reached)[:3]}")
    name, off = farthest(base, plain, exported, reached)
    if off >= 1e-4:  # the errors of both in float32 add up: the loop's alone is 7e-5 in Gemma 4's embeddings
        exact = loaded(folder / kind, torch.float64)
        trained_by_hand(exact, windows(folder / kind, records))
        exact.save_pretrained(out / "exact")
        name, off = farthest(base, tensors_of(out / "exact"), exported, reached)
    return wrong + ([] if off < 1e-4 else [f"{name} is off by {off:.1e} of the largest change"])


def farthest(
    base: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], exported: dict[str, torch.Tensor], names: set[str]
) -> tuple[str, float]:
    """The tensor that differs most from the plain loop's, and by which share of the largest change."""
    largest = max((plain[name] - base[name]).abs().max().item() for name in names)
    off = {name: (plain[name] - exported[name]).abs().max().item() / largest for name in names}
    name = max(off, key=lambda name: off[name])
    return name, off[name]


def wrong_in_lora(folder: Path, kind: str, case: str, records: list[dict[str, Any]]) -> list[str]:
    """What differs between a run of adapters and peft's own loop; of nf4 on weights that bitsandbytes dequantised."""
    export, losses = folder / f"{kind}-{case}/export", [record["loss"] for record in records]
    found = tensors_of(export)
    settings = json.loads((export / "adapter_config.json").read_text())
    idle = [name for name, tensor in found.items() if ".lora_B" in name and not tensor.any()]
    wrong = [f"no gradient for {len(idle)}, {idle[0]}"] if idle else []
    if settings["target_parameters"]:
        return wrong  # experts' adapters are drawn by expert
    base = loaded(folder / kind)
    if case == "nf4":
        how = json.loads((export / "base.json").read_text())["quantization"]
        as_dequantised(base, how["llm_int8_skip_modules"])
    model = adapted(base, {key: settings[key] for key in ("r", "lora_alpha", "target_modules", "exclude_modules")})
    expected = trained_by_hand(model, windows(folder / kind, records), CASES[case].rate)
    if losses != pytest.approx(expected, rel=1e-6):
        wrong.append(f"losses {losses} instead of {expected}")
    return wrong
