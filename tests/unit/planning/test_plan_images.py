"""`toolkit plan` of recipes whose rows have images: micro-batches of these rows, and the parts that a run trains."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cases import cases
from support.sights import save_rows, save_seeing
from support.texts import make_texts
from support.tiny import recipe_values

from toolkit import finetune
from toolkit.errors import BadInputError
from toolkit.planning import check
from toolkit.planning.hardware import presets
from toolkit.planning.planner import Planner
from toolkit.planning.table import Plan, plan
from toolkit.planning.workload.workload import workload_of
from toolkit.recipe.recipe import Recipe

TABLES = cases(__file__)

TEXTS = [" ".join(text.split()[:4]) for text in make_texts(12, seed=4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan_images")
    save_seeing("llava", folder / "llava", TEXTS)
    save_rows(folder, TEXTS, [2, 0, 1] * 4)
    lines = [{"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": t}]} for t in TEXTS]
    (folder / "words.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def recipe(folder: Path, rows: str = "rows.jsonl", **sections: dict[str, Any]) -> Recipe:
    values = recipe_values(folder / "llava", folder / rows, folder / "run", folder / "cache", micro_batch_size=2)
    values["data"]["max_length"] = 64
    values["training"]["mixed_precision"] = "no"
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields}
    return Recipe.from_mapping(values)


def planned(asked: Recipe) -> Plan:
    return plan(asked, presets()["cpu"], 1, with_levers=False)


PARTS = {"language": 38048, "projector": 1600, "vision": 13488}
"""Parameters of each; see `test_the_parts_that_a_run_trains_are_planned`."""


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "sections", "trained"), TABLES["PARTS"])
def test_the_parts_that_a_run_trains_are_planned(
    rows: str, sections: dict[str, Any], trained: tuple[str, ...], folder: Path
) -> None:
    found = planned(recipe(folder, rows, **sections))
    assert found.num_parameters == sum(PARTS.values())
    assert found.num_trained == sum(PARTS[part] for part in trained)
    assert found.has_images == (rows == "rows.jsonl")


@pytest.mark.slow
def test_the_plan_is_that_of_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0))
    monkeypatch.setattr(check, "psutil", SimpleNamespace(Process=lambda: no_process))
    monkeypatch.setattr(check, "KERNEL_BYTES", 0)
    asked = recipe(folder, training={"max_steps": 1})
    found = finetune(asked)
    told = {record["planned_peak_bytes"] for record in found.metrics if record["split"] == "train"}
    row = planned(asked).asked
    assert told == {row.peak.total}
    words_alone = Planner(asked, workload_of(asked, "no"), presets()["cpu"])
    assert abs(words_alone.peak(row.setup).total / row.peak.total - 1) > 0.02, "what is seen holds something"


def test_rows_that_reach_no_tower_are_told(folder: Path) -> None:
    with pytest.raises(BadInputError, match=r"model.train: vision: rows without images reach the language model alone"):
        planned(recipe(folder, "words.jsonl", model={"train": ["vision"]}))


def test_what_images_exclude_is_refused_and_not_offered(folder: Path) -> None:
    with pytest.raises(BadInputError, match="rows with images"):
        planned(recipe(folder, training={"compile": True}))
