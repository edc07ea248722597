"""What a checkpoint's folder holds and when it counts: files, their checksums, and the marker of completion.

    checkpoints/step_00000100/
        shard-00001-model-00001-of-00001.safetensors   this rank's part of the tensors, a GiB a file
        rank_00000.json                                random number generators; one file a rank
        metrics.jsonl                                  the run's records so far
        manifest.json                                  everything else: step, data position, recipe, checksums
        COMPLETE                                       the manifest's checksum; written last

A folder without a COMPLETE that fits its manifest does not count. Nothing in it is a pickle, and files
that the manifest does not name are refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from toolkit.errors import BadInputError

FORMAT = 1
FOLDER = "checkpoints"
MANIFEST = "manifest.json"
COMPLETE = "COMPLETE"
METRICS = "metrics.jsonl"
STEP_FOLDER = re.compile(r"step_(\d{8,})")
# No separator and no leading dot, so that a name stays in its folder.
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
CHUNK_BYTES = 2**22


@dataclass(frozen=True)
class FileEntry:
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is, apart from its tensors.

    Attributes:
        step: optimizer steps taken.
        samples: of the run, seen by all ranks; the data position, in the seed's global order.
        world_size, strategy, precision: of the run that wrote it; another may read it.
        recipe: resolved, as it was.
        data: identifies the tokenised data.
        stream: where a stream goes on; None: the position says all.
        trainer: counters.
        scaler: state of fp16's gradient scaler; None without.
        eval_loss: of the last evaluation; None where there was none.
        tensors: name -> [type, shape of the whole].
        files: name -> size and checksum.
    """

    step: int
    samples: int
    world_size: int
    strategy: str
    precision: str
    recipe: dict[str, Any]
    data: str
    trainer: dict[str, Any]
    scaler: dict[str, Any] | None
    eval_loss: float | None
    date: str
    versions: dict[str, str]
    stream: dict[str, Any] | None = None
    tensors: dict[str, list[Any]] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises ValueError, KeyError or TypeError for what is not a manifest."""
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']}, but this version reads {FORMAT}")
        files = {name: FileEntry(**entry) for name, entry in values.pop("files").items()}
        # Fields that this version does not know are left out; each one that it needs must be there.
        return cls(**{key.name: values[key.name] for key in fields(cls) if key.name != "files"}, files=files)


@dataclass(frozen=True)
class Checkpoint:
    """A folder of `checkpoints/`; `problem` says why it does not count, if so."""

    folder: Path
    step: int
    manifest: Manifest | None
    problem: str | None


def step_folder(run: Path, step: int) -> Path:
    return run / FOLDER / f"step_{step:08d}"


def list_checkpoints(run: Path) -> list[Checkpoint]:
    """All of a run, by step. What has no marker yet is listed with that as its problem."""
    found = []
    for folder in sorted((run / FOLDER).glob("step_*")):
        match = STEP_FOLDER.fullmatch(folder.name)
        if match is not None and folder.is_dir():
            found.append(_read(folder, int(match[1])))
    # By number: past eight digits the names no longer sort like their steps.
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def latest(run: Path) -> Checkpoint | None:
    """The last checkpoint that counts: found by looking, no link can lie."""
    whole = [checkpoint for checkpoint in list_checkpoints(run) if checkpoint.problem is None]
    return whole[-1] if whole else None


def read_checkpoint(folder: Path) -> Manifest:
    """The manifest of a checkpoint that counts. Raises BadInputError where it does not."""
    checkpoint = _read(folder, -1)
    if checkpoint.manifest is None or checkpoint.problem is not None:
        raise BadInputError(f"{str(folder)!r} is no whole checkpoint: {checkpoint.problem}")
    return checkpoint.manifest


def _read(folder: Path, step: int) -> Checkpoint:
    try:
        text = (folder / MANIFEST).read_bytes()
        marker = (folder / COMPLETE).read_text(encoding="ascii").strip()
        if marker != hashlib.sha256(text).hexdigest():
            return Checkpoint(folder, step, None, f"{COMPLETE} does not fit {MANIFEST}")
        manifest = Manifest.from_json(text.decode("utf-8"))
    except FileNotFoundError as error:
        return Checkpoint(folder, step, None, f"{Path(str(error.filename)).name} is missing: it was not finished")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Checkpoint(folder, step, None, f"{MANIFEST} cannot be read: {type(error).__name__}: {error}")
    return Checkpoint(folder, manifest.step, manifest, _misnamed(folder, manifest) or _missing(folder, manifest))


def _misnamed(folder: Path, manifest: Manifest) -> str | None:
    """A manifest from elsewhere must not lead out of its folder."""
    for name in manifest.files:
        if FILE_NAME.fullmatch(name) is None or (folder / name).is_symlink():
            return f"{MANIFEST} names {name!r}, which is no plain file of its folder"
    return None


def _missing(folder: Path, manifest: Manifest) -> str | None:
    """Files that are not there, that have another size, or that nobody has named."""
    there = {path.name for path in folder.iterdir()} - {MANIFEST, COMPLETE}
    if there != manifest.files.keys():
        odd = sorted(there.symmetric_difference(manifest.files))
        return f"{odd[0]} is {'not named in' if odd[0] in there else 'missing, but named in'} {MANIFEST}"
    # Sizes alone: checksums are compared when a checkpoint is loaded or verified (`check_files`).
    for name, entry in manifest.files.items():
        size = (folder / name).stat().st_size
        if size != entry.bytes:
            return f"{name} has {size} bytes instead of {entry.bytes}"
    return None


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> str | None:
    """The first of the named files whose content is not what was written; None where all are."""
    for name in names:
        if file_entry(folder / name).sha256 != manifest.files[name].sha256:
            return f"{name} is not what was written: its checksum differs"
    return None


def file_entry(path: Path) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(size, digest.hexdigest())


def write_synced(path: Path, text: str) -> None:
    """Writes a file that is on the disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
