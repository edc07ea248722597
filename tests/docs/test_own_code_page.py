"""docs/own_code.md: the code on the page runs as it stands, in one run on two sharded ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_on_ranks
from support.runs import records_of
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama

PAGE = Path(__file__).parents[2] / "docs/own_code.md"


def code_of_the_page() -> str:
    return "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))


def run(folder: Path) -> None:
    import toolkit

    values: dict[str, Any] = recipe_values(
        folder / "model", folder / "rows.jsonl", folder / "run", folder / "cache", max_steps=4
    )
    values["data"] |= {"map": f"{folder}/mine.py:to_chat", "validation_fraction": 0.2, "max_length": 64}
    values["objective"] = {"loss": f"{folder}/mine.py:each_row_alike"}
    values["training"] |= {"extensions": [f"{folder}/mine.py:Meter"], "eval_every_steps": 2}
    values["sharding"] = {"strategy": "zero3"}
    toolkit.finetune(toolkit.Recipe.from_mapping(values))


@pytest.mark.slow
def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code_of_the_page())
    texts = make_texts(40)
    rows = [{"title": text[:15], "body": text[15:40], "summary": text[:30]} for text in texts]
    write_rows(tmp_path / "rows.jsonl", rows)
    save_llama(tmp_path / "model", texts, tied=False)
    run_on_ranks(run, 2, tmp_path)
    records = records_of(tmp_path / "run")
    steps, evaluations = ([r for r in records if r["split"] == split] for split in ("train", "eval"))
    assert [r["step"] for r in evaluations] == [0, 2, 4]
    assert all(0 <= r["token_accuracy"] <= 1 and r["cross_entropy"] > 0 for r in evaluations)
    assert all(r["weight_norm"] > 0 for r in steps)
    readme = (tmp_path / "run/export/README.md").read_text()
    for field in ("data.map mine.py:to_chat", "objective.loss mine.py:each_row_alike", "training.extensions.Meter"):
        assert field in readme
    # The norm of the whole weights, which are those of the export after the last step.
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/export")
    norm = sum(float((p.detach().double() ** 2).sum()) for p in model.parameters()) ** 0.5
    assert steps[-1]["weight_norm"] == pytest.approx(norm, rel=1e-5)
