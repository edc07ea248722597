"""Copies a checkpoint from a store to this host's disk, from which it is read like a local one."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from toolkit import ranks
from toolkit.checkpoint.manifest import FileEntry, Manifest, file_entry
from toolkit.checkpoint.store import StorePath

INCOMING = ".incoming"


def incoming(run: Path, manifest: Manifest) -> Path:
    """Returns the folder for a copy of a checkpoint. It depends on the content, so that two of one step do not mix."""
    digest = hashlib.sha256(manifest.to_json().encode()).hexdigest()[:12]
    return run / INCOMING / f"step_{manifest.step:08d}-{digest}"


def clear_incoming(run: Path) -> None:
    """Deletes the copies. One rank of each host does so, because each host may have its own disk."""
    if ranks.local_rank() == 0:
        shutil.rmtree(run / INCOMING, ignore_errors=True)


def fetch(source: StorePath, manifest: Manifest, to: Path) -> str | None:
    """Copies this rank's share of a checkpoint's files.

    The ranks of a host share the files among them, because each host may have its own disk. If hosts share a disk, each
    host still copies all files.

    Returns:
        The first file that is missing or damaged, in words, or None if all are good.
    """
    to.mkdir(parents=True, exist_ok=True)
    for name in sorted(manifest.files)[ranks.local_rank() :: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))]:
        try:
            if not _copy_file(source / name, to / name, manifest.files[name]):
                return f"{name} is not what was written: its checksum differs"
        except FileNotFoundError:
            return f"{name} is missing"
    return None


def _copy_file(source: StorePath, to: Path, entry: FileEntry) -> bool:
    """Copies a file unless it is there already. Returns whether its content is right."""
    if to.exists() and file_entry(to) == entry:
        return True
    # Under another name, which no reader takes for the file.
    part = to.with_name(f".{to.name}.{ranks.rank()}")
    try:
        source.get(part)
        if file_entry(part) != entry:
            return False
        os.replace(part, to)
        return True
    finally:
        part.unlink(missing_ok=True)
