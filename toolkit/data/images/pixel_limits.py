"""Sets how large a model's processor makes images: `data.min_pixels` and `data.max_pixels`.

Processors such as Qwen-VL's scale an image until its number of pixels is between two limits of their configuration.
The limits of a recipe replace these, and are written into the configuration of the export, so that a server reads
images as training did.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import BadInputError
from toolkit.recipe.schema import DataSection

CONFIGURATIONS = ("preprocessor_config.json", "processor_config.json")
"""Files that say that a checkpoint has a processor of images, and how it works."""


@dataclass(frozen=True)
class PixelLimits:
    """Limits of the number of pixels (width times height) that an image is scaled to.

    Attributes:
        smallest: `data.min_pixels`, or None for the processor's own.
        largest: `data.max_pixels`, or None for the processor's own.
    """

    smallest: int | None = None
    largest: int | None = None

    @classmethod
    def of(cls, data: DataSection) -> PixelLimits:
        """Returns the limits that a recipe sets."""
        return cls(data.min_pixels, data.max_pixels)

    def __bool__(self) -> bool:
        return self.smallest is not None or self.largest is not None

    @property
    def fields(self) -> str:
        """Names of the settings that are set, for errors."""
        given = {"data.min_pixels": self.smallest, "data.max_pixels": self.largest}
        return " and ".join(field for field, value in given.items() if value is not None)

    def apply(self, processor: Any, model: str) -> None:
        """Sets these limits on a processor of transformers.

        Args:
            model: name of the model, for errors.

        Raises:
            BadInputError: if the processor does not scale by numbers of pixels, or cannot keep to these.
        """
        images = processor.image_processor
        accepted = getattr(getattr(images, "valid_kwargs", None), "__annotations__", {})
        if "max_pixels" not in accepted or "longest_edge" not in dict(images.size):
            raise BadInputError(
                f"{self.fields}: the processor of {model!r} ({type(images).__name__}) does not scale images by their "
                "number of pixels; remove it, or set what its preprocessor_config.json has for the size"
            )
        size = {**dict(images.size), **self._size_settings()}
        smallest, largest = size["shortest_edge"], size["longest_edge"]
        if smallest > largest:
            raise BadInputError(
                f"{self.fields}: images of at least {smallest:,} and at most {largest:,} pixels; "
                f"set {'data.max_pixels' if self.largest is None else 'data.min_pixels'}, too"
            )
        token = (images.patch_size * images.merge_size) ** 2
        if largest < token:
            raise BadInputError(
                f"data.max_pixels={largest:,} is less than one token stands for ({token:,} pixels); set more"
            )
        images.size = type(images.size)(**size)

    def write(self, folder: Path) -> None:
        """Writes the limits into a processor's configuration in the folder of an export."""
        if not self:
            return
        from transformers import AutoImageProcessor  # as in `Images.processor`

        own = dict(AutoImageProcessor.from_pretrained(folder, local_files_only=True).size)
        size = {**{name: value for name, value in own.items() if value is not None}, **self._size_settings()}
        for name in CONFIGURATIONS:
            path = folder / name
            if not path.is_file():
                continue
            content = json.loads(path.read_text(encoding="utf-8"))
            images = content.get("image_processor", content if name == CONFIGURATIONS[0] else {})
            # Older files have the limits next to `size`, where they are read first.
            for older in ("min_pixels", "max_pixels"):
                images.pop(older, None)
            images["size"] = size
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _size_settings(self) -> dict[str, int]:
        """Returns the limits by transformers' names in the processor's `size`."""
        given = {"shortest_edge": self.smallest, "longest_edge": self.largest}
        return {name: value for name, value in given.items() if value is not None}


NO_LIMITS = PixelLimits()
"""No limits of the recipe: the processor's own apply."""
