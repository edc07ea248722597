"""`toolkit verify` of rows with images: a right run passes, one whose images are mixed up is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.sights import save_all
from support.texts import make_texts
from support.tiny import recipe_values
from support.verified import run_in_this_process, save_launches

from toolkit.data.samples.image_samples import ImageSamples
from toolkit.data.samples.samples import Batch
from toolkit.recipe.recipe import Recipe
from toolkit.verify import FAILED, OK, Report, verify

TEXTS = [" ".join(text.split()[: 3 + i % 6]) for i, text in enumerate(make_texts(14, seed=4))]
# The second step has no image.
COUNTS = [1, 0, 2, 0, 0, 0, 0, 0, 0, 1, 1, 3, 0, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_all(tmp_path_factory.mktemp("verify-images"), ("llava", "idefics3"), TEXTS, COUNTS)
    save_launches(folder)
    return folder


def report_of(
    folder: Path, kind: str, tmp_path: Path, ranks: str, steps: int, train_all: bool = False, **data: Any
) -> Report:
    values = recipe_values(folder / kind, folder / "rows.jsonl", tmp_path / "out", tmp_path / "cache")
    values["data"] |= {"max_length": 128, "shuffle": False, **data}
    values["training"] |= {"micro_batch_size": 2, "gradient_accumulation_steps": 2}
    values["sharding"] = {"activation_checkpointing": 1}
    if kind == "idefics3" or train_all:
        values["model"]["train"] = ["language", "projector", "vision"]
    return verify(Recipe.from_mapping(values), folder / f"{ranks}.yaml", steps=steps)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_this_process(monkeypatch)


@pytest.mark.usefixtures("in_this_process")
def test_a_right_run_passes_and_one_that_mixes_up_images_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = report_of(folder, "llava", tmp_path, "one", steps=3, train_all=True, packing=False)
    assert report.verdict == OK, report
    told = next(row.note for row in report.rows if row.check == "gradients")
    assert "the model leaves out" in told, "the last layer of the tower"
    right = ImageSamples.batch

    def mixed_up(self: ImageSamples, numbers: Any) -> Batch:
        batch = right(self, numbers)
        return {**batch, "picture/pixel_values": batch["picture/pixel_values"].flip(0)}

    monkeypatch.setattr(ImageSamples, "batch", mixed_up)
    report = report_of(folder, "llava", tmp_path, "one", steps=1, packing=False)
    assert {row.check for row in report.rows if row.verdict == FAILED} >= {"gradient norm", "weights"}


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["llava", "idefics3"])
def test_packed_rows_on_two_ranks(kind: str, folder: Path, tmp_path: Path) -> None:
    report = report_of(folder, kind, tmp_path, "two", steps=2)
    assert report.verdict == OK, report
    rows = {row.check: row for row in report.rows}
    assert rows["loss"].found is not None
    assert rows["loss"].found <= 1e-6
    assert rows["packing"].verdict == OK
