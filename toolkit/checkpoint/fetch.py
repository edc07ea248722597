"""Copies a checkpoint from a store to this host's disk, where it is read as a local one."""

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
    """Where a checkpoint is copied to, by its content, so that the files of another of this step are not mixed in."""
    digest = hashlib.sha256(manifest.to_json().encode()).hexdigest()[:12]
    return run / INCOMING / f"step_{manifest.step:08d}-{digest}"


def clear_incoming(run: Path) -> None:
    """Deletes the copies. By one rank of each host: the disk may be its own."""
    if ranks.local_rank() == 0:
        shutil.rmtree(run / INCOMING, ignore_errors=True)


def fetch(source: StorePath, manifest: Manifest, to: Path) -> str | None:
    """Copies this rank's share of a checkpoint; the first file that is not what was written, None if all are.

    The ranks of a host share the files among them, as hosts may have disks of their own. On a disk that hosts share,
    each copies all of it.
    """
    to.mkdir(parents=True, exist_ok=True)
    for name in sorted(manifest.files)[ranks.local_rank() :: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))]:
        try:
            if not _copied(source / name, to / name, manifest.files[name]):
                return f"{name} is not what was written: its checksum differs"
        except FileNotFoundError:
            return f"{name} is missing"
    return None


def _copied(source: StorePath, to: Path, entry: FileEntry) -> bool:
    """Whether the file is there and what was written; one that is there already is not copied again."""
    if to.exists() and file_entry(to) == entry:
        return True
    # Under a name of its own, which no reader takes for the file.
    part = to.with_name(f".{to.name}.{ranks.rank()}")
    try:
        source.get(part)
        if file_entry(part) != entry:
            return False
        os.replace(part, to)
        return True
    finally:
        part.unlink(missing_ok=True)
