"""`toolkit doctor`: a line for each check, with what to do where one is not well."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from toolkit.cli.app import app
from toolkit.cli.commands import doctor
from toolkit.cluster import nodes
from toolkit.ranks import free_port


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


def test_a_table_of_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three nodes in threads; then what they would say if they were not alike."""
    monkeypatch.setenv(nodes.INTERFACE_VARIABLE, "lo")
    port, folder = free_port(), tmp_path / "runs/first"
    with ThreadPoolExecutor(3) as pool:
        places = [nodes.NodePlace(3, rank, "127.0.0.1", port) for rank in range(3)]
        told = list(pool.map(lambda place: nodes.compare_nodes(place, folder), places))
    assert not folder.parent.exists(), "nothing is left"
    found = told[0]
    assert [each.rank for each in found] == [0, 1, 2]
    assert told[1] == told[2] == found
    table, problems = nodes.rows(found)
    assert problems == []
    assert [row[2:6] for row in table] == [["127.0.0.1", "lo", "all", "shared"]] * 3
    assert all(abs(each.clock) < nodes.CLOCK_SECONDS for each in found)
    found[1].unreached, found[1].clock, found[2].clock = [0, 2], -40.0, 0.0
    found[2].folder, found[2].versions = "does not see files of node 0", {**found[0].versions, "torch": "1.0"}
    table, problems = nodes.rows(found)
    assert table[1][4:7] == ["not 0, 2", "shared", "-40.0 s"]
    assert table[2][5:] == ["does not see files of node 0", "+0.0 s", "torch 1.0"]
    assert [problem.partition(":")[0] for problem in problems] == [
        f"node 1 ({found[1].host}) does not reach node 0, 2",
        f"node 1 ({found[1].host})",
        f"node 2 ({found[2].host})",
        f"node 2 ({found[2].host}) has other versions than node 0",
    ]


def test_nodes_with_other_folders_and_names_of_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nodes.INTERFACE_VARIABLE, "nowhere0")
    monkeypatch.setattr(nodes, "CONNECT_SECONDS", 0.3)
    port = free_port()
    places = [nodes.NodePlace(2, rank, "127.0.0.1", port) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found, _ = pool.map(lambda place: nodes.compare_nodes(place, tmp_path / f"own{place.rank}"), places)
    assert [each.address for each in found] == [None, None]
    assert [each.unreached for each in found] == [[0, 1], [0, 1]]
    assert [each.folder for each in found] == ["does not see files of node 1", "does not see files of node 0"]
    result = CliRunner().invoke(
        app, ["doctor", "--job", str(tmp_path / "one"), "--main-process-port", str(free_port())]
    )
    assert result.exit_code == 1
    assert "does not reach node 0: set GLOO_SOCKET_IFNAME" in " ".join(result.stdout.split())


def test_a_job_of_slurm_in_a_container_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "PATH": ""}.items():
        monkeypatch.setenv(name, value)
    refused = CliRunner().invoke(app, ["doctor", "--job", "out"])
    assert "--main-process-ip is missing, and `scontrol show hostnames` does not tell it" in str(refused.exception)


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
