"""Finds the longest row that a machine holds, and the settings that reach it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.positions import num_positions
from toolkit.paths import GIB
from toolkit.planning.planner import HEADROOM, Planner, PlanRow, Verdict, standing_bytes
from toolkit.planning.setup import Setup, require_ranks, settings_of
from toolkit.planning.time.hardware import Hardware
from toolkit.planning.workload.workload import UNMASKED, workload_of
from toolkit.recipe.combinations import refusals, refuse
from toolkit.recipe.recipe import Recipe, settings_of_recipe
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.blocks.chunks import CHUNK_TOKENS
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

PROBED = (16 * 1024, 32 * 1024)
"""Tokens of a rank that are probed. At any moment memory is a constant plus a multiple of the tokens, so two probes
predict all lengths whose peak is at the same moment."""

STEP = 1024
"""Lengths are multiples of this many tokens per rank."""

SPARED = 0.005
"""Share of a device's memory that may stay free if the two probes predicted too long a row."""


@dataclass(frozen=True)
class LongestRow:
    """A row and the plan of a step on it.

    Attributes:
        settings: the overrides that reach it.
        num_positions: the longest row that the model's own configuration allows, or None if it sets no limit.
    """

    tokens: int
    settings: tuple[str, ...]
    row: PlanRow
    num_positions: int | None

    def describe(self) -> str:
        """Describes the row, its peak and its settings."""
        host = f", {self.row.host_bytes / GIB:.0f} GiB of host memory a node" if self.row.host_bytes else ""
        return (
            f"{self.tokens:,} tokens: peak {self.row.peak.total / GIB:.1f} GiB{host}, about {self.row.time.mid:,.0f} s "
            f"a step of one row\n  {' '.join(self.settings)}{self._positions_warning()}"
        )

    def _positions_warning(self) -> str:
        if self.num_positions is None or self.tokens <= self.num_positions:
            return ""
        return (
            f"\n  the model itself ends at {self.num_positions:,} positions: raise max_position_embeddings in its "
            "config.json, with its rope parameters as its authors say"
        )


def longest_rows(recipe: Recipe, hardware: Hardware, ranks: int, precision: str) -> dict[Verdict, LongestRow]:
    """Returns the longest row with headroom (`fits`) and without (`tight`), with flash attention.

    As many ranks share it as can. Parameters are sharded among all ranks, and every block is checkpointed.

    Raises:
        BadInputError: if no row fits, or ranks cannot share rows.
    """
    require_ranks(ranks, hardware)
    refuse(replace(settings_of_recipe(recipe), longest_row=True))
    search = _Search(recipe, hardware, precision, _most_ranks_per_row(recipe, ranks, precision))
    found = {verdict: search.longest(verdict, ranks) for verdict in HEADROOM}
    rows = {verdict: row for verdict, row in found.items() if row is not None}
    if not rows:
        raise BadInputError(f"--longest-row: no row of {STEP:,} tokens a device fits; use more or larger devices")
    return rows


def _most_ranks_per_row(recipe: Recipe, ranks: int, precision: str) -> int:
    """Returns the most ranks that can share a row of the model."""
    config = base_of(workload_of(_with_rows(recipe, STEP, 1), precision).model).config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    return max(number for number in range(1, ranks + 1) if ranks % number == 0 and heads % number == 0)


def _with_rows(recipe: Recipe, tokens: int, parts: int) -> Recipe:
    data = recipe.data.model_copy(update={"max_length": tokens})
    return recipe.model_copy(update={"data": data, "sharding": recipe.sharding.model_copy(update={"sequence": parts})})


class _Line(NamedTuple):
    """A line through two lengths: tokens of a rank at which a memory is full first, and the room without tokens."""

    limit: float
    room: float


