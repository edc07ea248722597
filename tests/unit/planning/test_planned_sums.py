"""The planner's sums on a Llama of two blocks, each against a number written out here."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchao.optim
from support.cases import cases
from support.planning_models import workload

from toolkit.paths import GIB
from toolkit.planning import probed
from toolkit.planning.hardware import hardware_of
from toolkit.planning.memory.state_bytes import OPTIMIZER_BYTES
from toolkit.planning.planner import Planner, standing_bytes, verdict_of
from toolkit.planning.setup import Setup
from toolkit.planning.traffic import OffloadPlan
from toolkit.planning.workload.workload import Workload
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

TABLES = cases(__file__)

TABLE = 2048 * 128
ATTENTION, INNER = 2 * 128 * 128 + 2 * 32 * 128, 3 * 128 * 352
BLOCK = ATTENTION + INNER + 2 * 128
P = TABLE + 2 * BLOCK + (TABLE + 128)
"""Parameters: embeddings, two blocks, the final norm and the head."""

H100 = hardware_of("h100_sxm")
NO_SAVES = {"every_minutes": "never"}


@functools.cache
def llama(precision: str, lora: bool) -> Workload:
    return workload("llama", precision=precision, lora=lora)


def planner(hardware: Any = H100, precision: str = "bf16", lora: bool = False, **changes: Any) -> Planner:
    values: dict[str, Any] = {
        "model": {"name_or_path": "a/b"},
        "data": {"train": "a.jsonl", "max_length": 64},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": NO_SAVES,
        **changes,
    }
    values["training"] = {"output_dir": "out", "max_steps": 1, **values.get("training", {})}
    return Planner(Recipe.from_mapping(values), llama(precision, lora), hardware)


FOUR = MeshShape(1, 4)


def setup(strategy: str = "zero3", mesh: MeshShape = FOUR, **changes: Any) -> Setup:
    made = Setup(STRATEGIES[strategy], mesh, False, None, micro_batch_size=1, accumulation=1)
    return replace(made, **changes)


OFFLOAD = {"sharding": {"offload": "optimizer"}}
EMA = {"training": {"ema": 0.9}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 16 * P),
        (EMA, 20 * P),
        # Two moments of 8 or 4 bits with a scale for each block of 256 or 128.
        ({"optimizer": {"learning_rate": 1e-3, "kind": "adamw_8bit"}}, int((8 + 2 + 2 * 4 / 256) * P)),
        ({"optimizer": {"learning_rate": 1e-3, "kind": "adamw_4bit"}}, int((8 + 1 + 2 * 4 / 128) * P)),
        ({"optimizer": {"learning_rate": 1e-3, "kind": "adamw_fp8"}}, int((8 + 2 + 2 * 4 / 256) * P)),
        # One moment of the blocks' matrices, two of the rest.
        ({"optimizer": {"learning_rate": 1e-3, "kind": "muon"}}, 16 * P - 4 * 2 * (ATTENTION + INNER)),
    ],
)
def test_the_state_of_a_whole_model(changes: dict[str, Any], expected: int) -> None:
    """Weights, gradients and optimizer state; ddp is probed by itself if they fit to the byte."""
    found = planner(**changes)
    assert found.model._whole_state_bytes == pytest.approx(expected, abs=50)  # each parameter is rounded down
    ddp = setup("ddp", MeshShape(4, 1))
    state = found.model._whole_state_bytes
    for memory, whole in ((state, True), (state - 1, False)):
        found.model.hardware = replace(H100, memory_bytes=memory)
        assert found.model._probe_key(ddp) == (whole, 1, None)
    assert found.model._probe_key(setup()) == (False, 1, None)


@pytest.mark.parametrize(
    ("kind", "optimizer"), [("adamw_8bit", "AdamW8bit"), ("adamw_4bit", "AdamW4bit"), ("adamw_fp8", "AdamWFp8")]
)
def test_the_bytes_of_small_moments_are_torchaos(kind: str, optimizer: str) -> None:
    """Beside codes and scales its moments have tables of at most 1 KiB each, whatever the parameter."""
    parameter = torch.nn.Parameter(torch.zeros(1024, 512))
    made = getattr(torchao.optim, optimizer)([parameter])
    moments = [made._new_buffer(parameter, signed) for signed in (True, False)]
    tensors = [getattr(moment, name) for moment in moments for name in ("codes", "scale")]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert OPTIMIZER_BYTES[kind] == held / parameter.numel()


def test_averages_take_4_bytes_of_each_trained_element_of_the_shard() -> None:
    assert planner(**EMA).state._average_bytes(setup()) == 4 * P // 4
    assert planner().state._average_bytes(setup()) == 0
    with_averages, without = (planner(**changes).moments(setup()) for changes in (EMA, {}))
    more = {one.optimizer - other.optimizer for one, other in zip(with_averages, without, strict=True)}
    assert more == {4 * P // 4}


def test_units_stay_on_the_device_while_there_is_room_to_the_byte() -> None:
    """16 bytes an element: the table, then the blocks, then the tail."""

    def kept(elements: int, spare: int = 0, **changes: Any) -> int:
        own = {"offload": "optimizer", "device_state_gib": (16 * elements + spare) / GIB}
        found = planner(sharding=own)
        residents = found.state.residents(setup(offload=True, **changes))
        return sum(found.model.units[index].trainable_numel(4) for index in residents)

    table, block = TABLE // 4, BLOCK // 4
    assert kept(table) == table
    assert kept(table, spare=-1) == 0
    assert kept(table + block) == table + block
    assert kept(table + block, spare=-1) == table
    assert kept(P) == P // 4
    assert planner(sharding={"offload": "optimizer", "device_state_gib": 1.0}).state.residents(setup()) == frozenset()
    assert planner(**OFFLOAD).state.residents(setup(offload=True)) == frozenset()


def test_a_gradient_lands_in_the_type_of_compute_after_a_single_backward_of_one_rank() -> None:
    alone = MeshShape(1, 1)
    found = planner(**OFFLOAD)
    assert found.state._landing_bytes(setup(mesh=alone, offload=True)) == 2
    assert found.state._landing_bytes(setup(mesh=alone, offload=True, accumulation=2)) == 4
    assert found.state._landing_bytes(setup(offload=True)) == 4
    assert planner(precision="no", **OFFLOAD).state._landing_bytes(setup(mesh=alone, offload=True)) == 4
    assert found.state.layout(setup(mesh=alone, offload=True)).reduce == 2
    assert found.state.layout(setup("zero1", alone, offload=True)).reduce == 4
    assert found.state.layout(setup(mesh=alone)).reduce == 4
    assert found.state.layout(setup(offload=True)).reduce == 4
    assert planner(precision="no", **OFFLOAD).state.layout(setup(mesh=alone, offload=True)).reduce == 4
    assert found.state.layout(setup("ddp", MeshShape(4, 1))).compute is None
    assert planner(precision="fp16").state.layout(setup()).compute == 2


def test_offloaded_state_on_the_host() -> None:
    """A master, two moments and a landing place; two buffers in bf16 of the longest unit; averages twice."""
    longest = TABLE + 128
    streamed = {"sharding": {"offload": "optimizer", "offload_executor": "device_stream"}}
    for changes, expected in (
        (OFFLOAD, 16 * P // 4 + 2 * 2 * longest // 4),
        (OFFLOAD | EMA, (16 + 8) * P // 4 + 4 * longest // 4),
        (OFFLOAD | {"precision": "no"}, 4 * P + 2 * 4 * longest // 4),
        (streamed, 16 * P // 4),
    ):
        assert planner(**changes).state._offloaded_bytes(setup(offload=True)) == expected
    assert planner().state._offloaded_bytes(setup()) == 0


def test_ranks_of_a_node_pin_their_own_memory() -> None:
    found = planner(**OFFLOAD)
    for mesh, ranks in ((MeshShape(1, 4), 4), (MeshShape(2, 8), 8), (MeshShape(4, 8), 8)):
        made = setup("hybrid", mesh, offload=True)
        assert found.state.of_node(made) == ranks * found.state.of_rank(made)
    assert planner(hardware_of("cpu"), **OFFLOAD).state.of_node(setup(offload=True)) == 0


def test_checkpoints_on_the_host_are_counted_beside_saves_and_state() -> None:
    """The inputs of two blocks, 64 tokens of 128 numbers in bf16; by block those of all micro-batches."""
    host = setup(checkpointing=Checkpointing(1, True), accumulation=3)
    inputs = 2 * 64 * 128 * 2
    assert planner().state.of_rank(host) == inputs
    assert planner().state.of_rank(replace(host, by_block=True)) == 3 * inputs
    state = 16 * P // 4 + 2 * 2 * (TABLE + 128) // 4
    assert planner(**OFFLOAD).state.of_rank(replace(host, offload=True)) == inputs + state
    saved = planner(checkpoint={"every_steps": 1}).state.of_rank(host)
    assert saved == inputs + 2 * 12 * P // 4


def test_buffers_of_streamed_state() -> None:
    """32 bytes for each element of the longest unit's shard."""

    def taken(executor: str | None) -> int:
        own = {"offload": "optimizer", "offload_executor": executor}
        return planner(sharding=own).state._streamed_bytes(setup(offload=True))

    assert taken("device_stream") == 32 * (TABLE + 128) // 4
    assert taken("cpu_torch") == taken("auto") == taken(None) == 0
    assert planner().state._streamed_bytes(setup()) == 0


