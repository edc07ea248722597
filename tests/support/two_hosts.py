"""Two network namespaces joined by a cable, as two hosts are, where the system lets us make them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ADDRESSES = ("10.199.7.1", "10.199.7.2")


def run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


@dataclass(frozen=True)
class Host:
    """A network namespace, and the interface of its cable."""

    name: str
    interface: str

    @property
    def prefix(self) -> list[str]:
        """What a command is preceded by to run there."""
        return ["ip", "netns", "exec", self.name]

    def cable(self, state: str) -> None:
        """Cuts the cable (`down`) or joins it again (`up`)."""
        assert run("ip", "-n", self.name, "link", "set", self.interface, state)


@contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Both of them; an empty list where the system makes none."""
    names = [f"toolkit-test-{os.getpid()}-{host}" for host in (0, 1)]
    ends = [f"tk{os.getpid() % 10**6}{end}" for end in "ab"]
    try:
        made = _joined(names, ends)
        yield [Host(name, end) for name, end in zip(names, ends, strict=True)] if made else []
    finally:
        for name in names if shutil.which("ip") else []:
            run("ip", "netns", "delete", name)


def _joined(names: list[str], ends: list[str]) -> bool:
    if shutil.which("ip") is None:
        return False
    commands = [["ip", "netns", "add", name] for name in names]
    commands += [["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]]]
    for name, end, address in zip(names, ends, ADDRESSES, strict=True):
        commands += [["ip", "link", "set", end, "netns", name]]
        commands += [["ip", "-n", name, "addr", "add", f"{address}/24", "dev", end]]
        commands += [["ip", "-n", name, "link", "set", device, "up"] for device in (end, "lo")]
    return all(run(*command) for command in commands)
