"""Rows as well-known data sets and tools write them: what is learned of each, and what is said of every other key."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from support.cases import cases
from support.chat_templates import CHATML, QWEN_3, of_trl, tokenizer_for

from toolkit.data import build
from toolkit.errors import DataError
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import DataSection


@lru_cache
def tokenizer(template: str) -> Any:
    return tokenizer_for({"chatml": CHATML, "qwen3": of_trl("qwen3", QWEN_3)}[template])


def outcome(wild: dict[str, Any], folder: Path) -> tuple[str | None, list[str], str]:
    """What is learned, what is noted, and why nothing is."""
    (folder / "rows.jsonl").write_text(json.dumps(wild["row"]) + "\n")
    data = {"train": str(folder / "rows.jsonl"), "max_length": 512, "cache_dir": str(folder), "packing": False}
    section = ObjectiveSection(kind=wild.get("objective", "causal_lm"))
    tokens = tokenizer(wild.get("template", "chatml"))
    try:
        made = build.build(DataSection.model_validate(data | {"columns": wild.get("columns", {})}), tokens, 0, section)
    except DataError as error:
        return None, [], str(error)
    labels = torch.cat([made.train.batch([n])["labels"].flatten() for n in range(len(made.train))])
    return tokens.decode(labels[labels != -100]), sorted(made.report.to_dict()["train"].get("noted", {})), ""


def test_rows_of_the_wild(tmp_path: Path) -> None:
    for name, wild in cases(__file__).items():
        learned, noted, told = outcome(wild, tmp_path)
        assert (learned, noted) == (wild.get("learned"), wild.get("noted", [])), name
        assert wild.get("told", "") in told, name
        assert [bool(told), "told" in wild] == [learned is None, "learned" not in wild], "what is refused is told"
