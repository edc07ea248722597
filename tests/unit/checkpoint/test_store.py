"""Checkpoints in a store, here fsspec's memory: copied while training goes on, marked last, and never half there."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_manifest import COMPLETE, MANIFEST, PLAIN, written

from toolkit import Recipe
from toolkit.checkpoint import store as stores
from toolkit.checkpoint import writer
from toolkit.checkpoint.manifest import check_files, list_checkpoints, step_folder
from toolkit.checkpoint.resume import find, set_aside
from toolkit.checkpoint.store import StorePath
from toolkit.checkpoint.writer import Checkpointer, Save
from toolkit.errors import BadInputError, StoreError
from toolkit.recipe.schema import CheckpointSection


@pytest.fixture
def store() -> StorePath:
    return StorePath(f"memory://{uuid.uuid4().hex}/run")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(writer, "TELL_SECONDS", 0.0)


class Saves:
    """A checkpointer of one tensor, and what it told."""

    def __init__(self, run: Path, store: StorePath, **settings: Any) -> None:
        self.told: list[str] = []
        section = CheckpointSection(every_steps=1, **settings)
        self.checkpointer = Checkpointer(run, section, self.told.append, store)

    def save(self, step: int, loss: float | None = None) -> None:
        manifest = replace(PLAIN, step=step, world_size=1, eval_loss=loss)
        self.checkpointer.save(Save(manifest, {"model.a": torch.full((4,), float(step))}, ["a"], {}, []))
        self.checkpointer.wait()

    def finish(self, seconds: float = 60.0) -> str | None:
        assert self.checkpointer.uploads is not None
        return self.checkpointer.uploads.finish(seconds, lambda text: None)


def copied(folder: Path, to: StorePath) -> StorePath:
    """A checkpoint that was made on the disk, in the store as it is."""
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def steps(store: StorePath) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(store) if checkpoint.problem is None]


def test_what_is_saved_is_in_the_store_too(tmp_path: Path, store: StorePath) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    saves = Saves(tmp_path, store)
    for step in (1, 2, 3):
        saves.save(step)
        assert saves.finish() is None
    assert (steps(store), saves.told) == ([2, 3], [])
    assert (store / "model/config.json").read_bytes() == b"{}"
    last = list_checkpoints(store)[-1]
    assert last.manifest is not None
    assert check_files(last.folder, last.manifest, last.manifest.files) is None
    found = find(tmp_path / "elsewhere", "auto", PLAIN.recipe, store)
    assert found.start is not None
    assert (found.start[1].step, found.is_own, found.origin) == (3, True, f"{store}/checkpoints/step_00000003")
    assert check_files(found.start[0], found.start[1], found.start[1].files) is None


def test_rotation_keeps_the_best(tmp_path: Path, store: StorePath) -> None:
    saves = Saves(tmp_path, store, keep_last=1, keep_best=True)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None)):
        saves.save(step, loss)
        saves.finish()
    assert steps(store) == [2, 4]


@pytest.mark.parametrize("kind", ["flipped", "a file gone"])
def test_damage_in_the_store_is_passed_over_by_name(kind: str, tmp_path: Path, store: StorePath) -> None:
    for step in (5, 7):
        copied(written(tmp_path / "made", step), step_folder(store, step))
    shard = step_folder(store, 7) / "shard.safetensors"
    content = bytearray(shard.read_bytes())
    content[3] ^= 1
    shard.write_bytes(content) if kind == "flipped" else shard.unlink()
    run = tmp_path / "run"
    found = find(run, "auto", PLAIN.recipe, store)
    assert found.start is not None
    assert found.start[1].step == 5
    (told,) = set_aside(found.passed_over, run)
    assert told.startswith(f"passed over {store}/checkpoints/step_00000007: shard.safetensors is ")


def test_a_run_elsewhere_goes_on_from_a_store(tmp_path: Path, store: StorePath) -> None:
    copied(written(tmp_path / "made", 5), step_folder(store, 5))
    for name in (store.url, str(step_folder(store, 5))):
        found = find(tmp_path / "new", name, PLAIN.recipe)
        assert found.start is not None
        assert (found.start[1].step, found.is_own) == (5, False)
    with pytest.raises(BadInputError, match="has later checkpoints"):
        find(tmp_path / "new", "never", PLAIN.recipe, store)


def test_an_interrupted_copy_is_no_checkpoint_and_is_cleared_away(tmp_path: Path, store: StorePath) -> None:
    copied(written(tmp_path / "made", 5), step_folder(store, 5))
    (copied(written(tmp_path / "made", 7), step_folder(store, 7)) / COMPLETE).unlink()
    found = find(tmp_path / "run", "auto", PLAIN.recipe, store)
    assert found.start is not None
    assert (found.start[1].step, found.passed_over) == (5, ())
    Saves(tmp_path / "run", store)
    assert [path.name for path in (store / "checkpoints").iterdir()] == ["step_00000005"]


@pytest.mark.usefixtures("quick")
def test_a_store_that_fails_is_tried_again(tmp_path: Path, store: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once while the run goes on; what is missing at the end is copied by the next start, over what is there."""
    put, times = StorePath.put, iter([True, False, True])

    def failing(self: StorePath, source: Path) -> None:
        if next(times, False):
            raise StoreError("out of order")
        put(self, source)

    with monkeypatch.context() as broken:
        broken.setattr(StorePath, "put", failing)
        saves = Saves(tmp_path, store)
        saves.save(1)
        assert saves.finish() is None
    assert steps(store) == [1]
    assert saves.told[0].endswith("out of order; the run goes on, and it is tried again")
    assert saves.told[-1] == f"the checkpoint of step 1 is in {store} now"
    with monkeypatch.context() as broken:
        broken.setattr(StorePath, "put", lambda *_: (_ for _ in ()).throw(StoreError("out of order")))
        saves.save(2)
        assert saves.finish(0.05) == f"the checkpoint of step 2 is not in {store}: out of order"
    assert steps(store) == [1]
    assert Saves(tmp_path, store).finish() is None
    assert steps(store) == [1, 2]


