"""Bytes of one unit's tensors, each written out here; tensors are rounded up to 512 bytes."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from toolkit.planning.memory import state_bytes
from toolkit.planning.memory.state_bytes import HeldUnit, MemoryLayout, held_unit, optimizer_bytes, rounded
from toolkit.planning.workload.unit_shapes import ParameterShape, UnitShape

TRAINED = ParameterShape((1024, 3), True, held=4)
FROZEN = ParameterShape((1024, 5), False, held=2)
FLOAT32 = ParameterShape((1024,), True, held=4, is_cast=False)
LAYOUT = MemoryLayout(shard=4, compute=2, reduce=4, optimizer=8)


@pytest.fixture(autouse=True)
def oldest_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 of torch 2.13 keeps the last gradient alive, and reduces one type."""
    monkeypatch.setattr(state_bytes, "autograd_sums_gradients", lambda: False)
    monkeypatch.setattr(state_bytes, "frees_all_gradients_before_reducing", lambda: False)


def unit(*parameters: ParameterShape) -> UnitShape:
    return UnitShape("block", "block", True, parameters)


def of(held: HeldUnit, *names: str) -> dict[str, int]:
    return {name: getattr(held, name) for name in names}


def unlike(held: HeldUnit, **expected: int) -> dict[str, tuple[int, int]]:
    """The fields that are not as expected; fields that are not named are 0."""
    found = {field.name: int(getattr(held, field.name)) for field in fields(held)}
    return {name: (value, expected.get(name, 0)) for name, value in found.items() if value != expected.get(name, 0)}


def test_a_unit_on_four_ranks() -> None:
    """3072 trained elements in float32 and 5120 frozen ones in bf16, gathered in bf16 and reduced in float32."""
    held = held_unit(unit(FROZEN, TRAINED), LAYOUT, resident=False)
    assert (
        unlike(
            held,
            sharded=4 * 3072 // 4 + 2 * 5120 // 4,
            whole=2 * (3072 + 5120),
            gather_input=2 * 3072 // 4,  # the frozen ones are held in bf16
            gather_output=2 * (3072 + 5120),
            cast_alone=2 * 3072,
            reduce_input=4 * 3072,
            reduce_output=4 * 3072 // 4,
            last_gradient=2 * 3072,
            last_sum=4 * 3072,
            whole_sums=4 * 3072,
            optimizer=2 * 4 * 768 + 512,
            gradient=2,
        )
        == {}
    )


def test_shards_are_padded_to_whole_rows() -> None:
    """1022 rows of 4 ranks are 256 on each, and 1024 together."""
    odd = ParameterShape((1022, 4), True, held=4)
    held = held_unit(unit(odd), LAYOUT, resident=False)
    assert of(held, "sharded", "whole", "reduce_input", "last_gradient", "whole_sums") == {
        "sharded": 4 * 256 * 4,
        "whole": 2 * 1024 * 4,
        "reduce_input": 4 * 1024 * 4,
        "last_gradient": rounded(2 * 1022 * 4),
        "whole_sums": rounded(4 * 1022 * 4),
    }
    assert rounded(1) == rounded(512) == 512
    assert rounded(513) == 1024


def test_two_ranks_gather_and_keep_the_last_gradient() -> None:
    held = held_unit(unit(TRAINED), replace(LAYOUT, shard=2), resident=False)
    assert of(held, "gather_output", "last_gradient", "last_sum") == {
        "gather_output": 2 * 3072,
        "last_gradient": 2 * 3072,
        "last_sum": 4 * 3072,
    }


def test_one_rank_gathers_and_keeps_nothing_for_a_reduction() -> None:
    held = held_unit(unit(FROZEN, TRAINED), replace(LAYOUT, shard=1), resident=False)
    names = ("gather_output", "cast_alone", "last_gradient", "last_sum", "quotient", "reduce_output", "whole_sums")
    assert of(held, *names) == {
        "gather_output": 0,
        "cast_alone": 2 * 3072,
        "last_gradient": 0,
        "last_sum": 0,
        "quotient": 0,
        "reduce_output": 4 * 3072,
        "whole_sums": 4 * 3072,
    }
    # Experts that one of four ranks holds are divided into a new tensor.
    alone = held_unit(unit(replace(TRAINED, spread=4)), LAYOUT, resident=False)
    assert of(alone, "quotient", "gather_output", "last_gradient") == {
        "quotient": 4 * 3072,
        "gather_output": 0,
        "last_gradient": 0,
    }


def test_a_newer_torch_keeps_no_gradient_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_bytes, "frees_all_gradients_before_reducing", lambda: True)
    held = held_unit(unit(TRAINED), LAYOUT, resident=False)
    assert (held.last_gradient, held.last_sum, held.last_turned) == (0, 0, 0)


