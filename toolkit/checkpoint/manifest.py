"""Defines what a checkpoint's folder holds and when it counts: files, their checksums, and the completion marker.

    checkpoints/step_00000100/
        shard-00001-model-00001-of-00001.safetensors   this rank's part of the tensors, a GiB a file
        rank_00000.json                                random number generators; one file a rank
        metrics.jsonl                                  the run's records so far
        manifest.json                                  everything else: step, data position, recipe, checksums
        COMPLETE                                       the manifest's checksum; written last

A folder counts only if its COMPLETE fits its manifest, and if its weights and its step were finite: otherwise training
could learn nothing from there. Nothing in it is a pickle, and files that the manifest does not name are refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from toolkit.checkpoint.store import StorePath
from toolkit.errors import BadInputError, first_line
from toolkit.paths import CHECKPOINTS, STEP_FOLDER, STORES, is_store, read_foreign
from toolkit.recipe.schema import CheckpointSection

FORMAT = 1
MANIFEST = "manifest.json"
COMPLETE = "COMPLETE"
METRICS = "metrics.jsonl"
UNFINISHED = ".unfinished"
"""The ending of the hidden folders in which a checkpoint is written."""
SET_ASIDE = ".set_aside"
"""The ending of the folder of a checkpoint that a run has passed over. It does not count any more."""
MODEL_FILES = "model"
"""The folder of a run with the model's configuration and tokenizer."""
# No separator and no leading dot, so that a name stays in its folder.
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
CHUNK_BYTES = 2**22
UNKNOWN = -1
"""The step of a folder whose name does not contain one."""
Place = Path | StorePath
P = TypeVar("P", Path, StorePath)

DIGESTS = ("data", "content", "base", "teacher", "adapter")
"""Digests of what a run reads that are fields of a manifest; those of others are in `named`."""


@dataclass(frozen=True)
class FileEntry:
    """The size of a file in bytes and its SHA-256."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything of a checkpoint except its tensors. Fields that an older version did not write have their defaults.

    Attributes:
        step: the number of optimizer steps taken.
        samples: the number of samples that all ranks have seen: the data position in the seed's global order.
        world_size, strategy, precision: those of the run that wrote it. A run with others may read it.
        recipe: the resolved recipe of that run.
        data: identifies the tokenised data.
        content: identifies the files of a stream, and the images of rows, by their content. None if there are none of
            both, or an older version wrote it.
        stream: the position in a stream, or None if `samples` is enough.
        trainer: the trainer's counters.
        scaler: the state of fp16's gradient scaler, or None without it.
        eval_loss: the loss of the last evaluation, or None if there was none.
        merit: the figure of that evaluation by `training.best_by`, the larger the better. None if there was none. For
            checkpoints of older versions it follows from `eval_loss`.
        base: the fingerprint of the base's files that the run began with. Older versions have it only if training
            still needs the base: its weights are frozen, or it is the reference.
        teacher: the fingerprint of the teacher's files, or None if there is none.
        adapter: the fingerprint of the adapter of `adapter.start_from`, or None if training began with a new one.
        named: a digest of each further file that the recipe names, by its field. Older versions recorded none.
        scorer: of older versions, the fingerprint of the source of the function that scores answers.
        extensions: the states of the user's own extensions, by their fields.
        non_finite: what is not finite in it, in words, or None if its weights and its step are finite.
        story: the record of the run up to it, or None if an older version wrote it.
        loads: of older versions, loads of experts that were not recorded yet.
        tensors: the dtype and the whole shape of each tensor, by name.
        files: the size and checksum of each file, by name.
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
    named: dict[str, str] = field(default_factory=dict)
    scorer: str | None = None
    extensions: dict[str, Any] = field(default_factory=dict)
    non_finite: str | None = None
    loads: tuple[int, list[list[float]]] | None = None
    merit: float | None = None
    story: dict[str, Any] | None = None
    tensors: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    format: int = FORMAT

    def digests(self) -> dict[str, str | None]:
        """Returns a digest of all that the run read, by its name."""
        fields = {name: getattr(self, name) for name in DIGESTS}
        return fields | ({} if self.scorer is None else {"answers.compare": self.scorer}) | self.named

    def to_json(self) -> str:
        """Returns the manifest as JSON."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: bytes | str) -> Manifest:
        """Reads a manifest from JSON. Ignores unknown fields. Fields that an older version did not write get defaults.

        Raises:
            ValueError: if the text is not a manifest of this format.
        """
        # Strict: a manifest may come from anywhere, and its values are used unchanged.
        manifest = _type_adapter().validate_json(text, strict=True)
        if manifest.format != FORMAT:
            raise ValueError(f"format {manifest.format}, but this version reads {FORMAT}")
        return manifest


