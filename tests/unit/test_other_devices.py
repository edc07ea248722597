"""What Linux and CUDA alone have is asked for, and done without where it is missing."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from support.cases import cases
from support.ranks import alone, run_on_ranks

from toolkit import ranks
from toolkit.errors import BadInputError

TABLES = cases(__file__)


def of_windows() -> list[str]:
    """Imports and uses, without the names that Windows lacks, the modules that ask for them."""
    for name in ("SIGUSR1", "SIGHUP"):
        delattr(signal, name)
    del os.sched_getaffinity
    sys.modules["resource"] = None  # type: ignore[assignment]
    names = (
        "unix",
        "training.stop",
        "training.usage",
        "sharding.offload.host",
        "cli.ranks.launcher",
        "cli.shared.console",
        "cli.commands.doctor",
        "cli.ranks.finetune",
    )
    modules = {name: importlib.reload(importlib.import_module(f"toolkit.{name}")) for name in names}
    with modules["training.stop"].StopRequests(None) as requests:
        os.kill(os.getpid(), signal.SIGTERM)
        reason = requests.reason_to_stop()
    with modules["cli.ranks.launcher"]._forwarding_signals():
        pass
    peak = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=7))
    with mock.patch.object(psutil, "Process", return_value=peak):
        bytes_used = modules["training.usage"].peak_host_bytes()
    room = modules["sharding.offload.host"]._process_room()
    found = [finding.what for finding in modules["cli.commands.doctor"]._disk_findings()]
    return [str(reason), str(bytes_used), str(room), str("open files" in found), str(ranks.usable_cores())]


@alone
def without_their_names() -> list[str]:
    return of_windows()


def test_modules_do_without_what_windows_lacks() -> None:
    [found] = run_on_ranks(without_their_names, 1)
    assert found == ["SIGTERM", "7", "None", "False", str(os.cpu_count())]


@pytest.mark.parametrize(("own", "of_launcher", "ranks_of_host", "expected"), TABLES["CORES"])
def test_cores_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, own: int, of_launcher: int, ranks_of_host: int, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(of_launcher if process else own)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_of_host))
    assert ranks.cores_of_this_rank() == expected


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has an accelerator that is no CUDA device."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)


@pytest.mark.usefixtures("mps")
def test_an_accelerator_that_is_left_idle_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    from toolkit.sharding.plugin import _use_cpu_without_gpu

    _use_cpu_without_gpu()
    _use_cpu_without_gpu()
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("The toolkit does not run on this machine's accelerator (mps): training runs on the CPU.") == 1
    assert "`toolkit train --cpu 2`" in told


@pytest.mark.usefixtures("mps")
def test_the_doctor_and_train_name_it() -> None:
    from toolkit.cli.commands import doctor, train

    [gpus] = doctor._device_findings()
    assert (gpus.verdict, gpus.found) == (doctor.WARNING, "none that is used, but mps")
    with pytest.raises(BadInputError, match=r"accelerator \(mps\); --cpu 2 trains on the CPU"):
        options_without_a_gpu(train)


def options_without_a_gpu(train: Any) -> None:
    train.launcher_options(None, None, None, None, None)
