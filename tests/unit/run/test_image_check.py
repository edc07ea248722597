"""The checks of rows with images before the first step: each finds what it is there for, and names the row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.images_by_hand import BEGIN, END, PLACE, Drawn, DrawnImages, Row, random_rows, samples_of, seeing_model

from toolkit.data.samples.image_samples import ImageSamples
from toolkit.errors import BadInputError
from toolkit.objectives.causal_lm import CausalLM
from toolkit.run.checks import image_check
from toolkit.run.checks.image_check import SightCheck, check_images, require_no_targets
from toolkit.run.checks.packing_check import LeakError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _another_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_check, "_changed_image", lambda image: replace(image, seed=image.seed + 1))


def drawn(kind: str, packed: bool = True) -> ImageSamples:
    """A sample of rows without images, and two in which a later row has the first image."""
    rows = random_rows(kind, [0, 0, 0, 2, 0, 1, 1], seed=5)
    samples = [rows[:2], rows[2:5], rows[5:]]
    return samples_of(kind, samples if packed else [[row] for row in rows], packed, 128)


def checked(kind: str, samples: ImageSamples, model: Any = None, objective: Any = None) -> SightCheck | None:
    model = seeing_model(kind) if model is None else model
    objective = CausalLM(model, samples.packed) if objective is None else objective
    return check_images(model, objective, samples, CPU, False)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["llava", "qwen3_vl", "gemma3"])
def test_what_is_right_passes(kind: str, packed: bool) -> None:
    found = checked(kind, drawn(kind, packed))
    assert found is not None
    assert found.seen > 1e-3
    assert found.leaks == 0.0
    assert found.alone < 1e-5
    assert found.shared is packed


def test_a_row_with_more_places_than_features_is_named() -> None:
    """Beside a row with too few it would go unseen."""
    text = random_rows("internvl", [0], seed=5)[0]
    more = Row([20, BEGIN, PLACE, PLACE, END, 21, 22], [False] * 5 + [True] * 2, [Drawn(1, 1, 1)])
    fewer = Row([23, 24, BEGIN, PLACE, END, 25], [False] * 5 + [True], [Drawn(2, 1, 2)])
    samples = samples_of("internvl", [[text, more, fewer]], True, 128)
    with pytest.raises(BadInputError, match=r"rows\.jsonl:2: InternVL.* cannot take its images: .*do not match"):
        checked("internvl", samples)


def test_a_place_that_is_learned_is_named() -> None:
    rows = random_rows("llava", [0, 2, 0], seed=5)
    learned = Row(rows[1].ids, [True] * len(rows[1].ids), rows[1].images)
    samples = samples_of("llava", [[rows[0], learned], [rows[2]]], True, 128)
    with pytest.raises(BadInputError, match=r"rows\.jsonl:2: tokens that stand for an image would be learned as text"):
        require_no_targets(samples)
    with pytest.raises(BadInputError, match=r"rows\.jsonl:2: tokens that stand"):
        checked("llava", samples)


def test_an_image_that_is_not_seen_is_named() -> None:
    model = seeing_model("llava")
    project = model.model.multi_modal_projector.forward
    model.model.multi_modal_projector.forward = lambda *args: 0.0 * project(*args)
    with pytest.raises(
        BadInputError, match=r"rows\.jsonl:4: its image changes no logit of LlavaForConditionalGeneration"
    ):
        checked("llava", drawn("llava"), model)


def test_a_row_that_sees_its_neighbours_image_is_named() -> None:
    model = seeing_model("llava")
    padded = CausalLM(model, packed=False)  # gives the model no positions
    with pytest.raises(
        LeakError, match=r"rows\.jsonl:4\): the logits of one change by .* when the image of another is"
    ):
        checked("llava", drawn("llava"), model, padded)


def test_a_row_that_differs_beside_others_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Axes of positions that the model counts itself, from the first row on."""
    model = seeing_model("qwen3_vl")
    objective = CausalLM(model)
    inputs = objective.inputs

    def shifted(batch: Any) -> dict[str, Any]:
        found = inputs(batch)
        axes = found["position_ids"].clone()
        axes[2] += torch.arange(axes.shape[2]) // 7  # heights alone: the documents stay apart
        return {**found, "position_ids": axes}

    monkeypatch.setattr(objective, "inputs", shifted)
    with pytest.raises(LeakError, match=r"rows\.jsonl:4\): the logits of one differ by .* from its own alone"):
        checked("qwen3_vl", drawn("qwen3_vl"), model, objective)


def test_rows_with_unlike_images_are_tried_the_largest_first() -> None:
    rows = [Row([PLACE] * n, [False] * n, [Drawn(n, 1, n)]) for n in (3, 1, 2, 4)]
    samples = samples_of("llava", [rows[:3], rows[3:]], True, 128)
    assert isinstance(samples.images, DrawnImages)
    assert image_check._rows_of_unlike_sizes(samples)[0] == (1, 0)
