"""Preference tuning: the run is a plain loop with one forward for each completion, packed and on several ranks."""

from __future__ import annotations

import copy
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.peft_by_hand import adapted
from support.ranks import meet, run_on_ranks
from support.texts import make_texts
from support.tiny import recipe_values, save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS, PAIRS_PER_STEP, BETA, SEED = 5, 8, 0.3, 2
TEXTS = make_texts(90, seed=3)
PAIRS = [
    {
        "prompt": " ".join(TEXTS[i].split()[:3]),
        "chosen": " " + " ".join(TEXTS[i + 30].split()[: 2 + i % 5]),
        "rejected": " " + " ".join(TEXTS[i + 60].split()[: 1 + i % 4]),
    }
    for i in range(30)
]
SIDES = ("chosen", "rejected")
ADAPTER = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear", "modules_to_save": ["norm"]}
CASES = {"full": None, "lora": {"kind": "lora", "r": 2, "modules_to_save": ["norm"]}}

SHARED = {"shared": "full", "lora-shared": "lora"}
"""Runs whose rows 2 ranks share, and the cases that they are."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preference")
    save_llama(folder / "model", make_texts(60), tied=True)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    (folder / "bad.jsonl").write_text(
        "".join(json.dumps(pair) + "\n" for pair in PAIRS[:5])
        + json.dumps({"prompt": "a", "chosen": " b"})
        + "\n"
        + json.dumps({"prompt": "a", "chosen": " b", "rejected": " b"})
        + "\n"
    )
    (folder / "no_rejected.jsonl").write_text(json.dumps({"prompt": "a", "chosen": " b"}) + "\n")
    return folder


def log_probability(model: Any, tokenizer: Any, prompt: str, completion: str) -> torch.Tensor:
    asked = tokenizer(prompt)["input_ids"]
    ids = torch.tensor([tokenizer(prompt + completion)["input_ids"] + [tokenizer.eos_token_id]])
    assert ids[0, : len(asked)].tolist() == asked
    each = -F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none")
    return each[len(asked) - 1 :].sum()


def plain_loop(folder: Path, case: str) -> dict[str, Any]:
    """DPO as its paper writes it, pair by pair, against a copy of the model."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    reference = copy.deepcopy(base)
    model = adapted(base, ADAPTER, SEED) if case == "lora" else base
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0, foreach=False)
    losses, margins = [], []
    for step in range(STEPS):
        batch = [PAIRS[(step * PAIRS_PER_STEP + i) % len(PAIRS)] for i in range(PAIRS_PER_STEP)]
        total = 0.0
        for pair in batch:
            with torch.no_grad():
                of_reference = [
                    log_probability(reference, tokenizer, pair["prompt"], pair[s]) for s in ("chosen", "rejected")
                ]
            chosen, rejected = (
                log_probability(model, tokenizer, pair["prompt"], pair[s]) for s in ("chosen", "rejected")
            )
            margin = BETA * ((chosen - of_reference[0]) - (rejected - of_reference[1]))
            loss = -F.logsigmoid(margin) / PAIRS_PER_STEP
            loss.backward()
            total += loss.item()
            margins.append(margin.item())
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {"loss": losses, "margins": margins}


