"""What `toolkit data` does."""

from __future__ import annotations

from pathlib import Path

from toolkit.data import build, tokenizer
from toolkit.data.report import DataReport
from toolkit.recipe.recipe import Recipe
from toolkit.run.folder import write_data_report


def look_at_data(recipe: Recipe, output: Path | None) -> DataReport:
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
