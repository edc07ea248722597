"""The output folder: who may write there, and what a run puts there before it trains."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.checkpoint.consolidate import MODEL_FILES
from toolkit.checkpoint.export import write_configuration
from toolkit.checkpoint.manifest import Manifest, latest
from toolkit.checkpoint.reader import same_run
from toolkit.data.report import DataReport
from toolkit.errors import BadInputError
from toolkit.model.adapters import base_of
from toolkit.pages.data_page import DATA_PAGE, write_data_page
from toolkit.places import atomic_write
from toolkit.recipe.recipe import Recipe
from toolkit.training.profile import FOLDER as PROFILE_FOLDER

FINISHED = "report.html"
"""Written last: a run's folder that holds it is done."""


RUN_FILES = (
    "recipe.yaml",
    "metrics.jsonl",
    "data_report.json",
    DATA_PAGE,
    MODEL_FILES,
    FINISHED,
    PROFILE_FOLDER,
    "export",
    "checkpoints",
)
"""What a run leaves in its output folder."""


@contextmanager
def claimed(output_dir: Path, recipe: Recipe, resumed: tuple[Path, Manifest] | None) -> Iterator[None]:
    """Makes the output folder and writes the resolved recipe; takes both back if what follows fails.

    Beside what this recipe's run has left before, the recipe stays: by it the next start knows that run again.
    Raises BadInputError where the folder already holds a run that this one does not go on.
    """
    goes_on = resumed is not None and resumed[0].is_relative_to(output_dir)

    def claim() -> bool:
        if output_dir.exists() and not output_dir.is_dir():
            raise BadInputError(f"training.output_dir: {str(output_dir)!r} is a file; name a folder")
        _require_unfinished(output_dir, recipe, goes_on)
        made = not output_dir.exists()
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            # Whole or not at all: a run that was killed just then is known again by its recipe.
            atomic_write(output_dir / "recipe.yaml", recipe.to_yaml())
        except OSError as error:
            raise BadInputError(
                f"training.output_dir: {str(output_dir)!r} cannot be written: {error.strerror}; name another folder"
            ) from error
        return made

    made = ranks.on_first_rank(claim)
    try:
        yield
    except BaseException:
        if ranks.rank() == 0 and not goes_on and _run_files(output_dir) == ["recipe.yaml"]:
            (output_dir / "recipe.yaml").unlink(missing_ok=True)
            if made and not any(output_dir.iterdir()):
                output_dir.rmdir()
        raise


def _run_files(output_dir: Path) -> list[str]:
    """What a run has left in the folder."""
    return [name for name in RUN_FILES if (output_dir / name).exists()]


def _require_unfinished(output_dir: Path, recipe: Recipe, goes_on: bool) -> None:
    """Raises BadInputError where the output folder holds another run, or one that is done.

    What a run of the same recipe has left that was ended before its first checkpoint is cleared away.
    """
    found = _run_files(output_dir)
    finished = (output_dir / FINISHED).exists()
    if goes_on and (not finished or recipe.checkpoint.resume != "auto"):
        return
    again = recipe.checkpoint.resume == "auto" and same_run(output_dir / "recipe.yaml", recipe.model_dump(mode="json"))
    if not finished and again and latest(output_dir) is None:
        for name in ("metrics.jsonl", "data_report.json", DATA_PAGE):
            (output_dir / name).unlink(missing_ok=True)
        shutil.rmtree(output_dir / PROFILE_FOLDER, ignore_errors=True)
        return
    if found:
        raise BadInputError(
            f"training.output_dir: {str(output_dir)!r} already holds a {'finished ' if finished else ''}run "
            f"({', '.join(found)}); choose another folder, for example training.output_dir=outputs/second, or delete "
            "this one"
        )


def write_data_report(folder: Path, recipe: Recipe, report: DataReport) -> None:
    """Writes `data_report.json` and the page beside it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data_report.json").write_text(json.dumps(report.to_dict(), indent=1), encoding="utf-8")
        write_data_page(folder / DATA_PAGE, recipe.description or "Data of the run", report.to_dict())
    except OSError as error:
        raise BadInputError(f"{str(folder)!r} cannot be written: {error.strerror}; name another folder") from error


def write_beginning(
    output_dir: Path,
    recipe: Recipe,
    report: DataReport,
    inner: PreTrainedModel,
    tokens: PreTrainedTokenizerBase,
) -> None:
    """Writes what is known before the first step: the data report, and what a checkpoint needs to become a model."""
    write_data_report(output_dir, recipe, report)
    (output_dir / MODEL_FILES).mkdir(exist_ok=True)
    write_configuration(base_of(inner), tokens, output_dir / MODEL_FILES, getattr(torch, recipe.model.dtype))