class _Search:
    def __init__(self, recipe: Recipe, hardware: Hardware, precision: str, parts: int) -> None:
        self.recipe, self.hardware, self.precision, self.parts = recipe, hardware, precision, parts
        self._planners: dict[int, Planner] = {}

    def longest(self, verdict: Verdict, ranks: int) -> LongestRow | None:
        """Returns the longest row of all setups, or None if no row fits."""
        setups = list(_setups(self.recipe, ranks, self.precision, self.planner(PROBED[0]).can_chunk))
        lines = {setup: self._fit_line(setup, verdict) for setup in setups}
        setup = max(setups, key=lambda setup: lines[setup].limit)
        local, row, shorter, longer = _rounded_down(lines[setup].limit), None, (0, -lines[setup].room), None
        while local > shorter[0]:
            tried = self.planner(local).row(setup)
            excess = max(self._excess_bytes(tried, verdict))
            if excess > 0:
                longer = (local, excess)
            else:
                row, shorter = tried, (local, excess)
            if longer is None or (row is not None and -shorter[1] < SPARED * self.hardware.memory_bytes):
                break
            local = min(_interpolated(shorter, longer), longer[0] - STEP)
        if row is None:
            return None
        positions = num_positions(self.planner(PROBED[0]).workload.model)
        return LongestRow(shorter[0] * self.parts, tuple(_overrides(setup, self.parts)), row, positions)

    def _fit_line(self, setup: Setup, verdict: Verdict) -> _Line:
        (few, many) = (self._excess_bytes(self.planner(local).row(setup), verdict) for local in PROBED)
        slopes = [(b - a) / (PROBED[1] - PROBED[0]) for a, b in zip(few, many, strict=True)]
        limit = min(PROBED[0] - a / slope for a, slope in zip(few, slopes, strict=True) if slope > 0)
        return _Line(limit, min(slope * PROBED[0] - a for a, slope in zip(few, slopes, strict=True)))

    def _excess_bytes(self, row: PlanRow, verdict: Verdict) -> list[float]:
        """Returns the bytes by which a row exceeds the device's memory, and the host's."""
        hardware = self.hardware
        need = row.peak.total * HEADROOM[verdict] + standing_bytes(hardware.device_type, row.setup)
        host = [] if hardware.host_memory_bytes is None else [row.host_bytes - float(hardware.host_memory_bytes)]
        return [need - hardware.memory_bytes, *host]

    def planner(self, local: int) -> Planner:
        if local not in self._planners:  # setups share a planner, which probes once
            recipe = _with_rows(self.recipe, local * self.parts, self.parts)
            workload = replace(workload_of(recipe, self.precision), attention=UNMASKED)
            self._planners[local] = Planner(recipe, workload, self.hardware)
        return self._planners[local]


def _interpolated(shorter: tuple[int, float], longer: tuple[int, float]) -> int:
    """Returns the tokens at which the line through two lengths, each with its excess bytes, crosses zero."""
    (low, room), (high, excess) = (shorter[0], -shorter[1]), longer
    return _rounded_down(low + (high - low) * room / (room + excess))


def _rounded_down(tokens: float) -> int:
    return int(tokens) // STEP * STEP


def _setups(recipe: Recipe, ranks: int, precision: str, can_chunk: bool) -> Iterator[Setup]:
    offloads = (False,) if recipe.sharding.offload == "none" else (False, True)
    chunk_tokens = recipe.sharding.chunk_tokens or (CHUNK_TOKENS if can_chunk else None)
    for offload, on_host in itertools.product(offloads, (False, True)):
        checkpointing = Checkpointing(1, on_host, chunk_tokens)
        setup = Setup(STRATEGIES["zero3"], MeshShape(1, ranks), offload, checkpointing, 1, 1)
        if not refusals(settings_of(recipe, setup, precision)):
            yield setup


def _overrides(setup: Setup, parts: int) -> Iterator[str]:
    if parts > 1:
        yield f"sharding.sequence={parts}"
    yield "sharding.activation_checkpointing=1"
    if setup.checkpointing is not None and setup.checkpointing.offload:
        yield "sharding.offload_checkpoints=true"
    if setup.checkpointing is not None and setup.checkpointing.chunk_tokens is not None:
        yield f"sharding.chunk_tokens={setup.checkpointing.chunk_tokens}"
    if setup.offload:
        yield "sharding.offload=optimizer"
    yield "training.micro_batch_size=1"
    yield "training.gradient_accumulation_steps=1"
