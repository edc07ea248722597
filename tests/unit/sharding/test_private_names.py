"""The private names of the libraries that the toolkit uses are still there.

When one of these fails after an upgrade, toolkit/sharding/fsdp2/private_names.yaml says which file to change.
"""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from toolkit.sharding.fsdp2.versions import PRIVATE_NAMES, SUPPORTED_VERSIONS, PrivateName


def source(function: object) -> str:
    return inspect.getsource(function)  # type: ignore[arg-type]


def test_private_names_are_in_place() -> None:
    assert {name.place: problem for name in PRIVATE_NAMES if (problem := name.problem()) is not None} == {}


MOVED = [
    (PrivateName("toolkit.nowhere:f"), "toolkit.nowhere:f: No module named"),
    (PrivateName("toolkit.ranks:nowhere"), "has no attribute 'nowhere'"),
    (PrivateName("toolkit.ranks:rank", ("def nowhere",)), "holds no 'def nowhere'"),
    (PrivateName("toolkit.ranks:rank", ("return", "def rank")), "holds no 'def rank'"),
    (PrivateName("toolkit.ranks:rank", (("def nothing", "def nowhere"),)), "'def nothing' or 'def nowhere'"),
    (PrivateName("toolkit.ranks:rank", (("def nothing", "def rank"), "return")), None),
]


def test_a_name_that_moved_is_found() -> None:
    for name, told in MOVED:
        problem = name.problem()
        assert problem is None if told is None else told in str(problem)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (_fsdp_collectives.DefaultAllGather.__call__, "output_tensor input_tensor group async_op"),
        (_fsdp_collectives.DefaultReduceScatter.__call__, "output_tensor input_tensor group op async_op"),
        (_fsdp_collectives.DefaultAllGather.allocate, "size dtype device"),
    ],
)
def test_our_collectives_take_the_arguments_of_fsdp2s_own(call: Any, arguments: str) -> None:
    assert list(inspect.signature(call).parameters) == ["self", *arguments.split()]


def test_the_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for package, allowed in SUPPORTED_VERSIONS.items():
        # peft has no upper limit there: a newer one is tried if its private names are in place.
        known = allowed.split(",")[0] if package == "peft" else allowed
        assert f"{package}{known}" in project["dependencies"]


def test_what_verify_takes_of_the_launcher() -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    assert callable(launch_command_parser)
    assert "return args, defaults, mp_from_config_flag" in source(_validate_launch_command)
