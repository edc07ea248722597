"""Checks that other hosts can reach the ranks of this host at the address that gloo announces."""

from __future__ import annotations

import ipaddress
import os
import socket

from toolkit.errors import BadInputError

INTERFACE = "GLOO_SOCKET_IFNAME"


def require_reachable_host() -> None:
    """Checks that the other hosts of a run can reach this one by its name.

    gloo announces the address of this host's name. Debian and Ubuntu set it to 127.0.1.1 in /etc/hosts. Another host
    then looks for the rank on itself, and the run hangs until it fails with "connection refused".

    Raises:
        BadInputError: if the run has several hosts and the name has no address or a loopback address.
    """
    if not _spans_hosts() or os.environ.get(INTERFACE):
        return
    name = socket.gethostname()
    address = _address_of(name)
    if address is not None and not ipaddress.ip_address(address).is_loopback:
        return
    found = "to no address" if address is None else f"to {address}, which is this host alone"
    raise BadInputError(
        f"the name of this host, {name}, leads {found}, so that the other hosts cannot reach its ranks; set "
        f"{INTERFACE} to the interface that joins the hosts (`ip -brief address` lists them), on GPUs "
        "NCCL_SOCKET_IFNAME as well, or give the name its own address in /etc/hosts"
    )


def _spans_hosts() -> bool:
    """Returns whether the launcher has started ranks on other hosts."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    # Two launchers on one host meet there, as a rehearsal does.
    return world_size > on_host and not _is_loopback(os.environ.get("MASTER_ADDR", "localhost"))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _address_of(name: str) -> str | None:
    """Returns the address that gloo would announce, or None if the name does not resolve."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None
