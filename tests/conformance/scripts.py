"""Accelerate's own scripts on two ranks, as they are: a test of each, and of each function of checks in it.

Run by pytest in a process of its own. A script ends at its first failure; here each function is called all the same.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import traceback
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from tests.distributed_testing_utils import _start_rank_processes

PLACE = "accelerate.test_utils.scripts"
CHECKS = re.compile(r"test_|check_seedable|\w+_check$")
ENDLESS = re.compile(r"test_can_join|test_join_can")
"""What waits for ever over gloo, on the stock backend: `Join` of DDP."""

NAMES = ("test_ops", "test_sync", "test_distributed_data_loop", "test_script")


def run(rank: int, name: str, port: int, folder: Path) -> None:
    """Writes how each function of a script ended."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    script = importlib.import_module(f"{PLACE}.{name}")
    found: dict[str, str] = {}

    def noting(case: str, function: Any) -> Any:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            number = sum(each.startswith(f"{case}[") for each in found)
            try:
                function(*args, **kwargs)
                found[f"{case}[{number}]"] = ""
            except Exception:
                found[f"{case}[{number}]"] = traceback.format_exc()
            (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")

        return call

    for case, function in list(vars(script).items()):
        if ENDLESS.match(case):
            setattr(script, case, lambda: None)
        elif callable(function) and CHECKS.match(case) and function.__module__ == script.__name__:
            setattr(script, case, noting(case, function))
    noting("main", script.main)()


@pytest.mark.parametrize("name", NAMES)
def test_script(name: str, tmp_path: Path, record_property: Any) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    _start_rank_processes(run, (name, port, tmp_path), 2)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    for case in ranks[0] | ranks[1]:
        record_property(case, "\n".join(filter(None, (rank.get(case, "not called") for rank in ranks))))
