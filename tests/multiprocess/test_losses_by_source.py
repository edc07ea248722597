"""Named sources: their losses, while training and held out, are those of transformers' model on each row alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_on_ranks
from support.runs import finetuned
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = [text[: 40 + 17 * (i % 5)] for i, text in enumerate(make_texts(18))]
ROWS = {"a": TEXTS[:5], "b": TEXTS[5:9], "c": TEXTS[9:12], "held_a": TEXTS[12:15], "held_b": TEXTS[15:18]}
"""File -> its rows. `c` has no name of its own in the recipe."""

CASES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "by block": {"sharding": {"accumulate": "by_block"}},
    "shared rows": {"sharding": {"sequence": 2}, "training": {"gradient_accumulation_steps": 12}},
    "ddp": {"sharding": {"strategy": "ddp"}},
    "packed": {"data": {"packing": True}},
    "offload": {"sharding": {"offload": "optimizer"}},
}


def records_of(folder: str) -> dict[str, list[dict[str, Any]]]:
    """By case, the records of a run of one step over all rows."""

    home, found = Path(folder), {}
    for case, changes in CASES.items():
        values = recipe_values(home / "model", home / "a.jsonl", home / case, home / "cache", max_steps=1)
        train = [{"path": str(home / f"{name}.jsonl"), "name": name} for name in "ab"]
        held_out = [{"path": str(home / f"held_{name}.jsonl"), "name": name} for name in ("a", "b")]
        data = {"train": [*train, str(home / "c.jsonl")], "validation": held_out, "max_length": 64, "packing": False}
        values["data"] |= data | changes.get("data", {})
        values["sharding"] = {"strategy": "zero3", **changes.get("sharding", {})}
        values["training"] |= {"micro_batch_size": 1, "gradient_accumulation_steps": 6, **changes.get("training", {})}
        values["export"] = {"enabled": False}
        found[case] = finetuned(values).metrics
    return found


def expected(folder: Path) -> dict[str, tuple[float, int]]:
    """By file, the summed loss and the number of targets, each row alone in transformers' own model."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    found = {}
    for name, texts in ROWS.items():
        total, targets = 0.0, 0
        for text in texts:
            ids = torch.tensor([[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]])
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, :-1].double()
            total += float(F.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            targets += ids.shape[1] - 1
        found[name] = (total, targets)
    return found


def test_losses_by_source(tmp_path: Path) -> None:
    save_llama(tmp_path / "model", TEXTS, tied=True)
    for name, texts in ROWS.items():
        write_rows(tmp_path / f"{name}.jsonl", ({"text": text} for text in texts))
    sums = expected(tmp_path)
    mean = {name: loss / targets for name, (loss, targets) in sums.items()}
    whole = {
        prefix: sum(sums[prefix + name][0] for name in names) / sum(sums[prefix + name][1] for name in names)
        for prefix, names in (("", "abc"), ("held_", "ab"))
    }
    assert len(set(mean.values())) == len(mean), "no two are alike"
    for found in run_on_ranks(records_of, 2, str(tmp_path)):
        for case, records in found.items():
            before = next(record for record in records if record["split"] == "eval")
            assert before["loss"] == pytest.approx(whole["held_"], rel=1e-6), case
            assert {key: before[key] for key in before if key.startswith("loss/")} == {
                "loss/a": pytest.approx(mean["held_a"], rel=1e-6),
                "loss/b": pytest.approx(mean["held_b"], rel=1e-6),
            }, case
            if case == "packed":  # its step is a part of the rows
                continue
            step = next(record for record in records if record["split"] == "train")
            assert step["loss"] == pytest.approx(whole[""], rel=1e-6), case
            assert {key: step[key] for key in step if key.startswith("loss/")} == {
                "loss/a": pytest.approx(mean["a"], rel=1e-6),
                "loss/b": pytest.approx(mean["b"], rel=1e-6),
            }, case
