"""Finds folders and files outside a run, and tells paths, URLs and hub names apart."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shlex
import stat
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import BadInputError

GIB = 2**30
CHECKPOINT_FILE_BYTES = GIB // 4
"""The approximate size of a checkpoint file. Saving holds this much in memory next to the state; planning counts it."""
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".tar")
BASE_FILE = "base.json"
"""The file of an exported adapter with the fingerprint of its base, and how that was quantised."""
CHECKPOINTS = "checkpoints"
"""The folder of a run, or of a store, that holds its checkpoints."""
STEP_FOLDER = re.compile(r"step_(\d{8,})")
"""The name of a checkpoint's folder."""
ORIGIN = "training.json"
"""The file of an export that describes its run."""

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""Endings that may follow a data suffix. Such files are decompressed while they are read."""
STORES = ("s3", "gs", "file")
"""Protocols of the stores that checkpoints are copied to."""


def user_cache() -> Path:
    """Returns the folder `finetune-toolkit` in the user's cache."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "finetune-toolkit"
    except RuntimeError:
        problem = "no folder for the cache is known, because this user has no home; set HOME or XDG_CACHE_HOME"
        raise BadInputError(problem) from None


def file_of_rows(rows: Any) -> str:
    """Keeps rows of memory in a file, which has their digest in its name, in the user's cache; returns its path.

    Args:
        rows: mappings, which become JSON lines, or a `datasets.Dataset`, whose parquet keeps names of classes.

    Raises:
        BadInputError: if a value has no place in JSON, or several splits are given.
    """
    if isinstance(rows, Mapping):
        raise BadInputError(f"rows in memory are of several splits ({', '.join(map(str, rows))}); give those of one")
    kind, buffer = "parquet" if hasattr(rows, "to_parquet") else "jsonl", io.BytesIO()
    try:
        if kind == "parquet":
            rows.to_parquet(buffer)
        else:
            buffer.writelines(f"{json.dumps(row, ensure_ascii=False)}\n".encode() for row in rows)
    except (TypeError, ValueError) as error:
        raise BadInputError(f"rows in memory cannot be written as {kind}: {error}; write them to a file") from error
    path = user_cache() / "rows" / f"rows-{hashlib.sha256(buffer.getvalue()).hexdigest()[:12]}.{kind}"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, buffer.getvalue())
    return str(path)


def shipped_folder(name: str) -> Path:
    """Returns the folder `recipes` or `accelerate_configs`: next to the package in a checkout, else inside."""
    package = Path(__file__).resolve().parent
    installed = package / f"_{name}"
    return installed if installed.is_dir() else package.parent / name


def install_command(extra: str) -> str:
    """Returns the command that installs an extra: from the checkout, or without one the packages that it names.

    No package index has the toolkit itself.
    """
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return shlex.join(["pip", "install", "-e", f"{shown_path(checkout)}[{extra}]"])
    from importlib import metadata  # only errors need them

    from packaging.requirements import Requirement

    named = [Requirement(text) for text in metadata.requires("finetune-toolkit") or []]
    needed = [one for one in named if one.marker is not None and one.marker.evaluate({"extra": extra})]
    return shlex.join(["pip", "install", *(f"{one.name}{one.specifier}" for one in needed)])


def shipped_files(name: str) -> dict[str, Path]:
    """Returns the paths of the YAML files that are shipped in a folder, by name."""
    return {path.stem: path for path in sorted(shipped_folder(name).glob("*.yaml"))}


