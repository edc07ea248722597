"""Each row of docs/rows.md and docs/reasoning.md is read as a run would, and what the page says of it is learned."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.chat_templates import QWEN_25, QWEN_35, tokenizer_for
from transformers import PreTrainedTokenizerBase

from toolkit.data.build import TokenisedData, build
from toolkit.data.tokens.tokenizer import load
from toolkit.recipe.recipe import Recipe

pytestmark = pytest.mark.first

ROOT = Path(__file__).parents[2]
PAGE = "\n".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("rows.md", "reasoning.md"))
ROW = re.compile(r"<!-- row: (.+?) -->\n\n```json\n(.+)\n```\n*(Learned: .*)?")
ROWS = [(kind, line, told) for kinds, line, told in ROW.findall(PAGE) for kind in kinds.split(", ")]


def read(kind: str, line: str, folder: Path) -> tuple[TokenisedData, PreTrainedTokenizerBase]:
    """What a run makes of ten such rows; labels need two that differ."""
    rows = [line] * 9 + [line.replace('"good"', '"bad"').replace('"label": false', '"label": true')]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    Image.new("RGB", (32, 32), "red").save(folder / "red.png")
    values: dict[str, Any] = {
        "model": {"config": {"model_type": "llama"}, "tokenizer": str(folder / "tokenizer")},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 1024, "cache_dir": str(folder / "cache")},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"output_dir": str(folder / "run"), "max_steps": 1},
    }
    if kind == "images":
        recipe = Recipe.load("vision", {"data.train": str(folder / "rows.jsonl"), "data.cache_dir": str(folder)})
    else:
        template = QWEN_35 if "reasoning" in line else QWEN_25
        tokenizer_for(template).save_pretrained(folder / "tokenizer")
        recipe = Recipe.from_mapping(values | {"objective": {"kind": kind}})
    tokenizer = load(recipe.model, recipe.data)
    return build(recipe.data, tokenizer, 0, recipe.objective), tokenizer


@pytest.mark.parametrize(("kind", "line", "told"), ROWS, ids=[f"{kind} {line[2:14]}" for kind, line, _ in ROWS])
def test_a_row_of_the_page_is_read(kind: str, line: str, told: str, tmp_path: Path) -> None:
    json.loads(line)
    data, tokenizer = read(kind, line, tmp_path)
    counts = data.report.to_dict()["train"]
    assert (counts["read"], counts["kept"]) == (10, 10), counts
    if kind != "causal_lm":
        return
    ids, targets = next(iter(data.train.tokens(0)))  # type: ignore[attr-defined]
    learned = "".join(
        tokenizer.decode([token]) if is_target else "\0" for token, is_target in zip(ids, targets, strict=True)
    )
    spans = [span.strip() for span in learned.split("\0") if span.strip()]
    if quoted := re.findall(r"`(.+?)`", told or ""):
        assert spans == quoted
    elif "tool_calls" in line:
        call, answer = spans
        assert '{"name": "weather", "arguments": {"city": "Oslo"}}' in call
        assert answer == "It is 4 degrees.<|im_end|>"
        assert "4 degrees\n" in tokenizer.decode(ids), "the result is read"
    elif "reasoning_content" in line:
        assert spans == ["17 times 3 is 51.\n</think>\n\n51<|im_end|>"], "behind the prompt of inference"
    else:
        raise AssertionError("the page does not say what is learned of this row")


def test_every_layout_has_a_row() -> None:
    assert {kind for kind, *_ in ROWS} >= {
        "causal_lm",
        "preference",
        "reward",
        "kto",
        "sequence_classification",
        "token_classification",
        "seq2seq",
        "images",
    }
    assert PAGE.count("```json") == len(ROW.findall(PAGE)), "a line that no test reads"