def test_two_types_are_made_alike_before_they_are_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside 6,144 and 4,096 bytes of gradients first 12,288 of the first one's copy, then 16,384 without it."""
    held = held_unit(unit(TRAINED, FLOAT32), LAYOUT, resident=False)
    assert held.made_alike == max(12_288 + 6_144 + 4_096, 12_288 + 4_096 + 4_096)
    assert (held.gradient, held.last_gradient) == (4, 4 * 1024)
    other = held_unit(unit(FLOAT32, TRAINED), LAYOUT, resident=False)
    assert other.made_alike == max(4_096 + 4_096 + 6_144, 4_096 + 12_288 + 6_144)
    assert held_unit(unit(TRAINED), LAYOUT, resident=False).made_alike == 0
    assert held_unit(unit(TRAINED, FLOAT32), replace(LAYOUT, compute=None), resident=False).made_alike == 0
    monkeypatch.setattr(state_bytes, "autograd_sums_gradients", lambda: True)
    held = held_unit(unit(TRAINED, FLOAT32), LAYOUT, resident=False)
    assert (held.made_alike, held.gradient, held.last_gradient) == (0, 2, 2 * 1024)


def test_without_mixed_precision_each_keeps_its_own_type() -> None:
    held = held_unit(unit(FROZEN, TRAINED), replace(LAYOUT, compute=None), resident=False)
    names = ("whole", "gather_input", "cast_alone", "gradient", "last_gradient")
    assert of(held, *names) == {
        "whole": 2 * 5120 + 4 * 3072,
        "gather_input": 0,
        "cast_alone": 0,
        "gradient": 4,
        "last_gradient": 4 * 3072,
    }
    frozen = held_unit(unit(FROZEN), replace(LAYOUT, compute=None), resident=False)
    assert of(frozen, "gradient", "last_gradient", "last_sum", "reduce_input", "optimizer", "turned") == {
        "gradient": 0,
        "last_gradient": 0,
        "last_sum": 0,
        "reduce_input": 0,
        "optimizer": 0,
        "turned": 0,
    }


def test_offloaded_shards_are_held_in_the_type_of_compute() -> None:
    """Their gradients are cast to it; state that stays is a master, two moments and a landing place, each flat."""
    offloaded = replace(LAYOUT, offload=True)
    held = held_unit(unit(FROZEN, TRAINED), offloaded, resident=False)
    assert of(held, "sharded", "gather_input", "cast_gradient", "optimizer") == {
        "sharded": 2 * 768 + 2 * 1280,
        "gather_input": 0,
        "cast_gradient": 2 * 768,
        "optimizer": 0,
    }
    assert held_unit(unit(TRAINED), offloaded, resident=True).optimizer == 3 * 4 * 768 + 4 * 768
    low = held_unit(unit(TRAINED), replace(offloaded, reduce=2), resident=True)
    assert (low.optimizer, low.cast_gradient) == (3 * 4 * 768 + 2 * 768, 0)
    held_low = held_unit(unit(replace(TRAINED, held=2)), LAYOUT, resident=False)
    assert held_low.cast_gradient == 2 * 768, "reduced in float32, handed on in bf16"


def test_what_a_node_keeps_between_forward_and_backward() -> None:
    """Half of each parameter on two ranks; while the first is copied both are whole, then it is freed."""
    held = held_unit(unit(FROZEN, TRAINED), replace(LAYOUT, reshard_after_forward=2), resident=False)
    first, second = 2 * 5120, 2 * 3072
    assert held.copied == first // 2 + second // 2
    assert held.copying == max(first + second + first // 2, second + first // 2 + second // 2)
    small_first = held_unit(unit(TRAINED, FROZEN), replace(LAYOUT, reshard_after_forward=2), resident=False)
    assert small_first.copying == max(second + first + second // 2, first + second // 2 + first // 2)
    three = held_unit(unit(TRAINED, FROZEN, FROZEN), replace(LAYOUT, reshard_after_forward=2), resident=False)
    assert three.copying == second + 2 * first + second // 2, "before the first of them is freed"
    growing = held_unit(
        unit(TRAINED, ParameterShape((1024, 20), False, held=2)),
        replace(LAYOUT, reshard_after_forward=2),
        resident=False,
    )
    assert growing.copying == 2 * 20480 + second // 2 + 20480, "while the last is copied"
    assert held_unit(unit(), replace(LAYOUT, reshard_after_forward=2), resident=False).copying == 0


def test_stacks_that_are_cut_along_their_matrices_rows_are_turned() -> None:
    """3 experts on 4 ranks are cut along the 8 rows of each; rows alone are not."""
    stack, larger = ParameterShape((3, 8, 32), True, held=4), ParameterShape((3, 8, 64), True, held=4)
    held = held_unit(unit(TRAINED, larger, stack), LAYOUT, resident=False)
    assert of(held, "assembled", "turned", "last_turned") == {
        "assembled": 2 * 768 + 2 * 1536,
        "turned": 1536,
        "last_turned": 768,
    }


def test_state_of_each_kind_of_optimizer() -> None:
    """Two moments and a count of steps; muon keeps one moment of a matrix, and no count."""
    assert optimizer_bytes([TRAINED], LAYOUT, resident=False) == 2 * 4 * 768 + 512
    single = replace(TRAINED, moments=1)
    assert optimizer_bytes([TRAINED, single], LAYOUT, resident=False) == 2 * 4 * 768 + 512 + 4 * 768
    low = replace(LAYOUT, optimizer=2.0625)
    assert optimizer_bytes([TRAINED], low, resident=False) == 2 * rounded(768 * 1.03125) + 512
