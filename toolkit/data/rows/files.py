"""Finds the files of a recipe's sources. Imports nothing heavy: `toolkit train` uses it before it starts ranks."""

from __future__ import annotations

import glob
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.utils import infer_compression

from toolkit.data.rows.cache import digest, kept
from toolkit.data.rows.hub_refusals import DATA_SET, hub_error
from toolkit.errors import DataError, ToolkitError, in_words
from toolkit.paths import (
    COMPRESSIONS,
    DATA_SUFFIXES,
    atomic_write,
    file_name,
    install_command,
    is_file_source,
    is_store,
    user_cache,
    without_query,
)
from toolkit.published import without_secrets
from toolkit.recipe.schema import DataSection
from toolkit.terminal import LongAction, Terminal, format_time

TABLES = (".parquet", ".arrow")
"""Endings of files that `datasets` reads."""


def paths_of(data: DataSection, of_stores: bool = True) -> list[str]:
    """Returns the path of every file that a recipe reads; a source that is not a file stands for itself.

    Args:
        of_stores: whether files in stores are downloaded.

    Raises:
        DataError: if one is missing, empty or of an unknown type.
    """
    found = []
    for field, sections in (("data.train", data.train), ("data.validation", data.validation or [])):
        for section in sections:
            is_here = of_stores or not is_store(section.path)
            is_file = is_here and is_file_source(section.path) and not is_saved_dataset(local_path(section.path))
            found += [str(path) for path in expand_files(section.path, field)] if is_file else [section.path]
    return found


def expand_files(source: str, field: str) -> list[Path]:
    """Returns the files of a path or glob, sorted, or the local copies of a URL.

    Raises:
        DataError: if there is none, or one cannot be read.
    """
    if is_store(source):
        paths = list(local_copies(source, field))
    else:
        named = local_path(source)  # a name may hold the signs of a glob, for example brackets
        # `**/**` matches a file more than once.
        found = {str(named)} if os.path.exists(named) else set(glob.glob(str(named), recursive=True))
        paths = [Path(match) for match in sorted(found)]
    if not paths:
        raise DataError(f"{field}: there is no file {source!r}; correct the path, or name a data set of the hub")
    for path in paths:
        if not path.exists():
            raise DataError(f"{field}: {str(path)!r} is a link to a file that does not exist; name another")
        if path.is_dir():
            raise DataError(f"{field}: {source!r} is a folder; name files, for example {source.rstrip('/')}/*.jsonl")
        if path.stat().st_size == 0:
            raise DataError(f"{field}: {str(path)!r} is empty; remove it from {field}, or write rows to it")
        suffix_of(path, field)
    return paths


def local_path(source: str) -> Path:
    """Returns the path with `~` as the user's home; `~` of an unknown user stays."""
    return Path(os.path.expanduser(source))


def suffix_of(path: Path, field: str) -> str:
    """Returns the ending that says what kind of file it is.

    Raises:
        DataError: if such a file cannot be read.
    """
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    name = path.name.removesuffix(compression)
    suffix = next((suffix for suffix in DATA_SUFFIXES if name.endswith(suffix)), None)
    if suffix is None:
        raise DataError(
            f"{field}: {str(path)!r} is of an unknown file type; allowed endings: {', '.join(DATA_SUFFIXES)}"
        )
    if compression and suffix in TABLES:
        raise DataError(f"{field}: {str(path)!r} is a compressed {suffix} file; decompress it first")
    if compression and infer_compression(path.name) is None:
        package = "zstandard" if compression == ".zst" else "a package that reads it"
        raise DataError(f"{field}: {str(path)!r} cannot be decompressed here; install {package}, or decompress it")
    return suffix


def is_saved_dataset(path: Path) -> bool:
    """Returns whether the folder was saved by `datasets`."""
    return any(os.path.isfile(path / name) for name in ("dataset_info.json", "dataset_dict.json"))


# ---- Downloads files of rows from a store or a web server before they are read, and again when they change ----
# fsspec's drivers handle credentials and endpoints, as for checkpoints in a store.

WEB = ("http", "https")
"""Protocols that cannot list files, and whose addresses may contain the characters of a pattern."""

TAGS = ("ETag", "etag", "blob_id", "md5Hash", "generation", "Last-Modified", "LastModified", "mtime", "created")
"""Names of file systems for the state of a file, the most reliable first."""


