"""The shipped recipes end in right answers on held-out rows, by the commands of docs/getting_started.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launches import clean_environment
from support.runs import records_of

DATA = Path(__file__).parents[2] / "recipes/data"
SCORED = {
    "quickstart": {"requests": 0.95, "preferences": 0.0},
    "dpo": {"preferences": 0.9, "requests": 0.9},
    "kto": {"preferences": 0.9, "requests": 0.9},
    "grpo": {"preferences": 0.9, "requests": 0.9},
    "lora": {"skills": 0.95, "requests": 0.9},
    "qlora": {"skills": 0.95, "requests": 0.9},
    "vision": {"shapes": 0.9, "outlines": 0.0},
    "vision_dpo": {"outlines": 0.75, "shapes": 0.8},
}
"""Recipe -> held-out file -> the least share of right answers."""


def accuracy(source: str, rows: str, folder: Path) -> float:
    told = toolkit(folder, "generate", source, "--eval", str(DATA / f"{rows}_held_out.jsonl"), "--json")
    return float(json.loads(told)["accuracy"])


def toolkit(folder: Path, *arguments: str) -> str:
    environment = clean_environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run(["toolkit", *arguments], cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.grid
def test_the_recipes_end_in_right_answers(tmp_path: Path) -> None:
    found: dict[str, dict[str, float]] = {}
    for recipe, files in SCORED.items():
        toolkit(tmp_path, "train", recipe, "--cpu", "2")
        found[recipe] = {rows: accuracy(f"outputs/{recipe}/export", rows, tmp_path) for rows in files}
    print(found)
    assert accuracy("outputs/quickstart/export", "skills", tmp_path) == 0
    assert found["quickstart"]["preferences"] < 0.6, "it guesses, so that there is something to prefer"
    assert found["vision"]["outlines"] < 0.6, "as it has seen filled shapes alone"
    low = {
        (recipe, rows): found[recipe][rows]
        for recipe, files in SCORED.items()
        for rows, least in files.items()
        if found[recipe][rows] < least
    }
    assert not low

    toolkit(tmp_path, "train", "reward", "--cpu", "2")
    records = records_of(tmp_path / "outputs/reward")
    assert [record for record in records if record["split"] == "eval"][-1]["accuracy"] >= 0.95