@functools.cache
def _type_adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


@dataclass(frozen=True)
class Checkpoint:
    """A folder of `checkpoints/`.

    Attributes:
        folder: the folder.
        step: the step by its name or its manifest.
        manifest: the manifest, or None if it could not be read.
        problem: why the checkpoint does not count, or None if it counts.
        unfinished: whether it has no marker, because it is being written or its writing was interrupted.
    """

    folder: Place
    step: int
    manifest: Manifest | None
    problem: str | None
    unfinished: bool = False


def place_of(name: str | Path) -> Place:
    """Returns the path or the place in a store that a name stands for."""
    return StorePath(str(name).rstrip("/")) if is_store(str(name)) else Path(name)


def read_file(path: Place) -> bytes:
    """Reads a file of a run or a checkpoint, which may come from anywhere. Raises OSError if it has no end."""
    return read_foreign(path) if isinstance(path, Path) else path.read_bytes()


def place_named(name: str) -> Place:
    """Returns what a name on a command line stands for. Raises BadInputError for a URL of no known store."""
    protocol, _, place = name.partition("://")
    if "\0" in name:
        raise BadInputError(f"{name!r}: a name of a folder has no NUL character; remove it")
    if not is_store(name):
        return Path(name).expanduser()
    if protocol not in STORES or not place.strip("/"):
        allowed = ", ".join(f"{known}://" for known in STORES)
        raise BadInputError(
            f"{name!r} is not a folder in a known store; name a folder, or one in a store, for example "
            f"s3://bucket/runs/first; allowed: {allowed}"
        )
    return place_of(name)


def step_folder(run: P, step: int) -> P:
    """Returns the folder of the checkpoint of a step."""
    return run / CHECKPOINTS / f"step_{step:08d}"


def list_checkpoints(run: Place) -> list[Checkpoint]:
    """Returns all checkpoints of a run, by step. Those without a marker have that as their problem."""
    found = []
    for folder in _list_folder(run / CHECKPOINTS):
        match = STEP_FOLDER.fullmatch(folder.name)
        if match is not None and folder.is_dir():
            found.append(_read_folder(folder, int(match[1])))
    # By number: past eight digits the names no longer sort like their steps.
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def _list_folder(folder: Place) -> Iterator[Place]:
    try:
        yield from folder.iterdir()
    except OSError:  # no such folder, or it cannot be listed; a store that fails raises StoreError, which is no OSError
        return


def latest(run: Place) -> Checkpoint | None:
    """Returns the last checkpoint that counts, or None. Lists all, because a link to the last one could be wrong."""
    whole = [checkpoint for checkpoint in list_checkpoints(run) if checkpoint.problem is None]
    return whole[-1] if whole else None


def read_checkpoint(folder: Place) -> Manifest:
    """Reads the manifest of a checkpoint.

    Raises:
        BadInputError: if the checkpoint does not count.
    """
    checkpoint = look_at(folder)
    if checkpoint.unfinished and not folder.is_dir():
        raise BadInputError(f"there is no checkpoint {str(folder)!r}; name another (`toolkit checkpoints` lists them)")
    if checkpoint.manifest is None or checkpoint.problem is not None:
        raise BadInputError(f"{str(folder)!r} is not a complete checkpoint: {checkpoint.problem}; name another")
    return checkpoint.manifest


def look_at(folder: Place) -> Checkpoint:
    """Reads a checkpoint's folder and checks it, except for the content of its files (see `check_files`)."""
    named = STEP_FOLDER.fullmatch(folder.name)
    return _read_folder(folder, UNKNOWN if named is None else int(named[1]))


