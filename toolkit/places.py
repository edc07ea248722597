"""Folders outside a run."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """finetune-toolkit in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "finetune-toolkit"