@cache
def local_copies(url: str, field: str) -> tuple[Path, ...]:
    """Returns this host's copies of the files that a URL, or a pattern of one, names, in the order of their names.

    They are in the user's cache, by the state that the store reports. A process asks once, so that it reads one state
    of a file throughout. If the store cannot be reached, the last copies are read, with a warning on stderr.

    Raises:
        DataError: if there is no such file, it cannot be downloaded, or the driver is missing.
    """
    folder = user_cache() / "downloads"
    index = folder / f"{digest('url', url)}.json"
    if not url.partition("://")[2].strip("/"):
        raise DataError(f"{field}: {url!r} names no file; name one, for example s3://bucket/rows.jsonl")
    with _as_data_errors(url, field):
        try:
            copies = _download(url, folder)
        except (ImportError, ValueError, FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # drivers raise what their libraries raise
            earlier = _last_copies(index)
            if not earlier:
                raise
            day = format_time(index.stat().st_mtime)[:10]  # without the time of day
            why = without_secrets(in_words(error))
            print(
                f"warning: {field}: {without_query(url)} cannot be reached ({why}); its copy of {day} is read",
                file=sys.stderr,
            )
            return earlier
        atomic_write(index, json.dumps([str(path) for path in copies]))
    return copies


def _download(url: str, folder: Path) -> tuple[Path, ...]:
    system, path = url_to_fs(url, use_listings_cache=False)
    if url.partition("://")[0] in WEB:
        infos = [(path, _web_info(system, path))]
    else:
        names = sorted(system.glob(path)) if any(sign in path for sign in "*?[") else [path]
        infos = [(name, system.info(name)) for name in names]
    files = [(name, info) for name, info in infos if info["type"] == "file"]
    if infos and not files:
        raise IsADirectoryError(url)
    if not files:
        raise FileNotFoundError(url)
    return tuple(_local_copy(system, name, info, folder) for name, info in files)


def _web_info(system: Any, name: str) -> dict[str, Any]:
    """Returns what a web server reports about a file; fsspec calls a file missing if its server is silent, too."""
    try:
        return dict(system.info(name))
    except FileNotFoundError as error:
        if error.__cause__ is None or getattr(error.__cause__, "status", None) in (404, 410):
            raise
        raise error.__cause__ from None


def _local_copy(system: Any, name: str, info: dict[str, Any], folder: Path) -> Path:
    """Returns a file's copy. If the store reports no state of the file, every process downloads it."""
    told = [str(info[tag]) for tag in TAGS if info.get(tag)]
    if not told:
        told = [str(time.time_ns())]
    file = file_name(system.unstrip_protocol(name))

    def fetch(unfinished: Path) -> None:
        with LongAction(Terminal(), f"downloading {file}"):
            system.get_file(name, str(unfinished / file))

    return kept(folder / digest("copy", system.unstrip_protocol(name), info.get("size"), told), fetch) / file


def _last_copies(index: Path) -> tuple[Path, ...]:
    """Returns the copies of the last download of a URL; empty if there was none, or they were deleted."""
    try:
        paths = tuple(Path(name) for name in json.loads(index.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return ()
    return paths if all(path.is_file() for path in paths) else ()


@contextmanager
def _as_data_errors(url: str, field: str) -> Iterator[None]:
    """Raises errors of the block as DataError."""
    protocol, shown = url.partition("://")[0], without_query(url)
    try:
        yield
    except DataError:
        raise
    except ImportError as error:
        mend = "pip install aiohttp" if protocol in WEB else "download it first"
        mend = install_command(protocol) if protocol in ("s3", "gs") else mend
        raise DataError(f"{field}: the driver of {protocol}:// cannot be imported ({error}); {mend}") from error
    except IsADirectoryError as error:
        raise DataError(
            f"{field}: {shown!r} is a folder; name files, for example {shown.rstrip('/')}/*.jsonl"
        ) from error
    except FileNotFoundError as error:
        raise _hub_error(error, field, url) or DataError(
            f"{field}: there is no file {shown!r}; correct the address"
        ) from error
    except Exception as error:  # drivers raise what their libraries raise
        mend = "correct the address, or download it first"
        if "Credentials" in type(error).__name__ or isinstance(error, PermissionError):
            mend = "set the driver's credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or HF_TOKEN"
        raise _hub_error(error, field, url) or DataError(
            f"{field}: {shown!r} cannot be read: {without_secrets(in_words(error))}; {mend}"
        ) from error


def _hub_error(error: Exception, field: str, url: str) -> ToolkitError | None:
    """Returns the error of the hub's data set that a URL names, such as hf://datasets/OWNER/NAME@REVISION/rows.jsonl."""
    kind, *parts = url.removeprefix("hf://").split("/")
    if not url.startswith("hf://") or kind != "datasets":
        return None
    name, _, revision = "/".join(parts[:2]).partition("@")
    return hub_error(error, field, name, DATA_SET, revision or None)
