"""Text rows on every type of transformers that reads more than text: the plain loop's steps, exported as it was saved.

The plain loop runs transformers' whole model, row by row; what has no gradient there is what text does not reach.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.every_multimodal import REFUSED, UNTRIED, multimodal_kinds, save_small
from support.peft_by_hand import adapted
from support.ranks import meet, run_on_ranks
from support.tiny import recipe_values
from transformers import AutoModelForMultimodalLM, AutoTokenizer

STEPS, ROWS, RATE, NUM_BATCHES = 3, 4, 0.1, 12
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "then",
    "it",
    "went",
    "away",
    "from",
    "all",
    "of",
    "us",
    "for",
    "good",
]
TEXTS = [" ".join(WORDS[(5 * i + j) % len(WORDS)] for j in range(2 + i % 7)) for i in range(STEPS * ROWS)]
OPTIMIZER = {"beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0, "eps": 10.0}
"""An update is nearly 0.01 times the gradient, so that weights tell gradients of any size."""
CASES = {"full": {}, "lora": {"kind": "lora", "r": 2, "target_modules": "all-linear"}}
KINDS = [kind for kind in multimodal_kinds() if kind not in UNTRIED]


def run(folder: Path, kind: str, case: str) -> list[float] | str:
    """The losses, or what was said."""
    from toolkit import Recipe, finetune
    from toolkit.errors import BadInputError

    out = folder / f"{kind}-{case}"
    values = recipe_values(folder / kind, folder / "rows.jsonl", out, folder / "cache")
    values["data"] |= {"max_length": 64, "packing": False}
    values["adapter"] = CASES[case]
    values["objective"] = {"kind": "causal_lm", "router_aux_coef": 0.0}
    values["optimizer"] = {"learning_rate": RATE, **OPTIMIZER}
    values["schedule"] = {"kind": "constant"}
    values["training"] = {"output_dir": str(out), "max_steps": STEPS, "micro_batch_size": 2, "max_grad_norm": None}
    values["training"]["seed"] = 3
    try:
        result = finetune(Recipe.from_mapping(values))
    except BadInputError as error:
        return f"refused: {error}"
    except Exception as error:  # the next types are tried all the same
        return f"crashed: {type(error).__name__}: {error}"
    return [record["loss"] for record in result.metrics if record["split"] == "train"]


def runs(folder: Path, kinds: list[str]) -> dict[tuple[str, str], list[float] | str]:
    found = {}
    for kind in kinds:
        for case in CASES:
            meet()
            found[kind, case] = run(folder, kind, case)
    return found


def plain_loop(model: Any, folder: Path) -> list[float]:
    """Trains the model; what no row has reached has no gradient, and stays."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    betas = (OPTIMIZER["beta1"], OPTIMIZER["beta2"])
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=betas, weight_decay=0.0, eps=OPTIMIZER["eps"])
    losses = []
    for step in range(STEPS):
        rows = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in TEXTS[step * ROWS :][:ROWS]]
        count, total = sum(len(row) - 1 for row in rows), 0.0
        for row in rows:
            ids = torch.tensor([row])
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            loss = F.cross_entropy(logits, ids[0, 1:], reduction="sum") / count
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def wrong_in_full(folder: Path, kind: str, losses: list[float]) -> list[str]:
    base, out = tensors_of(folder / kind), folder / f"{kind}-full"
    exported = tensors_of(out / "export")
    model = AutoModelForMultimodalLM.from_pretrained(folder / kind, dtype=torch.float32)
    expected = plain_loop(model, folder / kind)
    model.save_pretrained(out / "plain")
    plain = tensors_of(out / "plain")
    if {n: (t.shape, t.dtype) for n, t in base.items()} != {n: (t.shape, t.dtype) for n, t in exported.items()}:
        return [f"names: without {sorted(base.keys() - exported)[:3]}, with {sorted(exported.keys() - base)[:3]}"]
    wrong = [] if losses == pytest.approx(expected, rel=1e-6) else [f"losses {losses} instead of {expected}"]
    changed = {name for name in base if not torch.equal(base[name], exported[name])}
    reached = {name for name in base if not torch.equal(base[name], plain[name])}
    if changed != reached:
        wrong.append(f"not trained {sorted(reached - changed)[:3]}, trained {sorted(changed - reached)[:3]}")
    largest = max((plain[name] - base[name]).abs().max().item() for name in reached)
    off = {name: (plain[name] - exported[name]).abs().max().item() / largest for name in reached}
    name = max(off, key=lambda name: off[name])
    return wrong + ([] if off[name] < 1e-4 else [f"{name} is off by {off[name]:.1e} of the largest change"])


def wrong_in_lora(folder: Path, kind: str, losses: list[float]) -> list[str]:
    export = folder / f"{kind}-lora/export"
    found = tensors_of(export)
    settings = json.loads((export / "adapter_config.json").read_text())
    idle = [name for name, tensor in found.items() if ".lora_B" in name and not tensor.any()]
    wrong = [f"no gradient for {len(idle)}, {idle[0]}"] if idle else []
    if settings["target_parameters"]:
        return wrong  # experts' adapters are drawn by expert
    base = AutoModelForMultimodalLM.from_pretrained(folder / kind, dtype=torch.float32)
    given = {key: settings[key] for key in ("r", "lora_alpha", "target_modules", "exclude_modules")}
    model = adapted(base, given)
    expected = plain_loop(model, folder / kind)
    if losses != pytest.approx(expected, rel=1e-6):
        wrong.append(f"losses {losses} instead of {expected}")
    return wrong


def judged(folder: Path, kind: str, found: dict[str, list[float] | str]) -> list[str]:
    """What is wrong with a type."""
    wrong = []
    for case, check in (("full", wrong_in_full), ("lora", wrong_in_lora)):
        losses = found[case]
        if isinstance(losses, list):
            wrong += [f"{case}: {each}" for each in check(folder, kind, losses)]
        elif kind not in REFUSED or REFUSED[kind] not in losses:
            wrong.append(f"{case} {losses}")
    if kind in REFUSED and isinstance(found["full"], list):
        wrong.append("not refused")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_text_rows_train_every_type_as_a_plain_loop_does(batch: int, tmp_path: Path) -> None:
    kinds = KINDS[batch::NUM_BATCHES]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for kind in kinds:
        save_small(kind, tmp_path / kind, TEXTS)
    found = run_on_ranks(runs, 2, tmp_path, kinds, seconds=900)[0]
    torch.set_num_threads(1)
    wrong = {kind: judged(tmp_path, kind, {case: found[kind, case] for case in CASES}) for kind in kinds}
    assert not any(wrong.values()), "\n".join(f"{kind}: {'; '.join(each)}" for kind, each in wrong.items() if each)
