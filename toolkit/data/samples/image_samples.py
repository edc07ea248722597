"""Makes samples of rows with images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from PIL import Image

from toolkit.data.images.images import PREFIX, Images
from toolkit.data.rows.cache import digest
from toolkit.data.samples.samples import Batch, Rows, Samples, TextSamples, batch_of

KINDS_OF_TOKENS = "mm_token_type_ids"
"""Key of a batch: 1 for tokens that the model replaces by image features, else 0, (B, T); transformers' name."""

COUNTS = "picture_counts"
"""Key of a batch: number of images of each document, (D,), in the order of rows and of documents in them."""


@dataclass(frozen=True)
class ImageSamples(TextSamples):
    """`TextSamples` with the tensors that the model's processor makes of images, under `PREFIX` and its names.

    A micro-batch without an image gets a small one after its first sample, in a document of its own without targets,
    so that every rank runs the same units in every micro-batch. T is longer by its tokens then. Its gradients are
    exactly 0, so the step is the same for any number of ranks.

    Attributes:
        images: reads the images.
    """

    images: Images = None  # type: ignore[assignment]

    @property
    def has_images(self) -> bool:
        return True

    @property
    def shares_samples(self) -> bool:
        """Always: the small image of a micro-batch without one is in a document of its own."""
        return True

    def records(self, number: int) -> list[tuple[int, list[tuple[dict[str, Any], str]]]]:
        """Returns row and images of each piece of a sample, as `Rows.images` has them."""
        return [(row, self.rows.images(row, start)) for row, start, _ in self.places(number)]

    def seen(self, number: int) -> list[list[Image.Image]]:
        """Returns the images of each piece of a sample."""
        rows = self.rows
        return [
            [self.images.read(*record, rows.name(row), rows.cached_in(row)) for record in found]
            for row, found in self.records(number)
        ]

    @property
    def placeholders(self) -> frozenset[int]:
        return self.images.token_ids

    def tensors(self, samples: list[list[tuple[Any, Any]]], seen: Sequence[Sequence[Sequence[Any]]]) -> Batch:
        extra = 0
        if not any(found for pieces in seen for found in pieces):
            image, ids = self.images.smallest
            samples = [[*samples[0], (ids, [False] * len(ids))], *samples[1:]]
            seen = [[*seen[0], [image]], *seen[1:]]
            extra = len(ids)
        batch = batch_of(samples, self.max_length + extra, self.packed, self.pad_id)
        batch["lengths"][0] -= extra
        return self.with_kinds(batch) | self.shown_tensors(seen)

    def with_kinds(self, batch: Batch) -> Batch:
        """Adds the kinds of a batch's tokens, (B, T), int64."""
        placeholders = torch.tensor(sorted(self.images.token_ids))
        return {**batch, KINDS_OF_TOKENS: torch.isin(batch["input_ids"], placeholders).long()}

    def shown_tensors(self, seen: Sequence[Sequence[Sequence[Image.Image]]]) -> Batch:
        """Returns what a model gets for the images of each document of each sample: `COUNTS` and pixel tensors."""
        counts = torch.tensor([len(found) for rows in seen for found in rows])
        by_sample = [[image for found in rows for image in found] for rows in seen]
        shown = [images for images in by_sample if images]
        return {COUNTS: counts, **(self.images.tensors(shown) if shown else {})}

    def alone(self, number: int, place: int) -> Batch:
        """Returns one piece of a sample as a batch of its own, which is no longer than it must be."""
        return replace(self, packed=False).tensors([[self.tokens(number)[place]]], [[self.seen(number)[place]]])

    def few(self, tokens: int) -> Batch:
        """Returns `TextSamples.few` without images, and with padding in their places."""
        batch = super().few(tokens)
        placeholders = torch.tensor(sorted(self.images.token_ids))
        shown = torch.isin(batch["input_ids"], placeholders)
        batch["input_ids"] = batch["input_ids"].masked_fill(shown, self.pad_id)
        return {**batch, "labels": batch["labels"].masked_fill(shown, -100)}

    def has_image(self, number: int) -> bool:
        """Returns whether a sample has an image."""
        return any(found for _, found in self.records(number))


def image_samples_of(samples: Samples) -> ImageSamples | None:
    """Returns the samples for what only those with images can do, or None if rows have no images."""
    return samples if isinstance(samples, ImageSamples) else None


def identify_images(rows: Rows, images: Images) -> str:
    """Returns a digest of the content of all images, in the order of their rows.

    Raises:
        DataError: if an image's file is missing, or has another size than when its row was read.
    """
    found: list[list[str]] = []
    for source in rows.sources:
        for row, shown in enumerate(source.all_images()):
            for record, root in shown:
                images.require_there(record, root, partial(source.row_name, row), source.folder)
            found.append([record["digest"] for record, _ in shown])
    return digest("pictures", found)


def is_of_images(name: str) -> bool:
    """Returns whether a tensor of a batch belongs to its images, and not to its tokens."""
    return name == COUNTS or name.startswith(PREFIX)


def images_in(batch: Batch) -> dict[str, Any]:
    """Returns the processor's tensors in a batch, by its own names."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in batch.items() if name.startswith(PREFIX)}