def _read_folder(folder: Place, step: int) -> Checkpoint:
    try:
        marker = read_file(folder / COMPLETE).strip()
    except FileNotFoundError:
        if not (folder / MANIFEST).exists():
            return Checkpoint(folder, step, None, f"{MANIFEST} is missing: it was not finished", unfinished=True)
        return Checkpoint(folder, step, None, f"{COMPLETE} is missing: it was not finished", unfinished=True)
    except OSError as error:
        return Checkpoint(folder, step, None, f"{COMPLETE} cannot be read: {first_line(error)}")
    try:
        text = read_file(folder / MANIFEST)
        if marker != hashlib.sha256(text).hexdigest().encode():
            return Checkpoint(folder, step, None, f"{COMPLETE} does not fit {MANIFEST}")
        manifest = Manifest.from_json(text)
        # One listing for all files: in a store each query of a file is a request.
        there = {path.name: path for path in folder.iterdir() if path.name not in (MANIFEST, COMPLETE)}
        problem = _bad_file_name(there, manifest) or _missing_file(there, manifest)
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
    """Returns the first wrong field and why it is wrong."""
    found = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, [".".join(map(str, found["loc"])), found["msg"]]))


def _bad_file_name(there: Mapping[str, Place], manifest: Manifest) -> str | None:
    """Checks that all names are plain files of the folder. A foreign manifest must not lead out of it."""
    for name in manifest.files:
        if FILE_NAME.fullmatch(name) is None or (name in there and there[name].is_symlink()):
            return f"{MANIFEST} names {name!r}, which is not a regular file of its folder"
    return None


def _missing_file(there: Mapping[str, Place], manifest: Manifest) -> str | None:
    """Returns the first file that is missing, has another size, or is not named in the manifest, in words."""
    if there.keys() != manifest.files.keys():
        odd = sorted(there.keys() ^ manifest.files.keys())
        return f"{odd[0]} is {'not named in' if odd[0] in there else 'missing, but named in'} {MANIFEST}"
    # Only sizes: checksums are compared when a checkpoint is loaded or verified (`check_files`).
    for name, entry in manifest.files.items():
        size = there[name].stat().st_size
        if size != entry.bytes:
            return f"{name} has {size} bytes instead of {entry.bytes}"
    return None


def check_files(folder: Place, manifest: Manifest, names: Iterable[str]) -> str | None:
    """Compares checksums. Returns the first of the named files that is damaged, in words, or None if all are good."""
    for name in names:
        try:
            found = file_entry(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {first_line(error)}"
        if found.sha256 != manifest.files[name].sha256:
            return f"{name} is not what was written: its checksum differs"
    return None


def file_entry(path: Place) -> FileEntry:
    """Reads a file and returns its size and checksum."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(size, digest.hexdigest())


# ---- Decides which checkpoints to delete once a new one counts ----


def superseded(found: list[Checkpoint], settings: CheckpointSection) -> list[Checkpoint]:
    """Returns the checkpoints to delete, by `keep_last` and `keep_best`.

    Checkpoints that do not count are not counted among those to keep, and stay. Of those with non-finite values only
    the last stays.
    """
    whole = [checkpoint for checkpoint in found if checkpoint.manifest is not None and checkpoint.problem is None]
    if settings.num_kept is None:
        return []
    broken = [checkpoint for checkpoint in found if checkpoint.manifest and checkpoint.manifest.non_finite is not None]
    kept = {checkpoint.step for checkpoint in whole[-settings.num_kept :]}
    if settings.keep_best and (best := best_of(found)) is not None:
        kept.add(best[1].step)
    return [checkpoint for checkpoint in whole if checkpoint.step not in kept] + broken[:-1]


def best_of(found: Sequence[Checkpoint], recipe: dict[str, Any] | None = None) -> tuple[float, Manifest] | None:
    """Returns merit and manifest of the best checkpoint that counts, the first of equals, or None if none has a merit.

    Args:
        recipe: leave out those that were judged by another figure (`training.best_by`) than this recipe's.
    """
    whole = [one.manifest for one in found if one.manifest is not None and one.problem is None]
    judged = [(merit, manifest) for manifest in whole if (merit := _merit(manifest)) is not None]
    if recipe is not None:
        by = recipe["training"]["best_by"]
        judged = [one for one in judged if one[1].recipe["training"].get("best_by", "loss") == by]
    return max(judged, key=lambda one: one[0]) if judged else None


def _merit(manifest: Manifest) -> float | None:
    if manifest.merit is not None or manifest.eval_loss is None:
        return manifest.merit
    return -manifest.eval_loss
