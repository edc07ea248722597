"""Reads and writes stores such as S3 through fsspec.

The drivers read credentials and endpoints themselves (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on, and their own
files). They appear in no recipe and no message.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from toolkit.errors import BadInputError, StoreError, ToolkitError, in_words
from toolkit.paths import install_command
from toolkit.published import without_secrets

DRIVERS = {"s3": "s3fs", "gs": "gcsfs"}
"""Protocol, and extra of this package -> its driver. The other one is part of fsspec."""

PART_BYTES = 2**24
"""The bytes of a part of an object that is copied in parts."""

PARTS_AT_ONCE = 4
"""The parts that are in memory at once: 64 MiB per rank. By default s3fs holds ten parts of 50 MiB."""


@dataclass(frozen=True)
class _Entry:
    """What a listing says about a file or folder."""

    is_folder: bool
    is_link: bool
    st_size: int


@dataclass(frozen=True)
class StorePath:
    """A file or folder in a store, with the methods of `pathlib.Path` that checkpoints use.

    A failing store is not the same as a damaged checkpoint, so all errors but FileNotFoundError become StoreError.

    Attributes:
        url: the URL, such as `s3://bucket/runs/first`, without a slash at the end.
    """

    url: str
    _found: _Entry | None = field(default=None, compare=False, repr=False)

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """Returns the last part of the URL."""
        return self.url.rpartition("/")[2]

    def is_relative_to(self, other: StorePath) -> bool:
        """Returns whether it is `other` or lies inside it."""
        return f"{self.url}/".startswith(f"{other.url}/")

    def iterdir(self) -> Iterator[StorePath]:
        """Yields the files and folders in it.

        Raises:
            FileNotFoundError: if there is no such folder.
        """
        with _file_system(self.url) as (system, path):
            entries = system.ls(path, detail=True)
        for entry in entries:
            name = entry["name"].rstrip("/").rpartition("/")[2]
            if name and entry["name"].rstrip("/") != path.rstrip("/"):
                yield StorePath(f"{self.url}/{name}", _read_entry(entry))

    def stat(self) -> _Entry:
        """Returns its `st_size` (bytes), and whether it is a folder or a link."""
        if self._found is not None:
            return self._found
        with _file_system(self.url) as (system, path):
            return _read_entry(system.info(path))

    def require_driver(self) -> None:
        """Imports the driver.

        Raises:
            BadInputError: if the driver cannot be imported, or a file is in place of the folder.
        """
        with _file_system(self.url) as (_, path):
            if self.url.startswith("file://"):
                first = next(folder for folder in (Path(path), *Path(path).parents) if folder.exists())
                if not first.is_dir():
                    raise BadInputError(f"checkpoint.to: {str(first)!r} is not a folder; name another place")

    def exists(self) -> bool:
        """Returns whether it exists."""
        with _file_system(self.url) as (system, path):
            return bool(system.exists(path))

    def is_dir(self) -> bool:
        """Returns whether it is an existing folder."""
        try:
            return self.stat().is_folder
        except FileNotFoundError:
            return False

    def is_symlink(self) -> bool:
        """Returns whether it is a link."""
        return self.stat().is_link

    def open(self, mode: str = "rb") -> BinaryIO:
        """Opens the file in a binary mode."""
        with _file_system(self.url) as (system, path):
            return system.open(path, mode)  # type: ignore[no-any-return]

    def read_bytes(self) -> bytes:
        """Reads the whole file."""
        with _file_system(self.url) as (system, path):
            return system.cat_file(path)  # type: ignore[no-any-return]

    def write_bytes(self, content: bytes) -> None:
        """Writes a small file."""
        with _file_system(self.url) as (system, path):
            system.pipe_file(path, content)

    def unlink(self) -> None:
        """Deletes the file, if it exists."""
        with _file_system(self.url) as (system, path):
            if system.exists(path):
                system.rm_file(path)

    def remove_tree(self) -> None:
        """Deletes the folder and everything in it, if it exists."""
        with _file_system(self.url) as (system, path):
            if system.exists(path):
                system.rm(path, recursive=True)

    def put(self, source: Path) -> None:
        """Copies a local file to this place.

        Raises:
            StoreError: if the copy has another size, or the store fails.
        """
        with _file_system(self.url) as (system, path):
            system.put_file(str(source), path, **self._copy_options())
            size = system.info(path)["size"]
        if size != source.stat().st_size:
            raise StoreError(f"{self.url} is not what was copied: it has {size} bytes")

    def get(self, to: Path) -> None:
        """Copies the file to a local one."""
        with _file_system(self.url) as (system, path):
            system.get_file(path, str(to), **self._copy_options())

    def _copy_options(self) -> dict[str, int]:
        """Returns options that limit the memory of a copy, for the driver that needs them."""
        is_s3 = self.url.startswith("s3://")
        return {"chunksize": PART_BYTES, "max_concurrency": PARTS_AT_ONCE} if is_s3 else {}


def store_of(url: str | None) -> StorePath | None:
    """Returns the store that a recipe names, or None, and imports its driver. Collective.

    Raises:
        BadInputError: on every rank, if the driver is missing on one.
    """
    if url is None:
        return None
    from toolkit import ranks  # torch, without which checkpoints are listed

    store = StorePath(url)
    ranks.on_every_rank(store.require_driver, "open checkpoint.to")
    return store


def _read_entry(entry: dict[str, Any]) -> _Entry:
    return _Entry(entry["type"] == "directory", bool(entry.get("islink")), int(entry["size"] or 0))


@contextmanager
def _file_system(url: str) -> Iterator[tuple[Any, str]]:
    """Yields the store's file system and the path in it. Turns errors of the driver into StoreError in plain words."""
    protocol = url.partition("://")[0]
    try:
        # Imported here: only a run with a store needs it. No listing is cached: other ranks and hosts write, too.
        from fsspec.core import url_to_fs

        options = {"auto_mkdir": True} if protocol == "file" else {}
        system, path = url_to_fs(url, use_listings_cache=False, **options)
        yield system, path
    except ImportError as error:
        raise BadInputError(
            f"{protocol}:// needs the driver {DRIVERS[protocol]}, which cannot be imported "
            f"({without_secrets(str(error))}); {install_command(protocol)}"
        ) from error
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "no such file or folder", url) from error
    except ToolkitError:
        raise
    # Drivers raise the exceptions of their libraries: of the network, of HTTP, of the cloud.
    except Exception as error:
        if "Credentials" in type(error).__name__:
            raise BadInputError(
                f"checkpoint.to: {url}: its driver finds no credentials ({without_secrets(in_words(error))}); set "
                "them, for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile of the driver's own"
            ) from error
        raise StoreError(f"{url}: {without_secrets(in_words(error))}") from error
