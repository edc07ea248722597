"""The card of an export and its curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import imread

from toolkit.pages.card import draw_losses, write_card
from toolkit.recipe.recipe import Recipe

METRICS: list[dict[str, Any]] = [
    {"split": "eval", "step": 0, "loss": 5.0},
    {"split": "train", "step": 1, "loss": 4.5},
    {"split": "train", "step": 2, "loss": None},
    {"split": "train", "step": 3, "loss": 3.5},
    {"split": "eval", "step": 3, "loss": 3.25},
]


def test_the_curve_goes_through_the_losses() -> None:
    axes = Figure().add_subplot()
    draw_losses(axes, METRICS)
    drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in axes.get_lines()}
    assert drawn == {"training": [[1, 4.5], [3, 3.5]], "held out": [[0, 5.0], [3, 3.25]]}


def test_the_card_is_written_with_its_curve(tmp_path: Path) -> None:
    write_card(tmp_path, Recipe.load("quickstart"), {"model": "a llama"}, METRICS, {}, {"torch": "2"})
    assert "![Loss over the optimizer steps](curve.png)" in (tmp_path / "README.md").read_text()
    picture = imread(tmp_path / "curve.png")
    assert picture.shape[:2] == (384, 840)
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 10, "nothing is drawn"
