"""Checkpoints in a store, here fsspec's memory: copied beside training, checked, marked last, and never half there."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_manifest import COMPLETE, DAMAGE, MANIFEST, PLAIN, written

from toolkit import Recipe
from toolkit.checkpoint import store as stores
from toolkit.checkpoint import upload
from toolkit.checkpoint.manifest import check_files, list_checkpoints, step_folder
from toolkit.checkpoint.resume import find, set_aside
from toolkit.checkpoint.store import StorePath, has_own_sum
from toolkit.checkpoint.writer import Checkpointer, Job
from toolkit.errors import BadInputError, StoreError, without_secrets
from toolkit.recipe.schema import CheckpointSection


@pytest.fixture
def store() -> StorePath:
    return StorePath(f"memory://{uuid.uuid4().hex}/run")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(upload, "TELL_SECONDS", 0.0)


class Saves:
    """A checkpointer of one tensor, and what it told."""

    def __init__(self, run: Path, store: StorePath, **settings: Any) -> None:
        self.told: list[str] = []
        section = CheckpointSection(every_steps=1, **settings)
        self.checkpointer = Checkpointer(run, section, self.told.append, store)

    def save(self, step: int, loss: float | None = None) -> None:
        manifest = replace(PLAIN, step=step, world_size=1, eval_loss=loss)
        self.checkpointer.save(Job(manifest, {"model.a": torch.full((4,), float(step))}, ["a"], {}, []))
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


def test_what_is_saved_is_in_the_store_and_nowhere_else(tmp_path: Path, store: StorePath) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    saves = Saves(tmp_path, store)
    for step in (1, 2, 3):
        saves.save(step)
        assert saves.finish() is None
    assert (steps(store), saves.told) == ([2, 3], [])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (store / "model/config.json").read_bytes() == b"{}"
    last = list_checkpoints(store)[-1]
    assert last.manifest is not None
    assert check_files(last.folder, last.manifest, last.manifest.files) is None
    found = find(tmp_path, "auto", PLAIN.recipe, store)
    assert found.start is not None
    assert (found.start[1].step, found.is_own, found.origin) == (3, True, f"{store}/checkpoints/step_00000003")
    assert check_files(found.start[0], found.start[1], found.start[1].files) is None


def test_rotation_keeps_the_best(tmp_path: Path, store: StorePath) -> None:
    saves = Saves(tmp_path, store, keep_last=1, keep_best=True)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None)):
        saves.save(step, loss)
        saves.finish()
    assert steps(store) == [2, 4]


# A store has no links, and what has an empty marker was never finished: it is cleared away.
KINDS = [kind for kind in DAMAGE if kind not in ("link", "marker empty")]


@pytest.mark.parametrize("kind", [*KINDS, "flipped"])
def test_damage_in_the_store_is_passed_over_by_name(kind: str, tmp_path: Path, store: StorePath) -> None:
    def flip(folder: Path) -> None:
        content = bytearray((folder / "shard.safetensors").read_bytes())
        content[3] ^= 1
        (folder / "shard.safetensors").write_bytes(content)

    good, bad = written(tmp_path / "made", 5), written(tmp_path / "made", 7)
    (DAMAGE[kind][0] if kind in DAMAGE else flip)(bad)
    for folder in (good, bad):
        copied(folder, store / "checkpoints" / folder.name)
    run = tmp_path / "run"
    found = find(run, "auto", PLAIN.recipe, store)
    assert found.start is not None
    assert found.start[1].step == 5
    (told,) = set_aside(found.passed_over, run, store)
    assert told.startswith(f"passed over {store}/checkpoints/step_00000007: ")
    assert steps(store) == [5]
    assert find(run, "auto", PLAIN.recipe, store).passed_over == ()
    assert find(run, "auto", PLAIN.recipe, store, copies=False).start == (found.start[0], found.start[1])


def test_a_run_elsewhere_goes_on_from_a_store(tmp_path: Path, store: StorePath) -> None:
    copied(written(tmp_path / "made", 5), step_folder(store, 5))
    for name in (store.url, str(step_folder(store, 5))):
        found = find(tmp_path / "new", name, PLAIN.recipe)
        assert found.start is not None
        assert (found.start[1].step, found.is_own) == (5, False)
    with pytest.raises(BadInputError, match="has later checkpoints"):
        find(tmp_path / "new", "never", PLAIN.recipe, store)


@pytest.mark.parametrize("cut", [lambda marker: marker.unlink(), lambda marker: marker.write_bytes(b"")])
def test_an_interrupted_copy_is_no_checkpoint_and_is_cleared_away(
    cut: Callable[[StorePath], None], tmp_path: Path, store: StorePath
) -> None:
    copied(written(tmp_path / "made", 5), step_folder(store, 5))
    half = copied(written(tmp_path / "made", 7), step_folder(store, 7))
    cut(half / COMPLETE)
    found = find(tmp_path / "run", "auto", PLAIN.recipe, store)
    assert found.start is not None
    assert (found.start[1].step, found.passed_over) == (5, ())
    upload.clear_unfinished(store)
    assert [checkpoint.step for checkpoint in list_checkpoints(store)] == [5]
    assert not half.exists()


@pytest.mark.usefixtures("quick")
def test_a_store_that_fails_is_tried_again(tmp_path: Path, store: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    put, failures = StorePath.put, iter(range(3))

    def failing(self: StorePath, source: Path, sha256: str) -> None:
        if next(failures, None) is not None:
            raise StoreError(f"{self}: no route to host")
        put(self, source, sha256)

    monkeypatch.setattr(StorePath, "put", failing)
    saves = Saves(tmp_path, store)
    saves.save(1)
    assert saves.finish() is None
    assert steps(store) == [1]
    assert len(saves.told) == 4
    assert saves.told[0].endswith("no route to host; the run goes on, and it is tried again")
    assert saves.told[-1] == f"the checkpoint of step 1 is in {store} now"


def test_a_file_that_another_rank_has_copied_in_part_is_no_checkpoint(
    tmp_path: Path, store: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = StorePath.put

    def half(self: StorePath, source: Path, sha256: str) -> None:
        put(self, source, sha256)
        if self.name.endswith(".safetensors"):
            self.write_bytes(source.read_bytes()[:-1])

    saves = Saves(tmp_path, store)
    with monkeypatch.context() as patch:
        patch.setattr(StorePath, "put", half)
        saves.save(1)
        told = saves.finish(0.1)
    assert told is not None
    assert "which another rank has copied; all must see one store" in told
    assert steps(store) == []


def test_a_checkpoint_does_not_count_while_another_of_its_step_is_copied_over_it(
    tmp_path: Path, store: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Saves(tmp_path / "first", store)
    first.save(1)
    assert first.finish() is None
    put, seen = StorePath.put, []

    def watched(self: StorePath, source: Path, sha256: str) -> None:
        seen.append(steps(store))
        put(self, source, sha256)

    saves = Saves(tmp_path / "second", store)
    monkeypatch.setattr(StorePath, "put", watched)
    saves.save(1)
    assert saves.finish() is None
    assert seen
    assert not any(seen)
    assert steps(store) == [1]


@pytest.mark.usefixtures("quick")
def test_what_is_not_there_at_the_end_is_copied_by_the_next_start(
    tmp_path: Path, store: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = Saves(tmp_path, store)
    saves.save(1)
    saves.finish()
    with monkeypatch.context() as broken:
        broken.setattr(StorePath, "put", lambda *_: (_ for _ in ()).throw(StoreError("out of order")))
        saves.save(2)
        missing = saves.finish(0.05)
    assert missing == f"the checkpoint of step 2 is not in {store}: rank 0: out of order"
    assert steps(store) == [1]
    told: list[str] = []
    upload.finish_interrupted(tmp_path, store, CheckpointSection(every_steps=1), told.append)
    assert (steps(store), len(told)) == ([1, 2], 1)
    upload.finish_interrupted(tmp_path, store, CheckpointSection(every_steps=1), pytest.fail)
    assert not list(tmp_path.glob(".outgoing/rank_*/*"))


@pytest.mark.parametrize("harm", ["file gone", "file changed"])
def test_of_what_is_left_only_whole_checkpoints_are_copied(harm: str, tmp_path: Path, store: StorePath) -> None:
    saves = Saves(tmp_path, store)
    folder = saves.checkpointer.uploads.folder(1)  # type: ignore[union-attr]
    saves.checkpointer.uploads.begin = lambda *_: None  # type: ignore[union-attr,method-assign]  # killed just then
    saves.save(1)
    (shard,) = folder.glob("*.safetensors")
    shard.unlink() if harm == "file gone" else shard.write_bytes(bytes(shard.stat().st_size))
    upload.finish_interrupted(tmp_path, store, CheckpointSection(), pytest.fail)
    assert steps(store) == []


@pytest.mark.usefixtures("quick")
def test_copying_slower_than_saving(tmp_path: Path, store: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """No save waits for a copy; one checkpoint is copied, one waits, and those between are said to be dropped."""
    put, goes_on = StorePath.put, threading.Event()

    def slow(self: StorePath, source: Path, sha256: str) -> None:
        assert goes_on.wait(600)
        put(self, source, sha256)

    monkeypatch.setattr(StorePath, "put", slow)
    saves = Saves(tmp_path, store, keep_last=None)
    try:
        for step in (1, 2, 3, 4):
            saves.save(step)
            while step == 1 and saves.checkpointer.uploads._waiting is not None:  # type: ignore[union-attr]
                time.sleep(0.01)  # until the thread has taken it
            assert len(list(tmp_path.glob(".outgoing/rank_00000/step_*"))) <= 2
    finally:
        goes_on.set()
    assert saves.finish() is None
    assert steps(store) == [1, 4]
    assert [line.partition(" is not copied")[0][-6:] for line in saves.told] == ["step 2", "step 3"]
    assert "copying is slower than saving" in saves.told[0]


def test_a_copy_that_differs_is_found(tmp_path: Path, store: StorePath, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a"
    source.write_bytes(b"right")
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.put_file", lambda self, *_: None)
    (store / "a").write_bytes(b"wrong")
    with pytest.raises(StoreError, match="is not what was copied"):
        (store / "a").put(source, hashlib.sha256(b"right").hexdigest())


def test_the_stores_own_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a"
    source.write_bytes(b"0123456789")
    monkeypatch.setattr(stores, "PART_BYTES", 4)
    whole = hashlib.md5(b"0123456789")
    parts = hashlib.md5(b"".join(hashlib.md5(part).digest() for part in (b"0123", b"4567", b"89"))).hexdigest()
    for entry, same in (
        ({"ETag": f'"{whole.hexdigest()}"'}, True),
        ({"ETag": f'"{parts}-3"'}, True),
        ({"md5Hash": base64.b64encode(whole.digest()).decode()}, True),
        ({"ETag": f'"{parts}-2"'}, False),
        ({"ETag": f'"{parts}"'}, False),
        ({"ETag": '"of something encrypted"'}, False),
        ({}, False),
    ):
        assert has_own_sum(entry, source) is same, entry


@pytest.mark.parametrize("key", ["to", "resume"])
@pytest.mark.parametrize("url", ["ftp://a/b", "s3://", "s3://bucket/", "file://relative", "s3:///", "azure://x/y"])
def test_urls_that_are_no_store(key: str, url: str) -> None:
    with pytest.raises(BadInputError, match=rf"checkpoint\.{key}: found '{url}'; needs a folder in a store"):
        Recipe.load("quickstart", {f"checkpoint.{key}": url})


def test_credentials_stand_in_no_recipe_and_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInputError, match=r"checkpoint\.to: holds credentials") as found:
        Recipe.load("quickstart", {"checkpoint.to": "s3://AKIA:hidden@bucket/run"})
    assert "hidden" not in str(found.value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    assert without_secrets("no: hidden/x") == "no: ***/x"


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
