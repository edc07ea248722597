"""What a checkpoint's folder holds and when it counts: files, their checksums, and the marker of completion.

    checkpoints/step_00000100/
        shard-00001-model-00001-of-00001.safetensors   this rank's part of the tensors, a GiB a file
        rank_00000.json                                random number generators; one file a rank
        metrics.jsonl                                  the run's records so far
        manifest.json                                  everything else: step, data position, recipe, checksums
        COMPLETE                                       the manifest's checksum; written last

A folder without a COMPLETE that fits its manifest does not count, and neither does one whose weights or step were not
finite: training that goes on from it has nothing to learn. Nothing in it is a pickle, and files that the manifest does
not name are refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from toolkit.checkpoint.store import StorePath
from toolkit.errors import BadInputError, counted, first_line
from toolkit.paths import is_store

FORMAT = 1
FOLDER = "checkpoints"
MANIFEST = "manifest.json"
COMPLETE = "COMPLETE"
METRICS = "metrics.jsonl"
UNFINISHED = ".unfinished"
"""Ending of the hidden folders in which a checkpoint is written."""
SET_ASIDE = ".set_aside"
"""Ending of the folder of a checkpoint that a run has passed over; it does not count any more."""
PASSED_OVER = "PASSED_OVER"
"""In a store, where a folder cannot be renamed: the mark of a checkpoint that a run has set aside; says why."""
STEP_FOLDER = re.compile(r"step_(\d{8,})")
# No separator and no leading dot, so that a name stays in its folder.
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
CHUNK_BYTES = 2**22
UNKNOWN = -1
"""Step of a folder whose name tells none."""
ITEM_BYTES = {"int16": 2, "int32": 4, "int64": 8, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of an element by the types of tensors that have more than one."""

Place = Path | StorePath
P = TypeVar("P", Path, StorePath)


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
        content: of a stream, what was read of its files to know them again; None in checkpoints of before.
        stream: where a stream goes on; None: the position says all.
        trainer: counters.
        scaler: state of fp16's gradient scaler; None without.
        eval_loss: of the last evaluation; None if there was none.
        merit: of that evaluation by `training.best_by`, the larger the better; None if there was none, and in
            checkpoints of before, whose loss says it.
        base: fingerprint of the files of the base, if training goes on to need it: its weights are frozen, or it is
            the reference. None if not, and in checkpoints of before there was a reference here.
        teacher: fingerprint of the files of the model that is learned from; None if there is none.
        adapter: fingerprint of the adapter that training began with (`adapter.start_from`); None if it was new.
        non_finite: what is not finite in it, in words; None: its weights are, and so was its step.
        loads: of experts, since the last record of them: over how many steps, and their sums; None: there are none.
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
    content: str | None = None
    base: str | None = None
    teacher: str | None = None
    adapter: str | None = None
    non_finite: str | None = None
    loads: tuple[int, list[list[float]]] | None = None
    merit: float | None = None
    tensors: dict[str, list[Any]] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: bytes | str) -> Manifest:
        """Raises ValueError for what is not a manifest.

        Fields that this version does not know are left out, and what an older one did not write has its default.
        """
        # Strict: a manifest may come from anywhere, and what it says is used as it is.
        manifest = _adapter().validate_json(text, strict=True)
        if manifest.format != FORMAT:
            raise ValueError(f"format {manifest.format}, but this version reads {FORMAT}")
        return manifest


@functools.cache
def _adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


@dataclass(frozen=True)
class Checkpoint:
    """A folder of `checkpoints/`; `problem` says why it does not count, if so.

    Attributes:
        unfinished: it has no marker: it is being written, or its writing was cut off.
    """

    folder: Place
    step: int
    manifest: Manifest | None
    problem: str | None
    unfinished: bool = False


def place_of(name: str | Path) -> Place:
    """What a name stands for: a path, or a place in a store."""
    return StorePath(str(name).rstrip("/")) if is_store(str(name)) else Path(name)


def step_folder(run: P, step: int) -> P:
    return run / FOLDER / f"step_{step:08d}"


def list_checkpoints(run: Place) -> list[Checkpoint]:
    """All of a run, by step. What has no marker yet is listed with that as its problem."""
    found = []
    for folder in _children(run / FOLDER):
        match = STEP_FOLDER.fullmatch(folder.name)
        if match is not None and folder.is_dir():
            checkpoint = _read(folder, int(match[1]))
            if not (checkpoint.unfinished and (folder / PASSED_OVER).exists()):
                found.append(checkpoint)
    # By number: past eight digits the names no longer sort like their steps.
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _children(folder: Place) -> Iterator[Place]:
    try:
        yield from folder.iterdir()
    except OSError:  # there is none, or it cannot be listed; of a store that fails, StoreError is no OSError
        return


def latest(run: Place) -> Checkpoint | None:
    """The last checkpoint that counts: found by looking, no link can lie."""
    whole = [checkpoint for checkpoint in list_checkpoints(run) if checkpoint.problem is None]
    return whole[-1] if whole else None


def read_checkpoint(folder: Place) -> Manifest:
    """The manifest of a checkpoint that counts. Raises BadInputError if it does not."""
    checkpoint = look_at(folder)
    if checkpoint.manifest is None or checkpoint.problem is not None:
        raise BadInputError(f"{str(folder)!r} is no whole checkpoint: {checkpoint.problem}; name another")
    return checkpoint.manifest


