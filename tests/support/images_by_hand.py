"""Rows with images made by hand: what processors make of images, for 12 families, without a processor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForImageTextToText

from support.tiny import VOCAB_SIZE
from support.tiny_multimodal import FAMILIES
from toolkit.data.images.images import PREFIX
from toolkit.data.samples.image_samples import ImageSamples
from toolkit.data.samples.packing import whole
from toolkit.data.samples.samples import Rows

BEGIN, END, PLACE, BREAK = 3, 4, 5, 8
FIRST_WORD = 20
"""Tokens below it stand for images, or for nothing."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Drawn:
    """An image of noise: `height` times `width` of what a token of its family stands for, or so many tiles."""

    seed: int
    height: int
    width: int

    @property
    def count(self) -> int:
        return self.height * self.width

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed))


@dataclass(frozen=True)
class Family:
    """How a family is given images.

    Attributes:
        ids: the tokens that stand for an image.
        tensors: what its processor makes of the images of rows, each of which has some.
        kinds: the name under which its forward is given the kinds of tokens; None: it asks for none.
    """

    ids: Callable[[Drawn], list[int]]
    tensors: Callable[[Sequence[Sequence[Drawn]]], Tensors]
    kinds: str | None = None


def _flat(rows: Sequence[Sequence[Drawn]]) -> list[Drawn]:
    return [image for row in rows for image in row]


def _squares(rows: Sequence[Sequence[Drawn]]) -> Tensors:
    return {"pixel_values": torch.stack([image.noise(3, 28, 28) for image in _flat(rows)])}


def _tiles(rows: Sequence[Sequence[Drawn]]) -> Tensors:
    return {"pixel_values": torch.cat([image.noise(image.count, 3, 28, 28) for image in _flat(rows)])}


def _patches(rows: Sequence[Sequence[Drawn]]) -> Tensors:
    """Two by two patches a token."""
    found = _flat(rows)
    return {
        "pixel_values": torch.cat([image.noise(4 * image.count, 3 * 2 * 14 * 14) for image in found]),
        "image_grid_thw": torch.tensor([[1, 2 * image.height, 2 * image.width] for image in found]),
    }


def _tiles_by_row(rows: Sequence[Sequence[Drawn]]) -> Tensors:
    """Filled up with tiles of zeros, which the model leaves out."""
    by_row = [torch.cat([image.noise(image.count, 3, 28, 28) for image in row]) for row in rows]
    most = max(len(tiles) for tiles in by_row)
    pixels = torch.stack([F.pad(tiles, (0, 0, 0, 0, 0, 0, 0, most - len(tiles))) for tiles in by_row])
    return {"pixel_values": pixels, "pixel_attention_mask": (pixels != 0).any(dim=2)}


def _sized(rows: Sequence[Sequence[Drawn]]) -> Tensors:
    """Of 28 times 28 pixels a token, at least two tokens; filled up to the largest."""
    found = _flat(rows)
    sizes = [(28 * image.height, 28 * (image.width + 1)) for image in found]
    height, width = (max(side) for side in zip(*sizes, strict=True))
    pixels = [F.pad(p.noise(3, h, w), (0, width - w, 0, height - h)) for p, (h, w) in zip(found, sizes, strict=True)]
    return {"pixel_values": torch.stack(pixels), "image_sizes": torch.tensor(sizes)}


def _lines(image: Drawn) -> list[int]:
    return [*([*[PLACE] * (image.width + 1), BREAK] * image.height)[:-1], END]


def _pooled(rows: Sequence[Sequence[Drawn]]) -> Tensors:
    """Three by three patches a token, filled up to 54."""
    pixels, places = [], []
    for image in _flat(rows):
        height, width = 3 * image.height, 3 * image.width
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        empty = 54 - height * width
        pixels.append(F.pad(image.noise(height * width, 3 * 14 * 14).sigmoid(), (0, 0, 0, empty)))
        places.append(F.pad(torch.stack([x.flatten(), y.flatten()], dim=1), (0, 0, 0, empty), value=-1))
    return {"pixel_values": torch.stack(pixels), "image_position_ids": torch.stack(places)}


_FOUR = [PLACE] * 4
_GRID = Family(lambda image: [BEGIN, *[PLACE] * image.count, END], _patches, "mm_token_type_ids")
_BY_ROW = Family(lambda image: [BREAK, *[BREAK + 1, PLACE] * image.count, BREAK], _tiles_by_row)
BY_HAND = {
    "llava": Family(lambda _: _FOUR, _squares),
    "qwen3_vl": _GRID,
    "gemma3": Family(lambda _: [BEGIN, *_FOUR, END], _squares, "token_type_ids"),
    "mistral3": Family(_lines, _sized),
    "idefics3": _BY_ROW,
    "qwen2_5_vl": _GRID,
    "qwen3_vl_moe": _GRID,
    "qwen3_5": _GRID,
    "glm4v": _GRID,
    "smolvlm": _BY_ROW,
    "internvl": Family(lambda image: [BEGIN, *[PLACE] * image.count, END], _tiles),
    "llama4": Family(lambda image: [BEGIN, *[PLACE] * image.count, END], _tiles),
    "gemma4": Family(lambda image: [BEGIN, *[PLACE] * image.count, END], _pooled, "mm_token_type_ids"),
}
"""Type -> how it is given images; those that are tried in every run of the tests come first."""


