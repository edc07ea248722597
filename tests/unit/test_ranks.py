"""toolkit.ranks: threads begin on this rank's GPU; hosts have paths of their own; one rank may take all cores."""

from __future__ import annotations

import ast
import random
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit
from toolkit import ranks
from toolkit.checkpoint.export import verify
from toolkit.checkpoint.store import StorePath
from toolkit.checkpoint.writer import Checkpointer, Uploads
from toolkit.data.samples.loader import ahead
from toolkit.recipe.schema import CheckpointSection
from toolkit.sharding.offload.worker import Worker

STARTERS = {
    "checkpoint/writer.py": "on_this_device",
    "data/samples/loader.py": "on_this_device",
    "sharding/offload/worker.py": "set_device",  # told its device, which need not be the current one
    "supervise/watched.py": "_keep_looking",  # reads records and writes files; knows no tensor
    "sharding/blocks/by_block.py": "on_this_device",
    "data/documents/processes.py": "_end_with_parent",  # reads a pipe and ends the process; knows no torch
    "cluster/nodes.py": "answering",  # opens sockets; knows no torch
    "terminal.py": "_print_elapsed",  # prints a line; knows no torch
}
"""File that starts a thread -> what in it sees to the thread's device. Each is run below."""


class Devices:
    """CUDA as `toolkit.ranks` sees it, with GPU 3 in use by this thread; thread's name -> what it did, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: dict[str, list[Any]] = {}
        self._of_thread = threading.local()
        self._of_thread.device = 3
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(self._of_thread, "device", 0))
        monkeypatch.setattr(torch.cuda, "set_device", self.note)

    def note(self, what: Any) -> None:
        device = what.index if isinstance(what, torch.device) else what
        if isinstance(device, int):
            self._of_thread.device = device
        self.done.setdefault(threading.current_thread().name, []).append(device)


def test_every_place_that_starts_a_thread_is_known() -> None:
    package = Path(toolkit.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls}
        if names & {"Thread", "ThreadPoolExecutor", "start_new_thread"}:
            found.add(path.relative_to(package).as_posix())
            assert STARTERS[path.relative_to(package).as_posix()] in path.read_text()
    assert found == STARTERS.keys()


def test_data_is_made_ahead_on_this_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch)

    def items() -> Any:
        devices.note("item")
        yield 1

    assert list(ahead(items(), "made")) == [1]
    [did] = [did for name, did in devices.done.items() if name.startswith("made")]
    assert did == [3, "item"]


def test_a_checkpoint_is_written_on_this_ranks_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    devices = Devices(monkeypatch)
    writer = Checkpointer(tmp_path, CheckpointSection(asynchronous=True), lambda text: None)
    monkeypatch.setattr(writer, "_write_checkpoint", lambda job: devices.note("written"))
    monkeypatch.setattr("toolkit.checkpoint.writer.replace", lambda job, **changes: job)
    monkeypatch.setattr("toolkit.checkpoint.writer.host_copy", lambda tensors: tensors)
    job: Any = type("Job", (), {"tensors": {}, "records": []})()
    writer.save(job)
    writer.wait()
    assert devices.done == {"checkpoint": [3, "written"]}


def test_a_checkpoint_is_copied_on_this_ranks_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    devices = Devices(monkeypatch)
    uploads = Uploads(tmp_path, StorePath("memory://gpu"), CheckpointSection(), lambda text: None)
    monkeypatch.setattr(uploads, "_attempt", lambda *_: devices.note("copied"))
    uploads.offer(1)
    uploads.finish(60.0, lambda text: None)
    assert devices.done == {"upload": [3, "copied"]}


def test_offload_steps_on_the_engines_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch)
    worker = Worker(torch.device("cuda", 2), threads=1)
    worker.submit(lambda: devices.note("stepped"), lambda: None)
    worker.close()
    assert devices.done == {"offload-step": [2, "stepped"]}


def test_each_host_has_a_path_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two ranks on each of two hosts; the second host's HF_HOME is another folder."""
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    told = [(True, here, None), (False, None, None), (True, there, None), (False, None, None)]
    monkeypatch.setattr(ranks, "on_first_rank", lambda build: here)
    monkeypatch.setattr(ranks, "local_rank", lambda: len(found) % 2)
    monkeypatch.setattr(ranks, "rank", lambda: len(found))
    asked: list[Any] = []
    monkeypatch.setattr(ranks, "gather_objects", lambda mine, _: asked.append(mine) or told)
    found: list[Path] = []
    while len(found) < 4:
        found.append(ranks.on_each_host(lambda: there))
    assert found == [here, here, there, there]
    # A leader that does not see rank 0's path makes its own; the others make nothing.
    assert asked[2] == (True, there, None)
    assert asked[3] == (False, None, None)


def test_an_export_that_is_checked_on_the_host_takes_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = torch.get_num_threads() + 2
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    model, seen = torch.nn.Linear(2, 2), []
    model.device, model.dtype = torch.device("cpu"), torch.float32  # type: ignore[assignment]

    def logits_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return model(batch["x"])

    accelerator: Any = type("Accelerator", (), {"device": torch.device("cpu")})()
    assert verify(accelerator, model, model, logits_of, {"x": torch.ones(1, 2)}, torch.float32) == 0  # type: ignore[arg-type]
    assert seen == [cores - 2, cores]
    assert torch.get_num_threads() == cores - 2


def test_a_free_port_is_none_that_the_system_gives_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ranks.free_port()))
        taken = listener.getsockname()[1]
        assert taken < 32_768
        order = [taken, taken + 1]
        monkeypatch.setattr(random.SystemRandom, "sample", lambda self, ports, count: order)
        assert ranks.free_port() == taken + 1
        order.pop()
        with pytest.raises(OSError, match="are taken"):
            ranks.free_port()
