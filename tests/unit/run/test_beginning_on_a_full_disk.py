"""A disk that is full or read-only at the start of a run is an error that names the folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.errors import BadInputError
from toolkit.run.folder.folder import write_beginning


def run_in(folder: Path) -> Any:
    opened = SimpleNamespace(output_dir=folder)
    return SimpleNamespace(opened=opened, fit=None, tokenizer=None)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_the_folder_is_named(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux refuses to unlink anything, there or not, on a disk that was mounted read-only meanwhile."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    told = f"training.output_dir: '{tmp_path}' cannot be written: {os.strerror(number)}; name another folder"
    with pytest.raises(BadInputError, match=told):
        write_beginning(run_in(tmp_path))


def test_another_error_is_not_blamed_on_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "a cable")

    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(OSError, match="a cable"):
        write_beginning(run_in(tmp_path))
