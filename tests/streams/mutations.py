"""Takes one wait, hold or event out of the toolkit's source, to see whether the checker misses it."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

MODULES = {
    "by_block": "toolkit.sharding.blocks.by_block",
    "unit_states": "toolkit.sharding.fsdp2.unit_states",
    "capture": "toolkit.sharding.offload.capture",
    "engine": "toolkit.sharding.offload.engine",
    "executors": "toolkit.sharding.offload.executors",
    "facade": "toolkit.sharding.offload.facade",
    "fsdp_replaced": "toolkit.sharding.fsdp2.fsdp_replaced",
    "state": "toolkit.checkpoint.state",
    "fsdp2": "torch.distributed.fsdp._fully_shard._fsdp_param_group",
}


@dataclass(frozen=True)
class Mutation:
    """A change of one function's source.

    Attributes:
        where: `module.function` or `module.Class.method`; the module's short name is one of `MODULES`.
        old: found once in the source of the function.
    """

    where: str
    old: str
    new: str = "pass"

    def __str__(self) -> str:
        return f"{self.where}: {' '.join(self.old.split())}"


@contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """Inside, the function is what `mutation` makes of it. Objects that hold the function already keep it."""
    owner, name = _owner(mutation.where)
    original = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(mutation.old) == 1, f"{mutation}: not found once in the source"
    lines = "\n" * (original.__code__.co_firstlineno - 1)
    code = compile(lines + source.replace(mutation.old, mutation.new), original.__code__.co_filename, "exec")
    made: dict[str, Any] = {}
    exec(code, original.__globals__, made)
    with mock.patch.object(owner, name, made[name]):
        yield


def _owner(where: str) -> tuple[Any, str]:
    """What holds the function, and under which name."""
    module, *classes, name = where.split(".")
    owner: Any = importlib.import_module(MODULES[module])
    for each in classes:
        owner = getattr(owner, each)
    return owner, name
