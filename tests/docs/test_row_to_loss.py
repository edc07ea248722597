"""docs/row_to_loss.md is as its script writes it, its loss is a plain loop's, and it names every key of a batch."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from support.tiny import objective_of
from transformers import AutoTokenizer

from toolkit.data.kinds.registry import rows_of
from toolkit.recipe.objectives.registry import SPECS
from toolkit.recipe.schema import DataSection

pytestmark = pytest.mark.first

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "row_to_loss.py"))
TEXT = (DOCS / "row_to_loss.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    assert SCRIPT["page"]() == TEXT, "run python docs/row_to_loss.py"


def test_its_mean_is_that_of_each_row_alone_by_hand() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SCRIPT["TOKENIZER"])
    model = SCRIPT["small_model"](len(tokenizer))
    losses = []
    for line in SCRIPT["columns"]().splitlines():
        question, answer = json.loads(line)["messages"]
        asked = f"<|im_start|>user\n{question['content']}<|im_end|>\n<|im_start|>assistant\n"
        prompt, learned = tokenizer(asked)["input_ids"], tokenizer(f"{answer['content']}<|im_end|>")["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + learned])).logits[0].log_softmax(dim=-1)
        losses += [-logits[len(prompt) - 1 + at, token].item() for at, token in enumerate(learned)]
    assert f"{sum(losses):.3f} / {len(losses)} = **{sum(losses) / len(losses):.3f}**" in " ".join(TEXT.split())


def test_it_names_each_key_of_a_batch() -> None:
    data = DataSection(train=[{"path": "-"}], max_length=8)  # type: ignore[list-item]
    keys = {key for kind in SPECS for key in rows_of(data, objective_of(kind)).batch}
    added = {"counted", "shared", "bounds", "longest", "ends", "here", "learned", "positions_of_axes"}
    missing = [key for key in sorted(keys | added) if f"`{key}`" not in TEXT and not key.startswith("kl_")]
    assert not missing
