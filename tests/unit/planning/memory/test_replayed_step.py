"""FSDP2's buffers over a step of a block and a root, at every moment, with each number written out here.

On 4 ranks in bf16 the block holds a shard of 1,024 bytes in float32, 2,048 when it is gathered, and reduces 4,096 into
1,024; the root half of each. Weights keep two moments and a step count: 2 x 1,024 + 512 and 2 x 512 + 512 bytes.
"""

from __future__ import annotations

import pytest

from toolkit.planning.memory import replay as replayed
from toolkit.planning.memory import state_bytes
from toolkit.planning.memory.probe import MomentKind, Probe, ProbeEvent
from toolkit.planning.memory.replay import Memory, replay
from toolkit.planning.memory.state_bytes import MemoryLayout
from toolkit.planning.workload.unit_shapes import ParameterShape, UnitShape
from toolkit.sharding.plan.strategy import STRATEGIES

BLOCK = UnitShape("block", "block", True, (ParameterShape((1024,), True, held=4),))
ROOT = UnitShape("root", "root", False, (ParameterShape((512,), True, held=4),))
STATES, OPTIMIZER = 1024 + 512 + 7, 2 * 1024 + 512 + 2 * 512 + 512  # 7 bytes of buffers
EVENTS: list[tuple[MomentKind, int, int, int, int]] = [
    # kind, unit, level, peak, gradients
    ("enter", 1, 0, 0, 0),
    ("enter", 0, 100, 100, 0),
    ("exit", 0, 300, 350, 0),
    ("exit", 1, 500, 600, 0),
    ("loss", 1, 500, 550, 0),
    ("pre_backward", 1, 500, 500, 0),
    ("pre_backward", 0, 300, 700, 0),
    ("post_backward", 0, 50, 400, 2048),
    ("post_backward", 1, 0, 60, 1024),
    ("end", 1, 0, 0, 0),
]
PROBE = Probe(tuple(ProbeEvent(*event) for event in EVENTS), buffers=7)
LAYOUT = MemoryLayout(shard=4, compute=2, reduce=4, optimizer=8)

ACTIVATIONS = {
    "gather of root": (0, 0),
    "forward": (100, 0),
    "gather of block": (100, 0),
    "forward of block": (350, 0),
    "forward of the head": (300, 300),
    "loss": (300, 250),
    "backward of the loss": (300, 200),
    "backward of the head": (300, 400),
    "backward of block": (400, 0),
    "reduction of block": (50, 0),
    "backward": (60, 0),
    "reduction of root": (0, 0),
    "optimizer step": (0, 0),
}
"""Moment -> what backward needs, and what the head and the loss have beyond that."""

ONCE = {
    # (gathered, gradients, communication)
    "gather of root": (1024, 0, 1024),
    "forward": (1024, 0, 1024),
    "gather of block": (1024 + 2048, 0, 1024 + 2048),
    "forward of block": (1024 + 2048, 0, 2048),
    "forward of the head": (1024, 0, 2048),
    "loss": (1024, 0, 0),
    "backward of the loss": (1024, 0, 0),
    "backward of the head": (1024, 0, 2048),  # the block is gathered ahead
    "backward of block": (1024 + 2048, 0, 0),
    "reduction of block": (1024, 2048 + 1024, 4096),
    "backward": (1024, 1024, 4096),
    "reduction of root": (0, 1024 + 1024 + 512, 2048),
    "optimizer step": (0, 1024 + 512, 0),
}
"""zero3 with one micro-batch: the gradient that the reduction's loop holds stays beside the reduced one."""

SUMMED = {name: (gathered, gradients + 1536, sent) for name, (gathered, gradients, sent) in ONCE.items()} | {
    "backward": (1024, 1024 + 512, 4096),  # the block's gradient has been added to the sum
    "reduction of root": (0, 1024 + 512 + 1024 + 512, 2048),
    "optimizer step": (0, 1024 + 512, 0),
}
"""zero3 with three: later ones find the reduced gradients of those before."""

