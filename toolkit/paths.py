"""Folders and files outside a run, and what a name stands for: a file, or something on the hub."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

from toolkit.errors import BadInputError

GIB = 2**30
CHECKPOINT_FILE_BYTES = GIB
"""Of a file of a checkpoint, about: what saving holds in memory beside the state, which planning counts."""
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".tar")
BASE_FILE = "base.json"
"""Of an exported adapter: the fingerprint of its base, and how it was quantised."""
ORIGIN = "training.json"
"""Of an export: what its run was made of."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""Endings that may follow a data suffix; files are decompressed while they are read."""
STORES = ("s3", "gs", "file")
"""Protocols of the stores that checkpoints are copied to."""


def user_cache() -> Path:
    """finetune-toolkit in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "finetune-toolkit"


def shipped_folder(name: str) -> Path:
    """`recipes` or `accelerate_configs`: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent
    installed = package / f"_{name}"
    return installed if installed.is_dir() else package.parent / name


def shipped_files(name: str) -> dict[str, Path]:
    """Name -> path of the YAML files that are shipped in a folder."""
    return {path.stem: path for path in sorted(shipped_folder(name).glob("*.yaml"))}


def shown_path(path: Path) -> str:
    """The path as a command line would name it here: relative inside the working folder, absolute elsewhere."""
    path, here = path.absolute(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def atomic_write(path: Path, text: str, errors: str = "strict") -> None:
    """Write `text` to `path`; a reader sees the old file or the new one, never a part.

    So does who looks after a power cut.

    Args:
        errors: what to do with characters that UTF-8 cannot encode, as `open` takes it.
    """
    # Not tempfile: its files are readable by their owner only, and what is written here is there to be shared.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors=errors) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # or a power cut may leave an empty file under the name
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def clear_interrupted_writes(folder: Path) -> None:
    """Deletes what `atomic_write` has left where its process was killed; nobody else may be writing there."""
    for temporary in folder.glob(".*.tmp"):
        temporary.unlink(missing_ok=True)


def is_store(name: str) -> bool:
    """True for a place in a store, as s3://bucket/runs/first, False for a path."""
    return "://" in name


def is_file_source(source: str) -> bool:
    """True for a path, a glob or a URL, False for a hub name."""
    if is_store(source):
        return True
    bare = source
    for ending in COMPRESSIONS:
        bare = bare.removesuffix(ending)
    return bare.endswith(DATA_SUFFIXES) or source.startswith(("/", "./", "../", "~")) or os.path.exists(source)


def file_name(source: str) -> str:
    """The last part of a path or URL, without what follows a question mark, which may be a signature."""
    return Path(source.partition("?")[0] if is_store(source) else source).name


def source_name(source: str) -> str:
    """The last part of a path or URL, which others may read; a hub name as it is."""
    return file_name(source) if is_file_source(source) else source


def is_hub_name(name: str) -> bool:
    """False for a path of a model's folder, whether or not there is one."""
    return not (name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).expanduser().exists())


def require_folder(name: str, field: str) -> None:
    """Raises BadInputError where `name` is a path, and not a hub name, and there is no such folder."""
    path = Path(name).expanduser()
    if not is_hub_name(name) and not path.is_dir():
        found = "is a file" if path.is_file() else "does not exist"
        # Where a shipped recipe leaves its model, as another one's teacher.
        maker = path.parent.name if path.match("outputs/*/export") else ""
        mend = f"make it by `toolkit train {maker}`, or " if maker in shipped_files("recipes") else ""
        raise BadInputError(f"{field}: the folder {name!r} {found}; {mend}name a model's folder or a hub name")


SAMPLED_BYTES = 1024
"""Read of a tensor for a fingerprint, at its beginning, in its middle and at its end."""


def fingerprint_of(folder: Path, pattern: str = "model*.safetensors") -> str | None:
    """Tells the weights of one model's folder from another's; None where it has no safetensors files.

    SHA-256 of every tensor's name, type and shape and of three KiB of it: training moves them all. However the
    tensors are spread over files, it is the same. Raises OSError or ValueError for files that are not whole.
    """
    found: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in sorted(folder.glob(pattern)):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            header = json.loads(file.read(min(length, path.stat().st_size)))
        found |= {name: (path, 8 + length, entry) for name, entry in header.items() if name != "__metadata__"}
    digest = hashlib.sha256()
    for name, (path, start, entry) in sorted(found.items()):
        begin, end = entry["data_offsets"]
        digest.update(f"{name} {entry['dtype']} {entry['shape']}".encode())
        with path.open("rb") as file:
            for place in (begin, (begin + end) // 2, max(begin, end - SAMPLED_BYTES)):
                file.seek(start + place)
                digest.update(file.read(min(SAMPLED_BYTES, end - place)))
    return digest.hexdigest() if found else None
