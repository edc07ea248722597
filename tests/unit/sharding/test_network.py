"""A host whose name leads to itself alone."""

from __future__ import annotations

import socket

import pytest
from support.cases import cases

from toolkit.errors import BadInputError
from toolkit.sharding import sharding_kwargs

TABLES = cases(__file__)

TWO_HOSTS = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}


def build(monkeypatch: pytest.MonkeyPatch, address: str | None, **variables: str) -> str:
    """What the sharding arguments of a run on two hosts come to, where this host's name leads to `address`."""

    def look_up(*_: object, **__: object) -> list[object]:
        if address is None:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "node-a")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in (TWO_HOSTS | variables).items():
        monkeypatch.setenv(name, value)
    try:
        sharding_kwargs("zero3")
    except BadInputError as error:
        return str(error)
    return "built"


def test_a_name_that_leads_to_this_host_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = build(monkeypatch, "127.0.1.1")
    assert text.startswith("the name of this host, node-a, leads to 127.0.1.1, which is this host alone")
    for mend in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "/etc/hosts"):
        assert mend in text
    assert "node-a, leads to no address" in build(monkeypatch, None)


@pytest.mark.parametrize(("address", "variables"), TABLES["OTHERS"])
def test_other_names_and_runs_are_not(monkeypatch: pytest.MonkeyPatch, address: str, variables: dict[str, str]) -> None:
    assert build(monkeypatch, address, **variables) == "built"
