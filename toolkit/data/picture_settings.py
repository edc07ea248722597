"""Refuses settings that rows with images do not support, and settings that only they use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from toolkit.data.files import local_path
from toolkit.data.pixel_limits import PixelLimits
from toolkit.errors import DataError
from toolkit.recipe.schema import DataSection


def require_built(data: DataSection, source: str) -> None:
    """Checks that the recipe uses only what is built for rows with images.

    Args:
        source: name of the source that has some.

    Raises:
        DataError: if it sets something else.
    """
    asked = {
        "data.targets": data.targets in ("all", "each_turn") and data.targets,
        "data.long_rows": data.long_rows in ("truncate", "split") and data.long_rows,
    }
    for field, value in asked.items():
        if value:
            raise DataError(f"{field}: {value} is not built for rows with images ({source}); remove it")


def require_root(data: DataSection) -> None:
    """Checks that the folder of images that the recipe names is there.

    Raises:
        DataError: if it is not.
    """
    if data.image_root is None or (folder := local_path(data.image_root)).is_dir():
        return
    found = "is not a folder" if folder.exists() else "does not exist"
    raise DataError(
        f"data.image_root: {data.image_root!r} {found} ({str(folder.absolute())!r}); name the folder that the paths of "
        "images in the rows start from"
    )


def require_effect(data: DataSection, sources: Iterable[Mapping[str, Any]]) -> None:
    """Checks that settings of images have an effect: some row has an image that the model gets.

    Args:
        sources: facts about each source; one with images has `roots`.

    Raises:
        DataError: if the recipe has such a setting and no row has such an image.
    """
    limits = PixelLimits.of(data)
    fields = [field for field in (limits.fields, data.image_root and "data.image_root") if field]
    if fields and not any("roots" in source for source in sources):
        raise DataError(
            f"{' and '.join(fields)} has no effect: the model reads no image of the rows (of conversations that are "
            "not streamed, for a model with an image processor); remove it"
        )
