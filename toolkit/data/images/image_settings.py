"""Refuses settings that rows with images do not support, and settings that only they use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from toolkit.data.images.pixel_limits import PixelLimits
from toolkit.data.rows.files import local_path
from toolkit.data.rows.sources import ROWS_LOOKED_AT
from toolkit.errors import DataError
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import DataSection


def why_unread(objective: ObjectiveSection, streaming: bool, has_processor: bool, with_images: bool) -> str:
    """Returns why images of a source are not read, and what to do, for the report.

    Args:
        has_processor: whether the model has an image processor.
        with images: whether images of this source are read, where they are looked for.
    """
    if with_images:
        return "where none is looked for; put it into the column images of the row, or into the message's content"
    if streaming:
        return "and images are not read from a stream; remove data.streaming, or leave such rows out"
    if not objective.spec.sees_images:
        return f"and objective.kind={objective.kind} reads no images; leave such rows out"
    if not has_processor:
        return (
            "and the model's folder has no image processor; name a model that reads images in model.name_or_path, or "
            "leave such rows out"
        )
    return (
        f"and images are read if one of the first {ROWS_LOOKED_AT} rows has one, in a column or a message's content; "
        "put such a row first"
    )


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
