"""Copies a checkpoint from a store to the output folder, from which it is read like a local one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from toolkit import ranks
from toolkit.checkpoint.manifest import Manifest, check_files, file_entry
from toolkit.checkpoint.store import StorePath

INCOMING = ".incoming"


def incoming(run: Path, step: int) -> Path:
    """Returns the folder for a copy of a checkpoint."""
    return run / INCOMING / f"step_{step:08d}"


def clear_incoming(run: Path) -> None:
    """Deletes the copies. Collective."""
    ranks.on_first_rank(lambda: shutil.rmtree(run / INCOMING, ignore_errors=True))


def fetch(source: StorePath, manifest: Manifest, to: Path) -> str | None:
    """Copies a checkpoint's files, and compares their sums. What an interrupted copy has left is not copied again.

    Returns:
        The first file that is missing or damaged, in words, or None if all are good.
    """
    to.mkdir(parents=True, exist_ok=True)
    for name, entry in sorted(manifest.files.items()):
        if (to / name).exists() and file_entry(to / name) == entry:
            continue
        part = to / f".{name}"  # no reader takes it for the file
        try:
            (source / name).get(part)
        except FileNotFoundError:
            return f"{name} is missing"
        os.replace(part, to / name)
        if (problem := check_files(to, manifest, [name])) is not None:
            return problem
    return None
