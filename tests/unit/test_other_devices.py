"""What Linux and CUDA alone have is asked for, and done without where it is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import cases

from toolkit import ranks
from toolkit.errors import BadInputError

TABLES = cases(__file__)


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
