"""Host memory of offload: who shares it, and how it is given back."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import cases

from toolkit import ranks
from toolkit.errors import BadInputError, ToolkitError
from toolkit.sharding.offload import host
from toolkit.sharding.offload.host import HostPlan, Room, Slabs, require_host_memory
from toolkit.sharding.offload.worker import Worker

TABLES = cases(__file__)

CPU = torch.device("cpu")
PLAN = HostPlan(masters=60, moments=0, gradients=0, staging=0)


class Driver:
    """CUDA's runtime, as far as pinning goes: the addresses that are pinned, which it refuses a second time."""

    def __init__(self, code: int = 0) -> None:
        self.pinned: set[int] = set()
        self.code = code

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert address not in self.pinned
        self.pinned.add(address)
        return self.code

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.pinned.remove(address)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(host, "_cudart", lambda: driver)
    return driver


@pytest.fixture(autouse=True)
def nothing_held_yet() -> None:
    gc.collect()


def told(monkeypatch: pytest.MonkeyPatch, *everyone: list[Room], held: int = 0) -> str:
    """What ranks that each need 60 bytes are told."""
    monkeypatch.setattr(ranks, "gather_objects", lambda _: [(60, rooms, held) for rooms in everyone])
    try:
        require_host_memory(PLAN)
    except BadInputError as error:
        return str(error)
    return "it fits"


def room(key: str, num_bytes: int) -> Room:
    return Room((key,), f"the ranks of {key}", f"{num_bytes} are free", num_bytes)


def test_ranks_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, [room("a", 100)], [room("b", 100)]) == "it fits"
    assert "the ranks of a would take" in told(monkeypatch, [room("a", 100)], [room("a", 100)])
    # Two containers of one machine: each has 60 bytes, and the machine has not both.
    first, second = [room("1", 60), room("machine", 119)], [room("2", 60), room("machine", 119)]
    assert "the ranks of machine would take" in told(monkeypatch, first, second)
    assert told(monkeypatch, [room("1", 60), room("machine", 120)], [room("2", 60), room("machine", 120)]) == "it fits"


def test_a_machine_is_not_known_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Containers and clones often all carry the same one."""
    keys = []
    for boot in ("first", "second"):
        (tmp_path / boot).write_text(boot)
        monkeypatch.setattr(host, "BOOT_ID", tmp_path / boot)
        keys.append(host._memory_limits()[-1].key)
    assert keys[0] != keys[1]
    monkeypatch.setattr(host.platform, "node", lambda: "another-container")
    assert host._memory_limits()[-1].key == keys[1]


def test_what_an_earlier_model_holds_is_told(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    text = told(monkeypatch, [room("a", 10)], held=2**30)
    assert "1.00 GiB are still held by a model that this process has trained before" in text
    assert "plugin.close()" in text
    assert "use more hosts" in told(monkeypatch, [room("a", 10)])
    slabs = Slabs()
    driver.code = 2
    with pytest.raises(ToolkitError, match=r"could not pin .* \(error 2\); raise the limit of locked memory"):
        slabs.cut([2**20], torch.float32, pin=True)
    with pytest.raises(ToolkitError, match=r"4.00 MiB are still held by a model"):
        Slabs().cut([2**20], torch.float32, pin=True)


def test_memory_that_nobody_holds_is_unpinned(driver: Driver) -> None:
    slabs = Slabs()
    views = list(slabs.cut([3, 4], torch.float32, pin=True))
    assert len(driver.pinned) == 1
    assert host.held_bytes() == 28
    del slabs
    assert driver.pinned == set()
    assert host.held_bytes() == 0
    assert len(views) == 2


def test_the_threads_of_the_step_are_the_workers_alone() -> None:
    """torch gives threads that begin later the number set last, whoever set it."""
    mine, found = torch.get_num_threads(), {}

    def look(name: str) -> None:
        torch.ones(2**16).exp()  # a thread's first work takes the kept number
        found[name] = torch.get_num_threads()

    worker = Worker(CPU, mine + 2)
    worker.submit(lambda: look("worker"), lambda: None)
    worker.close()
    later = threading.Thread(target=look, args=("later",))
    later.start()
    later.join()
    assert found == {"worker": mine + 2, "later": mine}
    assert torch.get_num_threads() == mine


@pytest.mark.parametrize(("lines", "has"), TABLES["PROCESSORS"])
def test_bf16_is_read_from_what_the_processor_reports(monkeypatch: pytest.MonkeyPatch, lines: str, has: bool) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"processor\t: 0\n{lines}\n")
    assert host.multiplies_in_bf16() is has
