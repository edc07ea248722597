"""A store that fsspec reads and writes, as S3: paths in it, and files that are compared after they were copied.

Credentials and endpoints are the driver's own matter (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on, and files that
the drivers know): they stand in no recipe and no message.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from toolkit import ranks
from toolkit.errors import BadInputError, StoreError, ToolkitError, in_words, without_secrets

EXTRAS = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gs")}
"""Protocol -> its driver, and the extra of this package that installs it; the others are part of fsspec."""

PART_BYTES = 2**24
"""Of an object that is copied in parts."""

PARTS_AT_ONCE = 4
"""In memory: 64 MiB a rank. By default s3fs holds ten of 50 MiB."""


@dataclass(frozen=True)
class _Found:
    """What a listing says of a file or folder."""

    is_folder: bool
    is_link: bool
    st_size: int


@dataclass(frozen=True)
class StorePath:
    """A file or folder in a store: of `pathlib.Path` what checkpoints use.

    A store that fails is no damage: all but FileNotFoundError is raised as StoreError.

    Attributes:
        url: as `s3://bucket/runs/first`, without a slash at the end.
    """

    url: str
    _found: _Found | None = field(default=None, compare=False, repr=False)

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        return StorePath(self.url.rpartition("/")[0])

    def is_relative_to(self, other: StorePath) -> bool:
        return f"{self.url}/".startswith(f"{other.url}/")

    def iterdir(self) -> Iterator[StorePath]:
        """The files and folders in it. Raises FileNotFoundError if there is none."""
        with _driven(self.url) as (system, path):
            entries = system.ls(path, detail=True)
        for entry in entries:
            name = entry["name"].rstrip("/").rpartition("/")[2]
            if name and entry["name"].rstrip("/") != path.rstrip("/"):
                yield StorePath(f"{self.url}/{name}", _described(entry))

    def stat(self) -> _Found:
        """Its `st_size` (bytes) and kind."""
        if self._found is not None:
            return self._found
        with _driven(self.url) as (system, path):
            return _described(system.info(path))

    def require_driver(self) -> None:
        """Raises BadInputError if there is no driver for it."""
        with _driven(self.url):
            pass

    def exists(self) -> bool:
        with _driven(self.url) as (system, path):
            return bool(system.exists(path))

    def is_dir(self) -> bool:
        try:
            return self.stat().is_folder
        except FileNotFoundError:
            return False

    def is_symlink(self) -> bool:
        return self.stat().is_link

    def open(self, mode: str = "rb") -> BinaryIO:
        with _driven(self.url) as (system, path):
            return system.open(path, mode)  # type: ignore[no-any-return]

    def read_bytes(self) -> bytes:
        with _driven(self.url) as (system, path):
            return system.cat_file(path)  # type: ignore[no-any-return]

    def write_bytes(self, content: bytes) -> None:
        """Writes a small file, and reads it back."""
        with _driven(self.url) as (system, path):
            system.pipe_file(path, content)
            same = system.cat_file(path) == content
        if not same:
            raise StoreError(f"{self.url} reads back differently from what was written")

    def unlink(self) -> None:
        """Deletes a file, if it is there."""
        with _driven(self.url) as (system, path):
            if system.exists(path):
                system.rm_file(path)

    def remove_tree(self) -> None:
        """Deletes a folder and all that is in it, if it is there."""
        with _driven(self.url) as (system, path):
            if system.exists(path):
                system.rm(path, recursive=True)

    def put(self, source: Path, sha256: str) -> None:
        """Copies a file here and compares the copy; one that is here already stays. Raises StoreError."""
        if self.holds(source, sha256):
            return
        with _driven(self.url) as (system, path):
            system.put_file(str(source), path, **self._in_parts())
        if not self.holds(source, sha256):
            raise StoreError(f"{self.url} is not what was copied: its checksum differs")

    def get(self, to: Path) -> None:
        """Copies it to a local file."""
        with _driven(self.url) as (system, path):
            system.get_file(path, str(to), **self._in_parts())

    def _in_parts(self) -> dict[str, int]:
        """Options of a copy, of the driver that would take much memory without."""
        is_s3 = self.url.startswith("s3://")
        return {"chunksize": PART_BYTES, "max_concurrency": PARTS_AT_ONCE} if is_s3 else {}

    def holds(self, source: Path, sha256: str) -> bool:
        """Whether this is a copy of a file: by the store's own checksum, else by reading it back.

        Args:
            sha256: of the file.
        """
        with _driven(self.url) as (system, path):
            try:
                entry = system.info(path)
            except FileNotFoundError:
                return False
            if entry["size"] != source.stat().st_size:
                return False
            # A sum that differs tells nothing: of an encrypted object it is not of the content.
            return has_own_sum(entry, source) or _sha256(system, path) == sha256


def store_of(url: str | None) -> StorePath | None:
    """The store that a recipe names, with its driver imported. Collective.

    Raises:
        BadInputError: on every rank, if the driver is missing on one.
    """
    if url is None:
        return None
    store = StorePath(url)
    ranks.on_every_rank(store.require_driver, "open checkpoint.to")
    return store


def _described(entry: dict[str, Any]) -> _Found:
    return _Found(entry["type"] == "directory", bool(entry.get("islink")), int(entry["size"] or 0))


def has_own_sum(entry: dict[str, Any], source: Path) -> bool:
    """Whether the checksum that a store tells of an object is that of a file.

    Args:
        entry: what fsspec tells: `ETag` of S3, the MD5 sum of an object or, of one in parts, of its parts' sums;
            `md5Hash` of GCS.
    """
    tag, encoded = str(entry.get("ETag", "")).strip('"'), entry.get("md5Hash")
    if re.fullmatch(r"[0-9a-f]{32}", tag) or encoded:
        digest = _md5(source)
        return digest.hex() == tag or base64.b64encode(digest).decode() == encoded
    if re.fullmatch(r"[0-9a-f]{32}-\d+", tag):
        return _md5_of_parts(source) == tag
    return False


def _md5(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _new_md5).digest()


def _md5_of_parts(path: Path) -> str:
    with path.open("rb") as file:
        sums = [_new_md5(part).digest() for part in iter(lambda: file.read(PART_BYTES), b"")]
    return f"{_new_md5(b''.join(sums)).hexdigest()}-{len(sums)}"


def _new_md5(data: bytes = b"") -> hashlib._Hash:
    return hashlib.md5(data, usedforsecurity=False)


def _sha256(system: Any, path: str) -> str:
    with system.open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _driven(url: str) -> Iterator[tuple[Any, str]]:
    """The store's file system, and the path in it; what goes wrong in the block is told in plain words."""
    protocol = url.partition("://")[0]
    try:
        # Imported here: only a run with a store needs it. No listing is cached: other ranks and hosts write, too.
        from fsspec.core import url_to_fs

        options = {"auto_mkdir": True} if protocol == "file" else {}
        system, path = url_to_fs(url, use_listings_cache=False, **options)
        yield system, path
    except ImportError as error:
        driver, extra = EXTRAS.get(protocol, (protocol, protocol))
        raise BadInputError(
            f"{protocol}:// needs the driver {driver}, which cannot be imported ({without_secrets(str(error))}); "
            f"pip install {driver}, or finetune-toolkit[{extra}]"
        ) from error
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "no such file or folder", url) from error
    except ToolkitError:
        raise
    # Drivers raise what their libraries raise: of the network, of HTTP, of the cloud's own.
    except Exception as error:
        if "Credentials" in type(error).__name__:
            raise BadInputError(
                f"checkpoint.to: {url}: its driver finds no credentials ({without_secrets(in_words(error))}); set "
                "them, for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile of the driver's own"
            ) from error
        raise StoreError(f"{url}: {without_secrets(in_words(error))}") from error