def look_at(folder: Place) -> Checkpoint:
    """The checkpoint of a folder; whether it counts, but for its files' contents (`check_files`)."""
    return _read(folder, UNKNOWN)


def _read(folder: Place, step: int) -> Checkpoint:
    try:
        marker = (folder / COMPLETE).read_bytes().strip()
    except FileNotFoundError:
        if not (folder / MANIFEST).exists():
            return Checkpoint(folder, step, None, f"{MANIFEST} is missing: it was not finished", unfinished=True)
        return Checkpoint(folder, step, None, f"{COMPLETE} is missing: it was not finished", unfinished=True)
    except OSError as error:
        return Checkpoint(folder, step, None, f"{COMPLETE} cannot be read: {first_line(error)}")
    if not marker:  # of a version that wrote it in place, on a disk that was full
        return Checkpoint(folder, step, None, f"{COMPLETE} is empty: it was not finished", unfinished=True)
    try:
        text = (folder / MANIFEST).read_bytes()
        if marker != hashlib.sha256(text).hexdigest().encode():
            return Checkpoint(folder, step, None, f"{COMPLETE} does not fit {MANIFEST}")
        manifest = Manifest.from_json(text)
        # One listing for all: in a store each look at a file is a request.
        there = {path.name: path for path in folder.iterdir() if path.name not in (MANIFEST, COMPLETE)}
        problem = _misnamed(there, manifest) or _lacking(manifest) or _missing(there, manifest)
    except FileNotFoundError as error:
        return Checkpoint(folder, step, None, f"{Path(str(error.filename)).name} is missing")
    except ValidationError as error:
        return Checkpoint(folder, step, None, f"{MANIFEST} cannot be read: {_first_problem(error)}")
    except (OSError, ValueError) as error:
        return Checkpoint(folder, step, None, f"{MANIFEST} cannot be read: {type(error).__name__}: {first_line(error)}")
    if step not in (UNKNOWN, manifest.step):
        problem = f"{MANIFEST} is of step {manifest.step}"
    return Checkpoint(folder, manifest.step if step == UNKNOWN else step, manifest, problem or manifest.non_finite)


def _first_problem(error: ValidationError) -> str:
    """The first field that is wrong, and why."""
    found = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, [".".join(map(str, found["loc"])), found["msg"]]))


def _lacking(manifest: Manifest) -> str | None:
    """What no checkpoint is without: records, generators of each rank, tensors of a known type and a plain shape."""
    if manifest.step < 0 or manifest.samples < 0 or not 0 < manifest.world_size < len(manifest.files):
        named, num_ranks = counted(len(manifest.files), "file"), counted(manifest.world_size, "rank")
        return f"{MANIFEST} names {named} for {num_ranks} at step {manifest.step}"
    for name in (METRICS, *(f"rank_{rank:05d}.json" for rank in range(manifest.world_size))):
        if name not in manifest.files:
            return f"{MANIFEST} does not name {name}"
    num_bytes = 0
    for name, described in manifest.tensors.items():
        size = _tensor_bytes(described)
        if size is None:
            return f"{MANIFEST} describes {name} as {str(described)[:80]}, which is no tensor"
        num_bytes += size
    stored = sum(entry.bytes for name, entry in manifest.files.items() if name.endswith(".safetensors"))
    # Otherwise a few bytes could ask for any amount of memory.
    if num_bytes > stored:
        return f"{MANIFEST} describes tensors of {num_bytes:,} bytes, but names files of {stored:,}"
    return None


def _tensor_bytes(described: list[Any]) -> int | None:
    """Size of a tensor as the manifest describes it; None for what is no such description."""
    match described:
        case [str(dtype), list(shape)] if dtype.isidentifier() and all(type(n) is int and n >= 0 for n in shape):
            # Of a type that is not listed at least a byte: it may be one that a later torch has.
            return ITEM_BYTES.get(dtype, 1) * math.prod(shape)
    return None


def _misnamed(there: Mapping[str, Place], manifest: Manifest) -> str | None:
    """A manifest from elsewhere must not lead out of its folder."""
    for name in manifest.files:
        if FILE_NAME.fullmatch(name) is None or (name in there and there[name].is_symlink()):
            return f"{MANIFEST} names {name!r}, which is no plain file of its folder"
    return None


def _missing(there: Mapping[str, Place], manifest: Manifest) -> str | None:
    """Files that are not there, that have another size, or that nobody has named."""
    if there.keys() != manifest.files.keys():
        odd = sorted(there.keys() ^ manifest.files.keys())
        return f"{odd[0]} is {'not named in' if odd[0] in there else 'missing, but named in'} {MANIFEST}"
    # Sizes alone: checksums are compared when a checkpoint is loaded or verified (`check_files`).
    for name, entry in manifest.files.items():
        size = there[name].stat().st_size
        if size != entry.bytes:
            return f"{name} has {size} bytes instead of {entry.bytes}"
    return None


def check_files(folder: Place, manifest: Manifest, names: Iterable[str]) -> str | None:
    """The first of the named files whose content is not what was written; None if all are."""
    for name in names:
        try:
            found = file_entry(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {first_line(error)}"
        if found.sha256 != manifest.files[name].sha256:
            return f"{name} is not what was written: its checksum differs"
    return None


def file_entry(path: Place) -> FileEntry:
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
