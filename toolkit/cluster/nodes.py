"""Compares the nodes of a job: whether they reach each other, share a folder, and have the same clock and versions."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from toolkit.errors import ToolkitError, first_line
from toolkit.paths import appears

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
PACKAGES = ("torch", "accelerate", "transformers", "finetune-toolkit")
MEETING_SECONDS = 120.0
"""Nodes of a job need not start at the same time."""

CONNECT_SECONDS = 5.0
CLOCK_SECONDS = 2.0
"""A larger difference is reported: munge, credentials of stores and the end of an allocation go by the clock."""

COLUMNS = ("node", "host", "address", "interface", "reaches", "folder", "clock", "versions")


@dataclass(frozen=True)
class NodePlace:
    """Where this node is among the others.

    Attributes:
        count: the number of nodes.
        rank: the number of this node, from 0.
        address: the address of node 0.
        port: a free port there.
    """

    count: int
    rank: int
    address: str
    port: int


@dataclass
class Node:
    """What a node says of itself.

    Attributes:
        address: the address that its ranks announce to others, or None if its name has none.
        interface: the name of the network interface with that address.
        port: a port at which it answers.
        versions: of Python and the packages that must be alike.
        clock: seconds by which its clock is ahead of that of node 0.
        unreached: the numbers of nodes that it cannot connect to.
        folder: why it does not share the folder, or empty.
    """

    rank: int
    host: str
    address: str | None
    interface: str
    port: int
    versions: dict[str, str]
    clock: float = 0.0
    unreached: list[int] = field(default_factory=list)
    folder: str = ""


def compare_nodes(place: NodePlace, folder: Path) -> list[Node]:
    """Compares all nodes, each of which calls this. Returns what they say, in their order.

    Raises:
        ToolkitError: if they do not meet.
    """
    store = _meet(place)
    with _answering() as port:
        mine = Node(place.rank, platform.node(), *announced_address(), port, _versions())
        mine.clock = _clock_difference(store, place)
        others = _exchange(store, place, "address", asdict(mine))
        mine.unreached = [each["rank"] for each in others if not _reaches(each["address"], each["port"])]
        mine.folder = _folder_problem(store, place, folder)
        found = _exchange(store, place, "result", asdict(mine))
        _leave(store, place)
    return [Node(**each) for each in found]


def _meet(place: NodePlace) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=MEETING_SECONDS)
    try:
        return TCPStore(place.address, place.port, place.count, place.rank == 0, timeout=limit)
    except RuntimeError as error:  # torch's own; its subclasses differ between versions
        raise ToolkitError(
            f"node {place.rank} of {place.count} ({platform.node()}) did not meet the others at {place.address}:"
            f"{place.port} within {MEETING_SECONDS:.0f} s: {first_line(error)}. Check that all nodes run this command, "
            "that the address is node 0's, and that no firewall closes the port"
        ) from error


def _exchange(store: TCPStore, place: NodePlace, what: str, value: Any) -> list[Any]:
    """Returns what every node gives, in their order."""
    store.set(f"{what} {place.rank}", json.dumps(value))
    return [json.loads(store.get(f"{what} {rank}")) for rank in range(place.count)]


def _leave(store: TCPStore, place: NodePlace) -> None:
    """Lets node 0, which holds the place where they meet, leave last."""
    store.set(f"left {place.rank}", "")
    if place.rank == 0:
        store.wait([f"left {rank}" for rank in range(place.count)])


def _clock_difference(store: TCPStore, place: NodePlace) -> float:
    """Returns by how much this clock is ahead of node 0's, measured when all wait for its word."""
    _exchange(store, place, "ready", None)
    if place.rank == 0:
        time.sleep(0.2)  # now the others wait
        store.set("time", str(time.time()))
        return 0.0
    return -float(store.get("time")) + time.time()


def announced_address() -> tuple[str | None, str]:
    """Returns the address that gloo announces, by `GLOO_SOCKET_IFNAME` or the host's name, and its interface."""
    interfaces = {
        name: [each.address for each in addresses if each.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    if (name := os.environ.get(INTERFACE_VARIABLE)) is not None:
        return next(iter(interfaces.get(name, [])), None), name
    try:
        address = str(socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)[0][4][0])
    except OSError:
        return None, ""
    return address, next((name for name, known in interfaces.items() if address in known), "")


@contextmanager
def _answering() -> Iterator[int]:
    """Accepts connections on any interface inside the `with` block. Yields the port."""
    with socket.create_server(("", 0), backlog=1024) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=accept, name="answering", daemon=True).start()
        yield int(server.getsockname()[1])


def _reaches(address: str | None, port: int) -> bool:
    if address is None:
        return False
    try:
        socket.create_connection((address, port), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _folder_problem(store: TCPStore, place: NodePlace, folder: Path) -> str:
    """Returns why this node does not share the folder with the others, or an empty text. Leaves nothing there."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    mine, token = folder / f".node_{place.rank:05d}.{uuid.uuid4().hex}", uuid.uuid4().hex
    problem = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mine.write_text(token, encoding="utf-8")
    except OSError as error:
        problem = error.strerror or str(error)
    others = _exchange(store, place, "token", [str(mine.name), token])
    unseen = [
        str(rank) for rank, (name, text) in enumerate(others) if not appears(folder / name, text, CONNECT_SECONDS)
    ]
    _exchange(store, place, "seen", None)
    with contextlib.suppress(OSError):
        mine.unlink(missing_ok=True)
    _exchange(store, place, "removed", None)
    for each in made:  # another node may have removed one, but not the folders above it
        with contextlib.suppress(OSError):
            each.rmdir()
    return problem or (f"does not see files of node {', '.join(unseen)}" if unseen else "")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def rows(nodes: Sequence[Node]) -> tuple[list[list[str]], list[str]]:
    """Returns a row of `COLUMNS` for each node, and a sentence for each problem."""
    first, found, problems = nodes[0], [], []
    for node in nodes:
        name = f"node {node.rank} ({node.host})"
        reached = "all" if not node.unreached else f"not {', '.join(map(str, node.unreached))}"
        versions = _difference(first.versions, node.versions)
        cells = [str(node.rank), node.host, node.address or "none", node.interface or "?", reached]
        found.append([*cells, node.folder or "shared", f"{node.clock:+.1f} s", versions or "alike"])
        if node.unreached:
            problems.append(
                f"{name} does not reach node {', '.join(map(str, node.unreached))}: set {INTERFACE_VARIABLE}, on GPUs "
                "NCCL_SOCKET_IFNAME too, to the interface that joins the nodes, or open the ports between them"
            )
        if node.folder:
            problems.append(f"{name}: the folder {node.folder}; name one of a shared file system")
        if abs(node.clock) > CLOCK_SECONDS:
            problems.append(f"{name}: its clock differs by {node.clock:+.1f} s from node 0's; start its time service")
        if versions:
            problems.append(f"{name} has other versions than node 0: {versions}; install the same on both")
    return found, problems


def _difference(known: Mapping[str, str], found: Mapping[str, str]) -> str:
    names = sorted(name for name in {*known, *found} if known.get(name) != found.get(name))
    return ", ".join(f"{name} {found.get(name, 'missing')}" for name in names)
