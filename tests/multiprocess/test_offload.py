"""Offloaded optimizer state is ordinary FSDP2 mixed precision, bit for bit.

The ordinary run is written out in offload_loops.py with torch alone. Steps on the host are slowed down
where a forward that does not wait for them would otherwise go unseen.
"""

from __future__ import annotations

import pytest
from support.offload_loops import Case, bf16_ulps, differences, offloaded, ordinary
from support.ranks import run_on_ranks

CASES = [
    Case(),
    Case(tied=False),
    Case(max_norm=None),
    Case(accumulation=3),
    Case(tied=False, max_norm=None, accumulation=3),
    Case(checkpointing=True, tied=False),
    Case(prefetch=True),
    Case(prefetch=True, tied=False, accumulation=3, checkpointing=True, max_norm=None),
    Case(precision="no", tied=False),
    Case(optimizer="adam"),
    Case(optimizer="sgd", accumulation=3),
    Case(optimizer="sgd", max_norm=None),
    Case(strategy="zero1", accumulation=3),
    Case(strategy="zero2", accumulation=3),
    Case(freeze="mlp"),
    Case(forwards=2),
    Case(forwards=2, accumulation=3, tied=False),
    Case(poison=2),
    Case(unused=True, tied=False),
    Case(unused=True, accumulation=3),
    Case(partly=True, accumulation=3, tied=False),
    Case(lora=True),
    Case(evaluate=True, tied=False),
]


STREAMED = [Case(), Case(tied=False), Case(accumulation=3), Case(optimizer="sgd", max_norm=None), Case(lora=True)]
FUSED = [
    *(case for case in STREAMED if case.optimizer == "adamw"),  # the kernel knows no other
    Case(tied=False, max_norm=None, accumulation=3),
    Case(precision="no", tied=False),
    Case(strategy="zero1", accumulation=3),
    Case(freeze="mlp"),
    Case(poison=2),
    Case(partly=True, accumulation=3, tied=False),
]
"""What the other executors are tried with: they get flat tensors, whatever the model and the schedule."""

ON_ONE_RANK = [
    Case(),
    Case(tied=False, max_norm=None, accumulation=3),
    Case(accumulation=3),
    Case(checkpointing=True, tied=False),
    Case(precision="no", tied=False),
    Case(freeze="mlp"),
    Case(poison=2),
    Case(unused=True, accumulation=3),
    Case(partly=True, accumulation=3, tied=False),
    Case(lora=True),
]
"""There nothing is gathered, and the gradients of several micro-batches are summed where they are."""

PLAIN = [Case(), Case(tied=False, max_norm=None, accumulation=3)]
"""What is tried on two ranks by default: clipped in one step, and unclipped over three micro-batches."""

assert set(STREAMED + FUSED + ON_ONE_RANK + PLAIN) <= set(CASES)


def compare(cases: list[Case]) -> list[tuple[list[str], int, int]]:
    """For each case: what differs with cpu_torch, and how far off the other executors are."""
    found = []
    for case in cases:
        expected = ordinary(case)
        exact = offloaded(case, "cpu_torch", delay=0.005)
        fused = offloaded(case, "cpu_fused") if case in FUSED else exact
        streamed = offloaded(case, "device_stream") if case in STREAMED else exact
        found.append((differences(exact, expected), bf16_ulps(fused, expected), bf16_ulps(streamed, expected)))
    return found


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        pytest.param(2, PLAIN, marks=pytest.mark.first, id="2 ranks, plain"),
        pytest.param(2, [case for case in CASES if case not in PLAIN], id="2 ranks"),
        pytest.param(1, ON_ONE_RANK, id="1 rank"),
    ],
)
def test_offload_is_the_ordinary_run(num_ranks: int, cases: list[Case]) -> None:
    """Losses, norms and weights, each equal bit for bit; the other executors within one bf16 number."""
    ranks = run_on_ranks(compare, num_ranks, cases)
    assert len(ranks) == num_ranks
    found = {case: [rank[number] for rank in ranks] for number, case in enumerate(cases)}
    right = {case: all(not different and max(others) <= 1 for different, *others in found[case]) for case in cases}
    assert {case: found[case] for case in cases if not right[case]} == {}


def compare_ways() -> dict[str, list[str]]:
    case = Case(tied=False)
    unclipped = Case(max_norm=None)
    prefetched = Case(prefetch=True)
    expected = ordinary(case)
    found = {
        "some on the device": differences(offloaded(case, device_state_gib=0.0005, delay=0.005), expected),
        "all on the device": differences(offloaded(case, device_state_gib=1.0), expected),
        "three threads": differences(offloaded(case, threads=3), expected),
        "during backward": differences(offloaded(unclipped, during_backward=True, delay=0.005), ordinary(unclipped)),
    }
    compiled = Case(compiled=True)
    found["compiled"] = differences(offloaded(compiled, delay=0.005), ordinary(compiled))
    expected = ordinary(prefetched)
    found["gated"] = differences(offloaded(prefetched, delay=0.02), expected)
    return found


def test_every_setting_is_the_ordinary_run() -> None:
    assert [{way: found for way, found in rank.items() if found} for rank in run_on_ranks(compare_ways, 2)] == [{}, {}]
