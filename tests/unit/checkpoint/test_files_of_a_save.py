"""A save holds a file's tensors in memory beside the state, not all of them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from toolkit.checkpoint import writer
from toolkit.checkpoint.writer import Checkpointer, Save, files_of
from toolkit.recipe.schema import CheckpointSection


def test_tensors_are_written_a_file_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHECKPOINT_FILE_BYTES", 1000)
    serialised = []
    original = safetensors.torch.save

    def save(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
        serialised.append(sum(tensor.nbytes for tensor in tensors.values()))
        return original(tensors, metadata)

    monkeypatch.setattr(safetensors.torch, "save", save)
    state = {f"layer.{i}": torch.full((100,), float(i)) for i in range(7)} | {"large": torch.ones(600)}
    Checkpointer(tmp_path, CheckpointSection(), pytest.fail)._save_tensors(state, tmp_path)
    assert sorted(serialised) == [400, 800, 800, 800, 2400], "two tensors a file; one that is larger is alone"
    assert len(list(tmp_path.glob("shard-00001-*.safetensors"))) == 5
    read = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(read, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("asynchronous", "device_type", "copied"),
    [(None, "cpu", 0), (None, "cuda", 1), (True, "cpu", 1), (False, "cuda", 0)],
)
def test_cpu_ranks_write_the_state_from_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool | None, device_type: str, copied: int
) -> None:
    """A copy would double what they hold. Only a save that copies returns before it is written."""
    copies: list[int] = []
    done, original = threading.Event(), writer.host_copy
    monkeypatch.setattr(writer, "host_copy", lambda tensors: copies.append(1) or original(tensors))
    settings = CheckpointSection(asynchronous=asynchronous)
    checkpointer = Checkpointer(tmp_path, settings, pytest.fail, device_type=device_type)
    written: list[dict[str, torch.Tensor]] = []

    def write(job: Save) -> None:
        done.wait(0.1 if copied == 0 else 10)
        written.append(job.tensors)

    monkeypatch.setattr(checkpointer, "_write_checkpoint", write)
    state = {"model.a": torch.arange(4.0)}
    monkeypatch.setattr(writer, "replace", lambda job, **changes: SimpleNamespace(**{**vars(job), **changes}))
    job: Any = SimpleNamespace(tensors=state, records=[])
    checkpointer.save(job)
    assert (len(copies), len(written)) == (copied, 1 - copied)
    done.set()
    checkpointer.wait()
    assert (written[0]["model.a"].data_ptr() == state["model.a"].data_ptr()) == (copied == 0)


def test_of_more_ranks_each_writes_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHECKPOINT_FILE_BYTES", 1000)
    state = {f"layer.{i}": torch.zeros(100) for i in range(10)}
    assert list(files_of(state, 1).values()) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert list(files_of(state, 4).values()) == [1] * 10


def test_a_wait_for_a_save_is_told_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time that something was written; a save that hangs says nothing."""
    monkeypatch.setattr(writer, "WAIT_SECONDS", 0.02)
    waits: list[float] = []
    checkpointer = Checkpointer(
        tmp_path, CheckpointSection(asynchronous=True), pytest.fail, waits=lambda: waits.append(time.monotonic())
    )
    hangs, last = threading.Event(), [0.0]

    def written_slowly(job: Save) -> None:
        checkpointer._place = tmp_path / "unfinished"
        checkpointer._place.mkdir()
        with (checkpointer._place / "file").open("wb", buffering=0) as file:
            for _ in range(10):
                time.sleep(0.05)
                file.write(b"x")
                last[0] = time.monotonic()
        hangs.wait(1.5)

    monkeypatch.setattr(checkpointer, "_write_checkpoint", written_slowly)
    monkeypatch.setattr(writer, "replace", lambda job, **changes: job)
    job: Any = SimpleNamespace(tensors={}, records=[])
    checkpointer.save(job)
    checkpointer.wait()
    assert 3 <= len(waits) <= 12, "ten bytes, the folder and the beginning"
    assert waits[-1] - last[0] < 1.0, "no word while it hangs"


def test_a_save_whose_thread_fails_at_once_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Path:
        raise NameError("folder")

    monkeypatch.setattr(writer, "step_folder", fails)
    told: list[str] = []
    job: Any = SimpleNamespace(manifest=SimpleNamespace(step=3))
    assert not Checkpointer(tmp_path, CheckpointSection(asynchronous=False), told.append).save(job)
    assert told == ["the checkpoint of step 3 was not saved: folder; the run goes on, and the last complete one stays"]
