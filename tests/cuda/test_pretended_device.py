"""torch's CUDA build on a device that is not there: memory, misuse and waits. What it computes: test_training_on_it.py.

Outside of `run.py` one test starts the others with the pretended device; it is skipped where that cannot be built.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pretended_steps import NCCL, started_anew
from support.ranks import LIMIT_SECONDS

FOLDER = Path(__file__).parent
INSIDE = importlib.util.find_spec("pretended_device") is not None

inside = pytest.mark.skipif(not INSIDE, reason="runs inside of tests/cuda/run.py")


@pytest.mark.skipif(INSIDE, reason="runs outside of tests/cuda/run.py")
def test_these_tests_pass_on_the_pretended_device() -> None:
    sys.path.insert(0, str(FOLDER))
    try:
        from build import why_not
    finally:
        sys.path.remove(str(FOLDER))
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    command = [sys.executable, str(FOLDER / "run.py"), "-m", "pytest", "-q", "-m", "slow", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(FOLDER)], cwd=FOLDER.parents[1], capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.fixture(autouse=True)
def no_misuse(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> Any:
    """Nothing that a test does is a misuse of the device, but for what it wants to see."""
    if not INSIDE:
        yield
        return
    import pretended_device

    before = pretended_device.counters()["misuses"]
    yield
    if "expects_misuse" not in request.keywords:
        assert pretended_device.counters()["misuses"] == before
    assert pretended_device.failed == {}


# Memory and misuse


@inside
def test_a_block_is_charged_and_given_back_and_a_full_device_says_so() -> None:
    free, total = torch.cuda.mem_get_info()
    block = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    assert free - torch.cuda.mem_get_info()[0] == 2**30
    with pytest.raises(torch.OutOfMemoryError, match=r"GPU 0 has a total capacity of 79\.11 GiB"):
        torch.empty(total, dtype=torch.uint8, device="cuda")
    del block
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == free


def runtime() -> ctypes.CDLL:
    import pretended_device

    return pretended_device._loaded["libcudart.so.13"]


MISUSES: dict[str, Callable[[], Any]] = {
    "run past the end of their block": lambda: runtime().cudaMemcpy(
        ctypes.c_void_p(torch.empty(16, device="cuda").untyped_storage().data_ptr()),
        ctypes.create_string_buffer(2**22),
        ctypes.c_size_t(2**22),
        1,
    ),
    "kind 1 to host from host": lambda: runtime().cudaMemcpy(
        ctypes.create_string_buffer(8), ctypes.create_string_buffer(8), ctypes.c_size_t(8), 1
    ),
    "is no live event": lambda: runtime().cudaEventSynchronize(ctypes.create_string_buffer(64)),
    "is no live stream": lambda: runtime().cudaStreamSynchronize(ctypes.create_string_buffer(64)),
    "which cudaMalloc did not give": lambda: runtime().cudaFree(ctypes.create_string_buffer(64)),
}


@inside
@pytest.mark.expects_misuse
@pytest.mark.parametrize("told", MISUSES)
def test_misuse_is_told(capfd: pytest.CaptureFixture[str], told: str) -> None:
    import pretended_device

    before = pretended_device.counters()["misuses"]
    assert MISUSES[told]() != 0
    torch.cuda.cudart().cudaGetErrorString(torch.cuda.cudart().cudaError(0))
    assert runtime().cudaGetLastError() >= 0
    assert pretended_device.counters()["misuses"] == before + 1
    assert told in capfd.readouterr().err


@inside
def test_each_wait_of_the_host_is_told_with_its_lines() -> None:
    import pretended_device

    waits: list[tuple[str, list[str]]] = []
    pretended_device.call_on_wait(lambda what, lines: waits.append((what, lines)))
    value = torch.ones(3, device="cuda").sum()
    assert waits == []
    value.item()
    torch.cuda.current_stream().synchronize()
    pretended_device.call_on_wait(None)
    assert [what for what, _ in waits] == ["cudaStreamSynchronize"] * 2
    assert all(any(Path(__file__).name in line for line in lines) for _, lines in waits)


# Two ranks with a device each


def disagree() -> str:
    import torch.distributed as dist

    torch.cuda.set_device(dist.get_rank())
    try:
        dist.all_reduce(torch.ones(3 + dist.get_rank(), device="cuda"))
        torch.cuda.synchronize()
    except Exception as error:
        return type(error).__name__
    return "nothing"


@inside
@pytest.mark.expects_misuse
def test_ranks_that_disagree_are_told() -> None:
    assert started_anew(disagree, 2, **NCCL) == ["DistBackendError", "DistBackendError"]