def seeing_model(kind: str, changed: dict[str, Any] | None = None) -> Any:
    """A small model in which every parameter has a gradient that shows what is wrong.

    Args:
        changed: fields of its text configuration.
    """
    torch.manual_seed(0)
    fields = FAMILIES[kind]
    fields = {**fields, "text_config": {**fields["text_config"], **(changed or {})}}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **fields), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
        else:  # 0.02, as transformers draws them, leaves towers gradients of a millionth
            parameter.data.normal_(0, (parameter[0].numel()) ** -0.5)
    return model


@dataclass(frozen=True)
class Row:
    """Tokens of a row, which of them are targets, and its images."""

    ids: list[int]
    targets: list[bool]
    images: list[Drawn]


def random_rows(kind: str, counts: Sequence[int], seed: int, longest: int = 12) -> list[Row]:
    """A row for each count of images: words, images among them, and an answer; unequally long."""
    draw = np.random.default_rng(seed)

    def words(most: int) -> list[int]:
        return draw.integers(FIRST_WORD, VOCAB_SIZE, draw.integers(1, most)).tolist()  # type: ignore[no-any-return]

    rows = []
    for count in counts:
        asked, images = words(5), []
        for _ in range(count):
            images.append(Drawn(int(draw.integers(1 << 30)), *map(int, draw.integers(1, 3, 2))))
            asked += [*BY_HAND[kind].ids(images[-1]), *words(4)]
        answer = words(longest)
        rows.append(Row(asked + answer, [False] * len(asked) + [True] * len(answer), images))
    return rows


class DrawnRows(Rows):
    """Rows as the data has them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def tokens(self, row: int, start: int = 0, stop: int | None = None) -> tuple[Any, Any]:
        return np.array(self.rows[row].ids[start:stop]), np.array(self.rows[row].targets[start:stop])

    def images(self, row: int, start: int | None = None) -> list[tuple[dict[str, Any], str]]:
        return [({"drawn": drawn, "size": (drawn.width, drawn.height)}, "") for drawn in self.rows[row].images]

    def name(self, row: int) -> str:
        return f"rows.jsonl:{row + 1}"

    def cached_in(self, row: int) -> Path:
        return Path()


@dataclass(frozen=True)
class DrawnImages:
    """Stands in for `toolkit.data.images.images.Images`: a family's processor, by hand."""

    kind: str
    token_ids: frozenset[int] = field(default=frozenset({PLACE}))

    @property
    def smallest(self) -> tuple[Drawn, list[int]]:
        image = Drawn(7, 1, 1)
        return image, BY_HAND[self.kind].ids(image)

    def read(self, record: dict[str, Any], root: str, row: str, cached_in: Path) -> Drawn:
        return record["drawn"]  # type: ignore[no-any-return]

    def tensors(self, rows: Sequence[Sequence[Drawn]]) -> Tensors:
        return {f"{PREFIX}{name}": tensor for name, tensor in BY_HAND[self.kind].tensors(rows).items()}


def samples_of(kind: str, samples: Sequence[Sequence[Row]], packed: bool, max_length: int) -> ImageSamples:
    """Rows as samples of a run, of one row each if they are padded."""
    assert packed or all(len(rows) == 1 for rows in samples)
    assert all(sum(len(row.ids) for row in rows) <= max_length for rows in samples)
    rows = [row for sample in samples for row in sample]
    pieces = whole(np.arange(len(rows)), np.array([len(row.ids) for row in rows]), max_length)
    ends = np.cumsum([len(sample) for sample in samples]).tolist()
    images: Any = DrawnImages(kind)
    return ImageSamples(DrawnRows(rows), pieces, ends, max_length, packed, 0, images=images)


def given_alone(kind: str, row: Row) -> Tensors:
    """What transformers' own model is given of one row, as its processor gives it."""
    family = BY_HAND[kind]
    ids = torch.tensor([row.ids])
    inputs = {"input_ids": ids, **(family.tensors([row.images]) if row.images else {})}
    return inputs if family.kinds is None else {**inputs, family.kinds: (ids == PLACE).long()}


def summed_loss(model: Any, kind: str, row: Row) -> torch.Tensor:
    """The loss of a row's targets on transformers' own model."""
    logits = model(**given_alone(kind, row), use_cache=False).logits[0, :-1].float()
    labels = torch.where(torch.tensor(row.targets), torch.tensor(row.ids), -100)[1:]
    return F.cross_entropy(logits, labels, reduction="sum")


def num_targets(rows: Sequence[Row]) -> int:
    return sum(sum(row.targets[1:]) for row in rows)