def test_copying_slower_than_saving(tmp_path: Path, store: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """No save waits for a copy, and none deletes what is copied. One waits; those between are said to be dropped."""
    put, begun, goes_on = StorePath.put, threading.Event(), threading.Event()

    def slow(self: StorePath, source: Path) -> None:
        begun.set()
        assert goes_on.wait(600)
        put(self, source)

    monkeypatch.setattr(StorePath, "put", slow)
    monkeypatch.setattr(writer, "TELL_SECONDS", 0.0)
    saves = Saves(tmp_path, store, keep_last=1)
    saves.save(1)
    assert begun.wait(600)
    for step in (2, 3, 4):
        saves.save(step)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path)] == [1, 4]
    monkeypatch.setattr(writer, "superseded", lambda *_: [])
    goes_on.set()
    assert saves.finish() is None
    assert steps(store) == [1, 4]
    assert [line.partition(" is not copied")[0][-6:] for line in saves.told] == ["step 2", "step 3"]
    assert "copying is slower than saving" in saves.told[0]


def test_a_copy_that_is_cut_is_found(tmp_path: Path, store: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"right")
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.put_file", lambda self, *_: None)
    (store / "a").write_bytes(b"cut")
    with pytest.raises(StoreError, match="is not what was copied: it has 3 bytes"):
        (store / "a").put(tmp_path / "a")


@pytest.mark.parametrize("key", ["to", "resume"])
@pytest.mark.parametrize("url", ["ftp://a/b", "s3://", "s3://bucket/", "file://relative", "s3:///", "azure://x/y"])
def test_urls_that_are_no_store(key: str, url: str) -> None:
    with pytest.raises(BadInputError, match=rf"checkpoint\.{key}: found '{url}'; needs a folder in a store"):
        Recipe.load("quickstart", {f"checkpoint.{key}": url})


def test_credentials_are_in_no_recipe_and_no_message() -> None:
    with pytest.raises(BadInputError, match=r"checkpoint\.to: holds credentials") as found:
        Recipe.load("quickstart", {"checkpoint.to": "s3://AKIA:hidden@bucket/run"})
    assert "hidden" not in str(found.value)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(BadInputError, match=r"gs:// needs the driver gcsfs.*pip install -e '.*\[gs\]'"):
        stores.store_of("gs://bucket/run")


def test_what_fails_in_a_store_is_no_damage(tmp_path: Path, store: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a network that is down for a minute would set the newest checkpoint aside."""
    copied(written(tmp_path / "made", 5), step_folder(store, 5))

    def fail(self: Any, path: str, **_: Any) -> bytes:
        raise PermissionError(f"403: {path}" + MANIFEST)

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.cat_file", fail)
    with pytest.raises(StoreError, match="PermissionError: 403"):
        find(tmp_path / "run", "auto", PLAIN.recipe, store)
