"""`toolkit doctor`: a line for each check, with what to do where one is not well."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from toolkit.cli.app import app
from toolkit.cli.commands import doctor


def report(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    return result.exit_code, {row["what"]: row for row in json.loads(result.stdout)}


def test_this_machine_is_well() -> None:
    code, rows = report()
    assert code == 0, rows
    assert {"system", "packages", "cores", "GPUs", "host memory", "disk here", "open files", "two ranks, gloo"} <= set(
        rows
    )
    assert rows["two ranks, gloo"]["verdict"] == doctor.OK
    assert "torch " in rows["packages"]["found"]
    assert rows["cores"]["found"] == f"{len(os.sched_getaffinity(0))} that this process may use, of {os.cpu_count()}"


@pytest.mark.parametrize(
    ("cuda", "has_driver", "verdict", "told"),
    [
        (None, False, doctor.OK, "none; runs use the CPU"),
        ("13.0", False, doctor.OK, "none: torch is built for CUDA 13.0, and there is no driver"),
        ("13.0", True, doctor.WARNING, "an NVIDIA driver, and none for CUDA 13.0"),
    ],
)
def test_gpus_that_are_not_there_have_a_reason(
    cuda: str | None, has_driver: bool, verdict: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_dir = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda self: has_driver if "nvidia" in str(self) else is_dir(self))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (found,) = doctor._device_findings()
    assert (found.verdict, found.found) == (verdict, told)


def test_the_config_that_accelerate_launch_would_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "default_config.yaml"
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(path))
    assert doctor._config_finding().verdict == doctor.OK
    for text, told in (
        ("num_processes: 2\n", None),
        ("num_processes: two\n", "num_processes is 'two'"),
        ("fsdp_config:\n  fsdp_sharding_strategy: zero4\n", "unknown strategy 'zero4'"),
        ("parallelism_config:\n  parallelism_config_tp_size: 2\n", "parallelism_config_tp_size is 2, but"),
    ):
        path.write_text(text)
        found = doctor._config_finding()
        assert found.verdict == (doctor.OK if told is None else doctor.FAILED)
        assert str(path) in found.found
        assert (told or "") in found.found
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    assert "parallelism_config_cp_size is 2, but" in doctor._config_finding().found


def test_what_is_not_well_is_told_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(2**20))
    monkeypatch.setattr(doctor, "_add_over_backend", no_meeting)
    monkeypatch.setattr(doctor, "LEAST_OPEN_FILES", 2**62)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, rows = report()
    assert code == 1
    assert rows["two ranks, gloo"]["verdict"] == doctor.FAILED
    assert "no interface" in rows["two ranks, gloo"]["found"]
    for name in ("disk here", "open files"):
        assert rows[name]["verdict"] == doctor.WARNING
        assert rows[name]["fix"]


def no_meeting(rank: int, backend: str, file: str) -> None:
    raise RuntimeError("no interface")
