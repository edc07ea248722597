"""Describes the FSDP units of a model as data: which modules are gathered together, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from toolkit.terminal import format_bytes

UnitKind = Literal["block", "experts", "embeddings", "tail", "root"]


@dataclass(frozen=True)
class Unit:
    """The modules that one `fully_shard` call groups and gathers together.

    Attributes:
        name: the dotted path of a block (the first one if several share parameters) or of its experts, or the kind.
        kind: what the unit holds; see units.py.
        modules: the dotted paths passed to the call, in this order. The root's is `("",)`.
        class_name: the classes of these modules, each once, joined with `+`.
        num_parameters: the number of parameters that no earlier unit owns. Shared ones count once.
        num_bytes: their size in their current dtypes.
        reshard_after_forward: whether the unit is freed after forward. Not tail and root: backward needs them at once.
    """

    name: str
    kind: UnitKind
    modules: tuple[str, ...]
    class_name: str
    num_parameters: int
    num_bytes: int
    reshard_after_forward: bool


@dataclass(frozen=True)
class UnitPlan:
    """The units of a model in the order in which `fully_shard` is applied. The root is last."""

    units: tuple[Unit, ...]

    @property
    def blocks(self) -> tuple[Unit, ...]:
        """Returns the units of kind `block`."""
        return tuple(unit for unit in self.units if unit.kind == "block")

    @property
    def num_parameters(self) -> int:
        """Returns the number of parameters of all units."""
        return sum(unit.num_parameters for unit in self.units)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all units."""
        return sum(unit.num_bytes for unit in self.units)

    def groups(self) -> list[tuple[str, list[Unit]]]:
        """Groups consecutive blocks of one class, and names each group: `model.layers.0..31`."""
        runs = groupby(enumerate(self.units), key=lambda numbered: _group_key(*numbered))
        groups = [[unit for _, unit in run] for _, run in runs]
        return [(_group_name(group), group) for group in groups]

    def table(self) -> str:
        """Returns the plan as text, with a row for each of `groups`."""
        rows = [("unit", "class", "count", "parameters", "bytes")]
        rows += [_table_row(name, units[0].class_name, units) for name, units in self.groups()]
        rows.append(_table_row("total", "", self.units))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join(_align_row(row, widths) for row in rows)


def _group_key(position: int, unit: Unit) -> tuple[object, ...]:
    """Returns a key that is equal for consecutive blocks of one class and list, and for the experts of blocks."""
    if unit.kind == "experts":
        return unit.kind, unit.class_name
    prefix, _, number = unit.name.rpartition(".")
    is_numbered = unit.kind == "block" and number.isdecimal() and len(unit.modules) == 1
    return (prefix, unit.class_name, position - int(number)) if is_numbered else (unit.name,)


def _group_name(group: Sequence[Unit]) -> str:
    first, last = group[0], group[-1]
    if first.kind == "experts" and len(group) > 1:
        return f"{first.name} .. {last.name}"
    if len(group) > 1:
        return f"{first.name}..{last.name.rpartition('.')[2]}"
    more = len(first.modules) - 1 if first.kind == "block" else 0
    return f"{first.name} (+{more} sharing)" if more else first.name


def _table_row(name: str, class_name: str, units: Sequence[Unit]) -> tuple[str, str, str, str, str]:
    num_parameters = sum(unit.num_parameters for unit in units)
    num_bytes = sum(unit.num_bytes for unit in units)
    return name, class_name, str(len(units)), f"{num_parameters:,}", format_bytes(num_bytes)


def _align_row(row: Sequence[str], widths: Sequence[int]) -> str:
    texts = [text.ljust(width) for text, width in zip(row[:2], widths[:2], strict=True)]
    numbers = [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
    return "  ".join([*texts, *numbers])