def runs(folder: Path) -> dict[str, Any]:
    from toolkit import Recipe, finetune
    from toolkit.errors import ToolkitError

    ranks = int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {}

    def run(
        name: str, adapter: Any, data: dict[str, Any], objective: dict[str, Any], sequence: int = 1, **training: Any
    ) -> None:
        meet()
        values = recipe_values(
            folder / "model", folder / "pairs.jsonl", folder / f"{name}-{ranks}", folder / f"c-{ranks}"
        )
        values["data"] |= {"max_length": 64, **data}
        values["objective"] = {"kind": "preference", **objective}
        values["optimizer"] = {"learning_rate": 3e-3, "weight_decay": 0.0}
        values["schedule"] = {"kind": "constant"}
        values["training"] |= {"max_steps": STEPS, "seed": SEED, **training}
        values["sharding"] = {"sequence": sequence}
        if adapter is not None:
            values["adapter"] = adapter
        try:
            found[name] = finetune(Recipe.from_mapping(values)).metrics
        except ToolkitError as error:
            found[name] = (str(error), error.exit_code)

    # Unpacked, a step holds the pairs of the plain loop; packed, as many as fit.
    size = {"micro_batch_size": 4 // ranks, "gradient_accumulation_steps": 2}
    for case, adapter in CASES.items():
        run(case, adapter, {"packing": False}, {"beta": BETA}, **size)
    if ranks == 2:
        apart = {"packing": False, "cache_dir": str(folder / "c-shared")}  # so that it makes its own reference
        for name, case in SHARED.items():
            run(name, CASES[case], apart, {"beta": BETA}, 2, micro_batch_size=4, gradient_accumulation_steps=2)
    kept = list((folder / f"c-{ranks}").glob("reference-*/*.npy"))
    for steps in (1, 2):
        run(f"steps-{steps}", None, {"packing": False}, {"beta": BETA}, **size, max_steps=steps, seed=SEED + 1)
        [path] = [path for path in (folder / f"c-{ranks}").glob("reference-*/*.npy") if path not in kept]
        found[f"known-{steps}"] = np.load(path)
    for loss in ("ipo", "simpo", "orpo"):
        validation = {"validation": str(folder / "pairs.jsonl")}
        run(loss, CASES["lora"], validation, {"loss": loss}, micro_batch_size=2)
    run("packed", None, {"validation": str(folder / "pairs.jsonl")}, {"beta": BETA}, micro_batch_size=2)
    run("bad", CASES["lora"], {"train": str(folder / "bad.jsonl"), "max_dropped_fraction": 1.0}, {}, micro_batch_size=1)
    run("none", CASES["lora"], {"train": str(folder / "no_rejected.jsonl")}, {})
    return found


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    return {case: plain_loop(folder, case) for case in CASES}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.grid), 2])
def test_the_run_is_the_plain_loop(ranks: int, folder: Path, plain: dict[str, Any]) -> None:
    found = run_on_ranks(runs, ranks, folder)[0]
    plain = {**plain, **{name: plain[case] for name, case in SHARED.items()}}
    for case in (*CASES, *(SHARED if ranks == 2 else ())):
        losses = [record["loss"] for record in found[case] if record["split"] == "train"]
        assert losses == pytest.approx(plain[case]["loss"], rel=1e-5), case
        assert losses[0] == pytest.approx(math.log(2), rel=1e-5), "at first the model is its own reference"
        assert losses[-1] < losses[0]
        margins = [record["margin"] for record in found[case] if record["split"] == "train"]
        of_pairs = plain[case]["margins"]
        expected = [
            sum(of_pairs[i : i + PAIRS_PER_STEP]) / PAIRS_PER_STEP for i in range(0, len(of_pairs), PAIRS_PER_STEP)
        ]
        assert margins == pytest.approx(expected, rel=1e-4, abs=1e-6), case
        for record in found[case]:
            assert record["chosen_reward"] - record["rejected_reward"] == pytest.approx(record["margin"], abs=1e-6)
            assert (record["pairs"], record["pairs_per_second"] > 0) == (PAIRS_PER_STEP * record["step"], True)
            assert "target_tokens" not in record, "what is counted are pairs"
    first, second = (found[f"known-{steps}"] for steps in (1, 2))
    reached = ~np.isnan(first).any(axis=1)
    assert (reached.sum(), (~np.isnan(second)).all(axis=1).sum()) == (8, 16), "the rows that the run comes to"
    assert (first[reached] == second[reached]).all(), "and those that are known stay"
    for loss in ("ipo", "simpo", "orpo", "packed"):
        first, last = (record for record in found[loss] if record["split"] == "eval")
        assert first["pairs"] == last["pairs"] == len(PAIRS), "each pair once"
        assert last["loss"] < first["loss"], loss
        assert last["margin"] > first["margin"], loss
        assert ("kl" in last) == (loss in ("ipo", "packed"))
    assert found["packed"][0]["kl"] == pytest.approx(0.0, abs=1e-5)
    report = json.loads((folder / f"packed-{ranks}/data_report.json").read_text())["train"]
    assert report["samples"] < len(PAIRS), "pairs share samples"
    bad = json.loads((folder / f"bad-{ranks}/data_report.json").read_text())["train"]["dropped"]
    assert bad == {
        "rejected is missing or null": {"count": 1, "rows": ["bad.jsonl:6"]},
        "chosen and rejected are the same": {"count": 1, "rows": ["bad.jsonl:7"]},
    }
    text, exit_code = found["none"]
    assert exit_code == 2
    assert (
        "'no_rejected.jsonl' matches no known column layout; it has chosen, prompt; needed: chosen + rejected" in text
    )


def test_the_recipes_settings_are_the_losses() -> None:
    from toolkit.objectives.losses.preference_losses import LOSSES
    from toolkit.recipe.objectives.preference import SETTINGS_OF_LOSSES

    assert {name: tuple(loss.defaults) for name, loss in LOSSES.items()} == SETTINGS_OF_LOSSES
