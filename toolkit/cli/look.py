"""What `toolkit data` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.data import build, tokenizer
from toolkit.errors import BadInputError
from toolkit.pages.data_page import DATA_PAGE, write_data_page
from toolkit.recipe.recipe import Recipe


def look_at_data(recipe: Recipe, output: Path | None) -> dict[str, Any]:
    """The data report of a recipe; nothing is trained, and the run's folder is not touched.

    Args:
        output: folder for `data_report.json` and the page; None: nothing is written.

    Raises:
        BadInputError: as a run of the recipe would, about its data or its tokenizer.
    """
    tokens = tokenizer.load(recipe.model, recipe.data, recipe.objective.kind)
    report = build.build(recipe.data, tokens, recipe.training.seed, recipe.objective).report
    if output is not None:
        write_data_report(output, recipe, report)
    return report


def write_data_report(folder: Path, recipe: Recipe, report: dict[str, Any]) -> None:
    """Writes `data_report.json` and the page beside it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data_report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        write_data_page(folder / DATA_PAGE, recipe.description or "Data of the run", report)
    except OSError as error:
        raise BadInputError(f"{str(folder)!r} cannot be written: {error.strerror}; name another folder") from error
