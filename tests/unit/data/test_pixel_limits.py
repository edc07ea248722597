"""`data.min_pixels` and `data.max_pixels`: what a processor makes of an image, and what an export says of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from support.runs import losses_of
from support.sights import save_rows, save_seeing
from support.texts import make_texts
from support.tiny import recipe_values
from transformers import AutoProcessor, CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import is_torchvision_available

from toolkit import Recipe, finetune
from toolkit.data.images.pixel_limits import CONFIGURATIONS, PixelLimits
from toolkit.errors import BadInputError, ToolkitError

TOKEN = 28 * 28
"""Pixels that one token of Qwen2-VL stands for."""


def processor(**settings: Any) -> SimpleNamespace:
    return SimpleNamespace(image_processor=Qwen2VLImageProcessorPil(**settings))


def tokens(images: Any, side: int) -> int:
    """That stand for a square image."""
    grid = images(images=[Image.new("RGB", (side, side))], return_tensors="pt")["image_grid_thw"]
    return int(grid.prod()) // 4


@pytest.mark.parametrize(
    ("limits", "large", "small"),
    [
        (PixelLimits(), 25, 4),
        (PixelLimits(largest=9 * TOKEN), 9, 4),
        (PixelLimits(smallest=16 * TOKEN), 25, 16),
        (PixelLimits(4 * TOKEN, 4 * TOKEN), 4, 4),
    ],
)
def test_an_image_has_as_many_tokens_as_fit(limits: PixelLimits, large: int, small: int) -> None:
    made = processor()
    limits.apply(made, "it")
    assert (tokens(made.image_processor, 140), tokens(made.image_processor, 28)) == (large, small)


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        (PixelLimits(largest=783), r"data\.max_pixels=783 is less than one token stands for \(784 pixels\)"),
        (PixelLimits(largest=2 * TOKEN), r"data\.max_pixels: .* at least 3,136 and at most 1,568 .*data\.min_pixels"),
        (PixelLimits(smallest=10**9), r"data\.min_pixels: .*; set data\.max_pixels, too"),
    ],
)
def test_limits_that_cannot_be_kept(limits: PixelLimits, problem: str) -> None:
    made = processor(size={"shortest_edge": 3136 if limits.largest != 783 else 1, "longest_edge": 10**6})
    with pytest.raises(BadInputError, match=problem):
        limits.apply(made, "it")


def test_a_processor_of_one_size() -> None:
    made = SimpleNamespace(image_processor=CLIPImageProcessorPil())
    with pytest.raises(BadInputError, match=r"'it' \(CLIPImageProcessorPil\) does not scale images by their number"):
        PixelLimits(largest=9 * TOKEN).apply(made, "it")


@pytest.mark.parametrize(
    "given",
    [
        {"size": {"shortest_edge": 3136, "longest_edge": 10**6}},
        {"min_pixels": 3136, "max_pixels": 10**6},
        {"size": {"min_pixels": 3136, "max_pixels": 10**6}, "min_pixels": 3136, "max_pixels": 10**6},
    ],
)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_an_export_reads_images_as_training_did(given: dict[str, Any], name: str, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor

    content: dict[str, Any] = {"image_processor_type": "Qwen2VLImageProcessorPil", "patch_size": 14, **given}
    if name == "processor_config.json":
        content = {"processor_class": "Qwen2VLProcessor", "image_processor": content}
    (tmp_path / name).write_text(json.dumps(content))
    PixelLimits(largest=4 * TOKEN).write(tmp_path)
    read = AutoImageProcessor.from_pretrained(tmp_path)
    assert (tokens(read, 140), tokens(read, 28)) == (4, 4)
    assert read.size["shortest_edge"] == 3136


def test_limits_without_images_have_no_effect(tmp_path: Path) -> None:
    save_seeing("llava", tmp_path / "llava", make_texts(4, seed=1))
    rows = save_rows(tmp_path, make_texts(4, seed=1), [0, 0, 0, 0])
    values = recipe_values(tmp_path / "llava", rows, tmp_path / "run", tmp_path / "cache")
    values["data"] |= {"max_length": 64, "max_pixels": 9 * TOKEN}
    with pytest.raises(ToolkitError, match=r"data\.max_pixels has no effect: the model reads no image of the rows"):
        run(values)


def test_exchanged_limits() -> None:
    values = recipe_values(Path("m"), Path("a.jsonl"), Path("o"), Path("c"))
    values["data"] |= {"min_pixels": 9, "max_pixels": 4}
    with pytest.raises(ToolkitError, match=r"not possible with a smaller data\.max_pixels; exchange them"):
        Recipe.from_mapping(values)


@pytest.mark.skipif(not is_torchvision_available(), reason="needs torchvision")
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_run_with_limits_is_that_of_a_processor_that_has_them(adapter: str, tmp_path: Path) -> None:
    texts = [" ".join(text.split()[:6]) for text in make_texts(8, seed=4)]
    save_seeing("qwen2_5_vl", tmp_path / "model", texts)
    rows = save_rows(tmp_path, texts, [1, 0, 2, 0, 1, 0, 1, 2])
    losses, fields = {}, {"max_pixels": 2 * TOKEN, "min_pixels": 2 * TOKEN}
    for case in ("whole", "limits", "of the model"):
        if case == "of the model":
            made = AutoProcessor.from_pretrained(tmp_path / "model")
            made.image_processor.size = {"shortest_edge": 2 * TOKEN, "longest_edge": 2 * TOKEN}
            made.save_pretrained(tmp_path / "model")
        values = recipe_values(tmp_path / "model", rows, tmp_path / case, tmp_path / "cache", max_steps=3)
        values["data"] |= {"max_length": 128, **(fields if case == "limits" else {})}
        values |= {} if adapter == "none" else {"adapter": {"kind": "lora", "r": 2}}
        losses[case] = run(values)
    assert losses["limits"] == losses["of the model"] != losses["whole"]
    read = AutoProcessor.from_pretrained(tmp_path / "limits" / "export")
    assert dict(read.image_processor.size)["longest_edge"] == 2 * TOKEN
    grids = read(text=[read.image_token], images=[[Image.new("RGB", (64, 64))]], return_tensors="pt")["image_grid_thw"]
    assert grids.tolist() == [[1, 2, 2]]  # the largest square of whole tokens in 2 tokens is one


def run(values: dict[str, Any]) -> list[float]:
    result = finetune(Recipe.from_mapping(values))
    return losses_of(result.metrics)


@pytest.mark.skipif(not is_torchvision_available(), reason="needs torchvision")
def test_an_image_that_the_processor_refuses_is_a_bad_row(tmp_path: Path) -> None:
    texts = [" ".join(text.split()[:6]) for text in make_texts(40, seed=4)]
    save_seeing("qwen2_5_vl", tmp_path / "model", texts)
    rows = save_rows(tmp_path, texts, [1] * 40)
    Image.new("RGB", (900, 4)).save(tmp_path / "shown" / "7.png")
    values = recipe_values(tmp_path / "model", rows, tmp_path / "run", tmp_path / "cache", max_steps=1)
    values["data"]["max_length"] = 128
    run(values)
    report = json.loads((tmp_path / "run" / "data_report.json").read_text())
    ((reason, count),) = report["train"]["dropped"].items()
    assert "does not take: absolute aspect ratio must be smaller than 200" in reason
    assert count == {"count": 1, "rows": ["rows.jsonl:8"]}
