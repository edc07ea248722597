"""`toolkit doctor`: a line for each check, with what to do where one is not well."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from typing import Any

import pytest
from typer.testing import CliRunner

from toolkit.cli import doctor
from toolkit.cli.app import app


def report(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    return result.exit_code, {row["what"]: row for row in json.loads(result.stdout)}


def test_this_machine_is_well() -> None:
    code, rows = report()
    assert code == 0, rows
    assert {"system", "packages", "host memory", "disk here", "open files", "two ranks, gloo"} <= set(rows)
    assert rows["two ranks, gloo"]["verdict"] == doctor.OK
    assert "torch " in rows["packages"]["found"]


def test_what_is_not_well_is_told_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(2**20))
    monkeypatch.setattr(doctor, "_meet", no_meeting)
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
