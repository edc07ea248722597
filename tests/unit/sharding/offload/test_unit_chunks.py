"""State that passes through the device in chunks is stepped as whole parameters are, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from toolkit.sharding.offload import executors
from toolkit.sharding.offload.executors import ALIGNMENT, DeviceStream, UnitStep, chunks_of
from toolkit.sharding.offload.offloaded_units import OffloadedUnit, UnitSlice
from toolkit.sharding.offload.settings import hyper_parameters, state_names

# Elements of each shard and of its padding; one rank has nothing of the last but one.
SHARDS = [(1000, 24), (3, 0), (517, 1), (0, 300), (90, 0)]


def make_unit() -> OffloadedUnit:
    slots: list[UnitSlice] = []
    offset = 0
    for numel, padding in SHARDS:
        parameter: Any = torch.empty(0)
        slots.append(
            UnitSlice(f"p{len(slots)}", parameter, offset, torch.Size((numel,)), group=0, step=torch.zeros(()))
        )
        offset += numel + padding
    return OffloadedUnit("unit", [], slots, offset)


@pytest.mark.parametrize("limit", [ALIGNMENT, 256, 1024, 10**6])
def test_every_element_is_in_one_chunk(limit: int) -> None:
    unit = make_unit()
    seen = torch.zeros(unit.numel, dtype=torch.int64)
    for chunk in chunks_of(unit, limit):
        assert chunk.unit.numel == chunk.end - chunk.begin <= limit
        for part in chunk.unit.slots:
            part.view(chunk.of(seen)).add_(1)
    for slot in unit.slots:
        assert slot.view(seen).eq(1).all()
    assert seen.sum() == sum(numel for numel, _ in SHARDS)
    # No vectorised kernel ends within a parameter.
    parts = [part.numel for chunk in chunks_of(unit, limit) for part in chunk.unit.slots]
    assert sum(numel % ALIGNMENT != 0 for numel in parts) <= len(SHARDS)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("limit", [ALIGNMENT, 256, 10**6])
def test_steps_are_those_of_whole_parameters(monkeypatch: pytest.MonkeyPatch, kind: Any, limit: int) -> None:
    monkeypatch.setattr(executors, "STREAM_CHUNK", limit)
    options = {"fused": True} if kind is torch.optim.AdamW else {"momentum": 0.9}
    unit = make_unit()
    generator = torch.Generator().manual_seed(7)
    unit.master = torch.randn(unit.numel, generator=generator)
    expected = [torch.nn.Parameter(slot.view(unit.master).clone()) for slot in unit.slots]
    optimizer = kind(expected, lr=0.1, **options)
    names = state_names(optimizer)
    unit.moments = {name: torch.zeros(unit.numel) for name in names}
    stream = DeviceStream(optimizer, [unit], torch.device("cpu"))
    assert max(flat.numel() for flat in stream._buffers[0].values()) == min(limit, unit.numel)
    for number in range(3):
        gradient = torch.randn(unit.numel, generator=generator)
        present = frozenset({0, 2, 3, 4} if number == 1 else range(5))  # one is not used in every step
        for i, (slot, parameter) in enumerate(zip(unit.slots, expected, strict=True)):
            parameter.grad = slot.view(gradient).mul(0.5) if i in present else None
        settings = hyper_parameters(optimizer)
        optimizer.step()
        weights = torch.full((unit.numel,), float("nan"))
        for begin, new in stream.step(UnitStep(unit, gradient, present, settings, 0.5)):
            weights[begin : begin + new.numel()] = new
        for slot, parameter in zip(unit.slots, expected, strict=True):
            assert torch.equal(slot.view(unit.master), parameter)
            assert torch.equal(slot.view(weights), parameter)
            state = optimizer.state[parameter]
            for name in names if parameter in optimizer.state else ():
                assert torch.equal(slot.view(unit.moments[name]), state[name])
            if kind is torch.optim.AdamW:
                assert slot.step == state["step"]
