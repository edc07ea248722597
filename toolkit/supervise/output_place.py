"""What an output folder may be: new, empty, or that of a run."""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.errors import BadInputError
from toolkit.paths import CHECKPOINTS

OF_A_RUN = ("recipe.yaml", "metrics.jsonl", "report.html", CHECKPOINTS, "export")
"""Names, each of which marks a folder as that of a run, whatever else is in it."""

BESIDE_A_RUN = (".yaml", ".yml", ".sh", ".py", ".ipynb", ".log", ".out", ".err", ".md", ".txt")
"""Endings of files that people and batch systems keep in a folder before a run begins."""


def require_place(folder: Path) -> None:
    """Checks that a run may use the output folder.

    Raises:
        BadInputError: if it is a file, the root or home folder, contains a `$`, or holds other data and no run.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInputError(f"training.output_dir: {str(folder)!r} is a file; name a folder")
    if folder in (Path(folder.anchor), Path(os.path.expanduser("~"))):
        raise BadInputError(
            f"training.output_dir: {str(folder)!r} is your home or root folder; choose a folder for this run"
        )
    if "$" in str(folder):
        raise BadInputError(
            f"training.output_dir: {str(folder)!r} holds a $, and variables in a recipe are not replaced; write the "
            "path out"
        )
    # A broken link counts as present: opening the folder gives an error that names it.
    if not folder.exists() or any(os.path.lexists(folder / name) for name in OF_A_RUN):
        return
    others = sorted(p.name for p in folder.iterdir() if p.name[0] != "." and p.suffix not in BESIDE_A_RUN)
    if others := [name for name in others if name != "lost+found"]:
        raise BadInputError(
            f"training.output_dir: {str(folder)!r} holds something else ({', '.join(others[:5])}) and no run; name a "
            "new folder, or an empty one"
        )


def make_place(folder: Path) -> list[Path]:
    """Creates the output folder. Returns the folders that it had to create, the innermost first.

    Raises:
        BadInputError: if no run may use the folder, or it cannot be created.
    """
    require_place(folder)
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    return made


def unwritable(folder: Path, error: OSError) -> BadInputError:
    """Returns the error of an output folder that cannot be written."""
    return BadInputError(
        f"training.output_dir: {str(folder)!r} cannot be written: {error.strerror}; name another folder"
    )
