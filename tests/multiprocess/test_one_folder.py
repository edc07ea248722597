"""Ranks that see different folders under the name of the output folder do not start a run."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from support.ranks import run_on_ranks
from support.texts import write_rows
from support.tiny import recipe_values, save_llama

NEW_MOUNTS = 0x00020000  # CLONE_NEWNS of <sched.h>
TEXTS = ["a king and a queen walked by the river", "the moon was high"]


def mount_another_disk(folder: Path) -> bool:
    """Puts an empty file system over `folder`, for this process alone; whether the system lets us."""
    libc = ctypes.CDLL(None)
    private = 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC: the mount does not leave this process
    return (
        libc.unshare(NEW_MOUNTS) == 0
        and libc.mount(b"none", b"/", None, private, None) == 0
        and libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, None) == 0
    )


def train_on_two_disks(folder: Path) -> tuple[str, int, bool]:
    from toolkit import Recipe, finetune
    from toolkit.errors import ToolkitError
    from toolkit.run.folder import folder as folders

    folders.LISTING_SECONDS = 1.0
    mounted = os.environ["RANK"] == "0" or mount_another_disk(folder / "disk")
    values = recipe_values(folder / "model", folder / "rows.jsonl", folder / "disk/out", folder / "cache", max_steps=2)
    values["checkpoint"] = {"every_steps": 1}
    try:
        finetune(Recipe.from_mapping(values))
    except ToolkitError as error:
        return str(error), error.exit_code, mounted
    return "no error", 0, mounted


def test_two_disks_are_refused(tmp_path: Path) -> None:
    save_llama(tmp_path / "model", TEXTS, tied=True)
    write_rows(tmp_path / "rows.jsonl", ({"text": text} for text in TEXTS * 10))
    (tmp_path / "disk").mkdir()
    found = run_on_ranks(train_on_two_disks, 2, tmp_path)
    if not found[1][2]:
        pytest.fail("this test needs to mount a file system of its own: run it as root of a user namespace")
    for message, exit_code, _ in found:
        assert "is not the same folder on every rank: rank 1 on" in message
        assert "file system that all hosts share" in message
        assert exit_code == 2
    assert list((tmp_path / "disk").iterdir()) == [], "something was left behind"
