"""Runs a training command of any tool: CPU time of its processes at each loss that it prints, peak memory, error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
LOSS = re.compile(r"'loss': '?([\d.]+|nan)|^step \d+/\d+ .*?loss ([\d.]+|nan)")
"""How transformers' Trainer and the toolkit print the loss of a step."""


@dataclass
class Run:
    """The losses, and the CPU seconds since the start when each was printed; the tool's error, if it failed."""

    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    failed: str | None = None

    def last_epoch_seconds(self, epochs: int) -> float:
        """CPU seconds from the last loss of the epoch before to the last of all."""
        return self.cpu[-1] - self.cpu[len(self.cpu) * (epochs - 1) // epochs - 1]


def run(python: str, command: Sequence[str], settings: dict[str, Any], epochs: int) -> Run:
    """Trains in a folder of its own, so that nothing is found in a cache.

    Args:
        command: a program beside the interpreter, and its arguments; `SETTINGS` is replaced by the settings' file.
        epochs: of which all must have printed equally many losses.
    """
    found, others = Run(), [""]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "settings.yaml")
        path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        program, *words = [str(path) if word == "SETTINGS" else word for word in command]
        process = subprocess.Popen(
            [python, str(Path(python).with_name(program)), *words],
            cwd=scratch, env=_environment(python, scratch), start_new_session=True, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if told := LOSS.search(line):
                found.cpu.append(_cpu_of_session(process.pid))
                found.losses.append(float(told[1] or told[2]))
            elif line.strip():
                others = [*others[-200:], line.strip()]
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    found.peak_bytes = used.ru_maxrss * 1024  # of the largest of its processes
    if process.returncode or not found.cpu or len(found.cpu) % epochs:
        found.failed = _error(others)
    return found


def _error(lines: Sequence[str]) -> str:
    """The first error of the output, which is the cause of others; without paths of this machine."""
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)] or lines[-1:]
    return re.sub(r"(/[\w.+-]+){2,}", "PATH", errors[0])[:300]


def _environment(python: str, scratch: str) -> dict[str, str]:
    """No network, no trackers, one thread; this repository for its own interpreter alone."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
    told = {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    quiet = {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "USE_HF": "1", "HF_HUB_OFFLINE": "1"}
    caches = {"HF_HOME": scratch, "MODELSCOPE_CACHE": scratch}
    return {**kept, **told, **quiet, **caches, **({"PYTHONPATH": str(ROOT)} if python == sys.executable else {})}


def _cpu_of_session(leader: int) -> float:
    """CPU seconds of a session's processes, and of their children that have ended."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[3]) == leader:
            ticks += sum(map(int, fields[11:15]))  # utime, stime, and both of children that were waited for
    return ticks / os.sysconf("SC_CLK_TCK")