def shown_path(path: Path) -> str:
    """Returns the path as a user would type it: relative inside the working folder, absolute elsewhere."""
    path, here = path.absolute(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def atomic_write(path: Path, content: str | bytes, errors: str = "strict") -> None:
    """Writes `content` to `path`. A reader sees the old file or the new one, never a part, even after a power cut.

    Args:
        path: the file.
        content: text, or bytes.
        errors: how to handle characters that UTF-8 cannot encode, as in `open`.

    Raises:
        OSError: if the file cannot be written.
    """
    # Not tempfile: only their owner can read its files, and these files are there to be shared.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_synced(temporary, content, errors)  # otherwise a power cut may leave an empty file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_synced(path: Path, content: str | bytes, errors: str = "strict") -> None:
    """Writes a file and waits until it is on the disk."""
    with path.open("wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode("utf-8", errors))
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_foreign(path: Path, most_bytes: int = GIB) -> bytes:
    """Reads a file that somebody else may have written, or replaced by something that has no end.

    Raises:
        OSError: if it cannot be read, is not a regular file (opening a FIFO would wait forever), or is larger.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes:,} bytes", str(path))
    return content


def parse_json(content: bytes | str) -> Any:
    """Parses a JSON text that somebody else may have written. Raises ValueError if it is not JSON, or nested too deep.

    Python's own parser raises RecursionError for depth, which nobody expects of a file.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deep") from None


def appears(path: Path, text: str, seconds: float) -> bool:
    """Returns whether a file holds a text within the time for which network file systems cache a folder's listing."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if path.read_text(encoding="utf-8") == text:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.2)


def clear_interrupted_writes(folder: Path) -> None:
    """Deletes files that a killed `atomic_write` has left. No other process may be writing to the folder."""
    for temporary in folder.glob(".*.tmp"):
        temporary.unlink(missing_ok=True)


def is_store(name: str) -> bool:
    """Returns whether a name is a URL, such as s3://bucket/runs/first, and not a path."""
    return "://" in name


def is_file_source(source: str) -> bool:
    """Returns whether a data source is a path, a glob or a URL, and not a hub name."""
    if is_store(source):
        return True
    bare = source
    for ending in COMPRESSIONS:
        bare = bare.removesuffix(ending)
    return bare.endswith(DATA_SUFFIXES) or source.startswith(("/", "./", "../", "~")) or os.path.exists(source)


def without_query(url: str) -> str:
    """Returns a URL without what may be a signature: its query and, on a web server, its fragment."""
    return re.split(r"[?#]" if url.startswith(("http://", "https://")) else r"\?", url, maxsplit=1)[0]


def file_name(source: str) -> str:
    """Returns the last part of a path or URL, without the query, which may hold a signature."""
    return Path(without_query(source) if is_store(source) else source).name


def source_name(source: str) -> str:
    """Returns the last part of a path or URL, which is safe to publish, or a hub name unchanged."""
    return file_name(source) if is_file_source(source) else source


def is_repository(name: str) -> bool:
    """Returns whether the hub allows a repository's name; alone, or after that of its owner."""
    return re.fullmatch(r"(?!.*(--|\.\.)|.*\.git$)(\b[\w.-]{1,96}\b/)?\b[\w.-]{1,96}\b", name, re.ASCII) is not None


def is_hub_name(name: str) -> bool:
    """Returns whether a model is on the hub: it allows the name, and there is no folder of the name here."""
    return is_repository(name) and not Path(name).exists()


def download_command(name: str, revision: str | None) -> str:
    """Returns the command that downloads a model of the hub into its cache, and prints its folder."""
    return shlex.join(["hf", "download", name, *([] if revision is None else ["--revision", revision])])


def told_of_checkpoint(folder: Path) -> str | None:
    """Returns what to do with a checkpoint's folder if a run or a model is needed; None for any other folder."""
    step = STEP_FOLDER.fullmatch(folder.name)
    if step is None or folder.parent.name != CHECKPOINTS:
        return None
    export = ["toolkit", "export", str(folder.parent.parent), "--checkpoint", str(int(step[1])), "--to", "FOLDER"]
    return f"{str(folder)!r} is one checkpoint of a run; export it by `{shlex.join(export)}`"


def require_folder(name: str, field: str) -> None:
    """Checks that a model's folder exists, unless `name` is a hub name.

    Args:
        name: a path or a hub name.
        field: the recipe's field, for the message.

    Raises:
        BadInputError: if `name` is a path and there is no such folder.
    """
    path = Path(name).expanduser()
    if not is_hub_name(name) and not path.is_dir():
        found = "is a file" if path.is_file() else "does not exist"
        # The export of a shipped recipe, such as a teacher that another recipe names.
        maker = path.parent.name if path.match("outputs/*/export") else ""
        mend = f"make it by `toolkit train {maker}`, or " if maker in shipped_files("recipes") else ""
        raise BadInputError(
            f"{field}: the folder {name!r} {found}; {mend}name a model's folder or a hub name, "
            "which looks like Qwen/Qwen3-8B"
        )


def folder_on_this_machine(name: str, revision: str | None) -> Path:
    """Returns a folder, or that of a hub model that was downloaded before.

    Raises:
        OSError: if there is neither.
        ValueError: if there is no such folder, and the hub allows no such name.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, local_files_only=True))


def configuration_digest(folder: Path) -> str | None:
    """Returns a digest of what a model's config.json says, or None if there is none that can be read."""
    try:
        return digest_of_configuration(read_foreign(folder / "config.json"))
    except OSError:
        return None


def digest_of_configuration(content: bytes) -> str | None:
    """Returns a digest of what a config.json of this content says, or None if it is not JSON."""
    try:
        fields = parse_json(content)
    except ValueError:
        return None
    of_writer = ("transformers_version", "_name_or_path")
    said = {name: value for name, value in fields.items() if name not in of_writer} if isinstance(fields, dict) else {}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file with all weights of a model, and the one that maps each tensor to one of several files."""


def _weight_files(folder: Path) -> list[Path]:
    """Returns the files with the weights of a model, as transformers chooses them. Their names may be any."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    try:
        named = parse_json(read_foreign(folder / INDEX))["weight_map"].values()
        return sorted(folder / name for name in {*named} if re.fullmatch(r"[\w.-]+", name))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or one that whoever reads it refuses
        return sorted(folder.glob("model*.safetensors"))


SAMPLED_BYTES = 1024
"""The bytes of a tensor that a fingerprint reads at its start, in its middle and at its end."""


def fingerprint_of(folder: Path, pattern: str | None = None) -> str | None:
    """Returns a fingerprint of the weights in a model's folder, or None if it has no safetensors files.

    It is the SHA-256 of every tensor's name, dtype and shape and of three KiB of its data, because training changes all
    of it. It does not depend on how the tensors are spread over files.

    Args:
        folder: the folder.
        pattern: matches the names of the files to read; None takes the weights of a model.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a file is not whole.
    """
    found: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in _weight_files(folder) if pattern is None else sorted(folder.glob(pattern)):
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
