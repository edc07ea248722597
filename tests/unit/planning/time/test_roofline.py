"""Work: operators' FLOPs and bytes against counts by hand, real and fake alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.fake_llama import SHAPES, Recorder, segments
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.planning.time.hardware import hardware_of
from toolkit.planning.time.roofline import Work

B, H, T, D = 2, 4, 16, 8
ATTENTION = 2 * B * H * T * T * D  # one product over all scores


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


def operators(run: Callable[[], Any]) -> list[Any]:
    with Recorder() as recorder:
        run()
    return recorder.operators


def fake_and_real(run: Callable[[], Any]) -> list[Any]:
    real = operators(run)
    with FakeTensorMode():
        assert operators(run) == real
    return real


def attention(causal: bool, backward: bool) -> None:
    q, k, v = leaf(B, H, T, D), leaf(B, H, T, D), leaf(B, H, T, D)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    if backward:
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_two_products_and_backward_five(causal: bool) -> None:
    share = 2 if causal else 1
    forward = [op for op in fake_and_real(lambda: attention(causal, False)) if op[0] == "attention"]
    both = [op for op in fake_and_real(lambda: attention(causal, True)) if op[0] == "attention"]
    assert [flops for _, flops, _ in forward] == [2 * ATTENTION // share]
    assert [flops for _, flops, _ in both] == [2 * ATTENTION // share, 5 * ATTENTION // share]
    # Q, K, V and the output in float32, and a number for each row of scores.
    assert forward[0][2] == 4 * 4 * B * H * T * D + 4 * B * H * T


def test_products_and_their_backward() -> None:
    def run() -> None:
        x, weight = leaf(6, 8), leaf(10, 8)
        F.linear(x, weight).backward(torch.ones(6, 10))

    products = [op for op in fake_and_real(run) if op[0] == "matmul"]
    assert [flops for _, flops, _ in products] == [2 * 6 * 8 * 10] * 3
    assert {size for _, _, size in products} == {4 * (6 * 8 + 8 * 10 + 6 * 10)}


def test_views_and_empty_tensors_are_no_work() -> None:
    def run() -> None:
        x = torch.empty(4, 6)
        x.detach().view(6, 4).t()[1:].unsqueeze(0).expand(2, 3, 6).chunk(3)
        torch.empty_like(x)

    assert fake_and_real(run) == []


@pytest.mark.parametrize(
    ("run", "size"),
    [
        (lambda: torch.empty(8) + torch.empty(8), 4 * 3 * 8),
        (lambda: torch.empty(8).add_(torch.empty(8)), 4 * 3 * 8),
        (lambda: torch.empty(8).copy_(torch.empty(8, dtype=torch.bfloat16)), 4 * 8 + 2 * 8),
        (lambda: torch.empty(8).zero_(), 4 * 8),
        (lambda: torch.empty(2, 8).expand(2, 8) * torch.empty(8).expand(2, 8), 4 * (16 + 8 + 16)),
        (lambda: torch.empty(8).bfloat16(), 4 * 8 + 2 * 8),
    ],
)
def test_memory_traffic_is_what_is_read_and_written(run: Callable[[], Any], size: int) -> None:
    assert fake_and_real(run) == [("memory", 0, size)]


def test_embeddings_read_the_rows_that_are_asked_for() -> None:
    def run() -> None:
        table = leaf(1000, 8)
        F.embedding(torch.zeros(5, dtype=torch.long), table).backward(torch.ones(5, 8))

    rows, indices = 4 * 5 * 8, 8 * 5
    sizes = [size for _, _, size in fake_and_real(run)]
    assert indices + 2 * rows in sizes
    assert max(sizes) < 2 * 4 * 1000 * 8  # the table is made, but never read as a whole
    assert sizes[-1] == 4 * 1000 * 8 + 3 * rows + indices  # the whole gradient is written, then rows are added to


def test_experts_meet_each_token_once() -> None:
    def run() -> None:
        tokens = torch.empty(24, 16, dtype=torch.bfloat16, requires_grad=True)
        experts = torch.empty(3, 16, 32, dtype=torch.bfloat16, requires_grad=True)
        ends = torch.full((3,), 8, dtype=torch.int32)
        out = torch._grouped_mm(tokens, experts, offs=ends)
        torch.autograd.grad(out, (tokens, experts), torch.empty_like(out))

    with FakeTensorMode():
        products = [op for op in operators(run) if op[0] == "matmul"]
    assert [flops for _, flops, _ in products] == [2 * 24 * 16 * 32] * 3


def test_a_model_has_six_flops_per_parameter_and_token() -> None:
    """And for causal attention 2 + 4 products of half the scores; backward forms the scores again."""
    shape, tokens = SHAPES["small"], 2 * 256
    embeddings, block, head = segments("small", 2, 256, False)
    norms = 2 * shape.width
    scores = 2 * tokens * 256 * shape.width // 2
    assert block.forward.flops == 2 * tokens * (shape.block - norms) + 2 * scores
    assert block.backward.flops == 4 * tokens * (shape.block - norms) + 5 * scores
    assert head.forward.flops + head.backward.flops == 6 * tokens * shape.vocabulary * shape.width
    assert embeddings.forward.flops == 0


def test_work_adds_up() -> None:
    product, copy = ("matmul", 100, 10), ("memory", 0, 50)
    work = Work({product: 1, copy: 2})
    assert work.operators == {product: 1, copy: 2}
    assert (work.flops, work.bytes) == (100, 110)
    assert (work + work) == Work({product: 2, copy: 4})


def test_seconds_are_the_larger_of_arithmetic_memory_and_launch() -> None:
    hardware = dataclasses.replace(
        hardware_of("h100_sxm"),
        peak_flops={"float32": 1e9, "bfloat16": 2e9, "float16": 2e9},
        memory_bandwidth=1e6,
        matmul_efficiency=(0.25, 0.5, 1.0),
        memory_efficiency=(0.25, 0.5, 1.0),
        kernel_seconds=1e-3,
    )
    for operator, seconds in {
        ("matmul", 10**9, 0): 1.0,
        ("attention", 10**9, 0): 1.0 / 0.75,
        ("memory", 0, 10**6): 2.0,
        ("matmul", 10**9, 10**6): 2.0,
        ("memory", 0, 1): 1e-3,
    }.items():
        work = Work({operator: 1})
        assert work.seconds(hardware, "bfloat16") == pytest.approx(seconds)
        assert Work({operator: 4}).seconds(hardware, "bfloat16") == pytest.approx(4 * seconds)
    work = Work({("matmul", 10**9, 0): 1})
    assert [work.seconds(hardware, "float32", q) for q in ("low", "mid", "high")] == pytest.approx([1.0, 2.0, 4.0])