def test_the_share_of_state_on_the_device() -> None:
    own = {"offload": "optimizer", "device_state_gib": 4 * TABLE / GIB}
    assert planner(sharding=own).state.offload_plan(setup(offload=True)) == OffloadPlan(TABLE / P, streams=False)
    streamed = {"offload": "optimizer", "offload_executor": "device_stream"}
    found = planner(sharding=streamed).state.offload_plan(setup(offload=True))
    assert found == OffloadPlan(0.0, streams=True)
    assert planner().state.offload_plan(setup()) is None


def test_the_bytes_of_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and two moments, once as a copy and once as the file that is written, if that is no larger."""
    saves = {"checkpoint": {"every_steps": 1}}
    assert planner(**saves).state.saving_bytes(setup()) == 2 * 12 * P // 4
    assert planner(**saves, **EMA).state.saving_bytes(setup()) == 2 * 16 * P // 4
    assert planner(hardware_of("cpu"), **saves).state.saving_bytes(setup()) == 12 * P // 4
    assert planner(checkpoint={"every_minutes": 5.0}).state.saving_bytes(setup()) == 2 * 12 * P // 4
    assert planner().state.saving_bytes(setup()) == 0
    lora = {"adapter": {"kind": "lora", "r": 8}}
    adapted = planner(lora=True, **saves, **lora)
    own = sum(parameter.shard_numel(4) for unit in adapted.model.units for parameter in unit.trainable)
    assert 0 < own < P // 40
    assert adapted.state.saving_bytes(setup()) == 2 * 12 * own
    # Without a section for adapters the frozen parameters are part of the state.
    frozen = sum(p.shard_numel(4) for unit in adapted.model.units for p in unit.parameters if not p.trainable)
    assert planner(lora=True, **saves).state.saving_bytes(setup()) == 2 * (12 * own + 4 * frozen)
    monkeypatch.setattr("toolkit.planning.planner.CHECKPOINT_FILE_BYTES", 1000)
    assert planner(**saves).state.saving_bytes(setup()) == 12 * P // 4 + 1000


def test_a_peak_fits_with_a_quarter_beside_it_and_the_context() -> None:
    """2 GiB of context; 1.25 times the peak fits, 1.05 times it is tight, to the byte."""
    peak, context = 4 * 10**9, 2 * 2**30

    def verdict(memory: int, host: int = 0, host_memory: int | None = 10 * GIB) -> tuple[str, int, str]:
        hardware = replace(H100, memory_bytes=memory, host_memory_bytes=host_memory)
        return verdict_of(peak, host, hardware)

    assert verdict(5 * 10**9 + context) == ("fits", 5 * 10**9 + context, "")
    assert verdict(5 * 10**9 + context - 1) == ("tight", 42 * 10**8 + context, "")
    assert verdict(42 * 10**8 + context) == ("tight", 42 * 10**8 + context, "")
    assert verdict(42 * 10**8 + context - 1) == ("no", 42 * 10**8 + context, "5.9 GiB of 6")
    assert verdict(10**10, 10 * GIB)[0] == "fits"
    found = ("no", 5 * 10**9 + context, "20 GiB of host memory a node, of 10")
    assert verdict(10**10, 20 * GIB) == found
    assert verdict(10**10, 20 * GIB, None)[0] == "fits"


def test_what_stands_beside_the_peak() -> None:
    """By block a workspace of 32 MiB for the thread of each micro-batch, on a GPU."""
    by_block = setup(by_block=True, accumulation=4)
    assert standing_bytes("cuda", by_block) == 2 * 2**30 + 4 * 32 * 2**20
    assert standing_bytes("cpu", by_block) == 2**29
    assert standing_bytes("cuda", setup(accumulation=4)) == standing_bytes("cuda", None) == 2 * 2**30


def test_a_step_has_as_many_tokens_by_block_and_without() -> None:
    found = planner()
    alone = MeshShape(1, 1)
    once, four, by_block = (
        found.row(setup(mesh=alone, **changes))
        for changes in ({}, {"accumulation": 4}, {"accumulation": 4, "by_block": True})
    )
    for row in (four, by_block):
        assert row.tokens == 4 * once.tokens == 4 * 64
    assert found.row(setup(mesh=MeshShape(1, 4), micro_batch_size=2)).tokens == 2 * 4 * 64


def test_ddp_keeps_its_buckets_between_steps_and_fsdp2_no_gradients() -> None:
    own = planner(hardware_of("cpu"), checkpoint={"every_steps": 1})
    for strategy, mesh, kept in (("ddp", MeshShape(4, 1), 4 * P), ("zero3", MeshShape(1, 4), 0)):
        save = next((moment for moment in own.moments(setup(strategy, mesh)) if moment.moment == "save"), None)
        assert save is not None
        assert save.gradients == pytest.approx(kept, rel=0.01)
    steps = own.moments(setup())
    assert [one for one in steps if one.moment != "save"] == planner(hardware_of("cpu")).moments(setup())


def test_a_gpus_rank_saves_from_the_host() -> None:
    """So no moment of it holds the file, and none the state that is offloaded."""
    found = planner(
        checkpoint={"every_steps": 1, "asynchronous": False},
        sharding={"offload": "optimizer", "offload_executor": "cpu_torch"},
    )
    moments = found.moments(setup(offload=True))
    assert "save" not in {moment.moment for moment in moments}
    assert {moment.optimizer for moment in moments} == {0}


def test_tokens_are_exchanged_in_each_micro_batch() -> None:
    """To experts and back, forward and backward: 64 tokens of 128 numbers in bf16 to two experts each, half away."""
    spread = replace(workload("mixtral"), experts=2)
    found = Planner(planner().recipe, spread, H100)
    for accumulation in (1, 3):
        sent = found.row(setup(accumulation=accumulation)).traffic
        assert sent.exchanged == accumulation * 4 * 2 * 64 * 2 * 128 * 2 // 2
        assert sent.sequence == 1


@pytest.mark.parametrize(("kind", "positions", "expected"), TABLES["ANSWERS"])
def test_answers_end_with_the_models_positions(
    monkeypatch: pytest.MonkeyPatch, kind: str, positions: int | None, expected: int
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(probed, "num_positions", lambda _: positions)
    monkeypatch.setattr(probed, "answering", lambda _, *numbers: asked.append(numbers))
    answers = {"file": "a.jsonl", "max_new_tokens": 40, "batch_size": 3}
    data = {"train": "a.jsonl", "max_length": 64, "validation_fraction": 0.1}
    planner(answers=answers, data=data, objective={"kind": kind}).model.writing(False, 3, 64, 40)
    assert asked == [(3, 64, expected, False)]
