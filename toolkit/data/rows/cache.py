"""Caches prepared data by content: a folder's name is a digest of everything that decides what is in it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.errors import BadInputError
from toolkit.paths import user_cache
from toolkit.recipe.schema import DataSection

FORMAT = 4
"""Part of every digest; raised when the stored format changes."""


def cache_folder(data: DataSection) -> Path:
    """Returns `data.cache_dir`, or finetune-toolkit in the user's cache."""
    return Path(os.path.expanduser(data.cache_dir)) if data.cache_dir is not None else user_cache()


def digest(*parts: Any) -> str:
    """Returns a short name of JSON-like values; equal values have equal names."""
    return hashlib.sha256(json.dumps([FORMAT, *parts], sort_keys=True).encode()).hexdigest()[:24]


def kept(folder: Path, write: Callable[[Path], None]) -> Path:
    """Returns `folder`, filled by `write` if it does not exist yet; it is never seen half-written.

    Raises:
        BadInputError: if the cache cannot be written.
    """
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Next to its final place: a rename is atomic only within one file system.
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    except OSError as error:
        raise BadInputError(
            f"data.cache_dir: {str(folder.parent)!r} cannot be written: {error.strerror}; name a writable folder"
        ) from error
    try:
        write(unfinished)
        os.rename(unfinished, folder)
    except OSError:
        if not folder.exists():  # otherwise another process was faster, with the same content
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