KEPT = {
    "gather of root": (1024, 0, 1024),
    "forward": (3072, 6144, 0),
    "gather of block": (3072, 0, 3072),
    "forward of block": (3072, 6144, 0),
    "forward of the head": (3072, 6144, 0),
    "loss": (3072, 6144, 0),
    "backward of the loss": (3072, 6144, 0),
    "backward of the head": (3072, 6144, 0),
    "backward of block": (3072, 6144, 0),
    "reduction of block": (1024, 2048 + 4096 + 1024, 4096),
    "backward": (3072, 6144, 0),
    "reduction of root": (3072, 6144 + 1024, 0),
    "optimizer step": (0, 1536, 0),
}
"""zero1 with three: units stay gathered, and whole gradients are summed in float32 until the last reduces them."""

REDUCED_EACH = {
    **KEPT,
    "forward": (3072, 1536, 0),
    "forward of block": (3072, 0, 2048),  # of the first micro-batch, as the gather is larger than the gradients
    "forward of the head": (3072, 0, 2048),
    **dict.fromkeys(("loss", "backward of the loss", "backward of the head", "backward of block"), (3072, 1536, 0)),
    "reduction of block": (3072, 1536 + 2048 + 1024, 4096),
    "backward": (3072, 1536, 4096),
    "reduction of root": (3072, 1536 + 1024 + 512, 2048),
}
"""zero2 with three: units stay gathered, and each micro-batch is reduced."""


@pytest.fixture(autouse=True)
def oldest_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 as of torch 2.13."""
    monkeypatch.setattr(state_bytes, "frees_all_gradients_before_reducing", lambda: False)
    monkeypatch.setattr(replayed, "frees_gather_before_copying", lambda: False)


def moments(strategy: str, accumulation: int, layout: MemoryLayout = LAYOUT) -> dict[str, Memory]:
    found = replay([BLOCK, ROOT], PROBE, STRATEGIES[strategy], layout, accumulation)
    return {moment.moment: moment for moment in found}


@pytest.mark.parametrize(
    ("strategy", "accumulation", "expected"),
    [
        ("zero3", 1, ONCE),
        ("zero3", 2, SUMMED),
        ("zero3", 3, SUMMED),
        ("zero3", 9, SUMMED),
        ("zero1", 3, KEPT),
        ("zero1", 9, KEPT),
        ("zero2", 3, REDUCED_EACH),
    ],
)
def test_each_moment_of_a_step(strategy: str, accumulation: int, expected: dict[str, tuple[int, int, int]]) -> None:
    found = moments(strategy, accumulation)
    assert {name: (one.gathered, one.gradients, one.communication) for name, one in found.items()} == expected
    assert {name: (one.activations, one.logits) for name, one in found.items()} == ACTIVATIONS
    for one in found.values():
        assert (one.parameters, one.optimizer) == (STATES, OPTIMIZER)
        assert one.total == STATES + OPTIMIZER + sum(expected[one.moment]) + sum(ACTIVATIONS[one.moment])


def test_offloaded_gradients_leave_for_the_host() -> None:
    """Shards are in bf16, so the block's is 512 bytes; the last micro-batch's sums live until they are copied."""
    offloaded = MemoryLayout(shard=4, compute=2, reduce=4, optimizer=8, offload=True)
    found = moments("zero3", 2, offloaded)
    assert {name: (one.gathered, one.gradients, one.communication) for name, one in found.items()} == SUMMED
    assert {(one.parameters, one.optimizer) for one in found.values()} == {(512 + 512 + 7, 0)}


def test_a_whole_model_holds_buckets_and_sums_beside_them() -> None:
    whole = MemoryLayout(shard=1, compute=None, reduce=4, optimizer=8)
    for accumulation, copies in ((1, 1), (2, 2), (9, 2)):
        for one in moments("ddp", accumulation, whole).values():
            assert (one.parameters, one.gradients) == (4 * 1536 + 7, copies * 4 * 1536)
            assert (one.optimizer, one.gathered, one.communication) == (8 * 1536 + 2 * 512, 0, 0)
            assert (one.activations, one.logits) == ACTIVATIONS[one.moment]


def test_a_newer_torch_frees_the_gathers_output_and_all_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_bytes, "frees_all_gradients_before_reducing", lambda: True)
    monkeypatch.setattr(replayed, "frees_gather_before_copying", lambda: True)
    found = moments("zero3", 1)
    assert found["gather of block"].communication == 2048
    assert (found["reduction of block"].gradients, found["reduction of root"].gradients) == (2048, 1024 + 1024)


def test_the_largest_kind_of_a_moment() -> None:
    memory = Memory("a", parameters=3, gradients=5, logits=4)
    assert memory.largest == ("gradients", 5)
    assert memory.total == 12
