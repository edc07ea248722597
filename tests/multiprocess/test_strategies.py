"""What each strategy holds and sends, against the formulas; and that all of them are one run in bf16.

P parameters, W ranks, F = shard group, k micro-batches. ZeRO: arXiv 1910.02054, section 7 for the traffic.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.plain_loop import plain_loop
from support.ranks import meet, run_on_ranks
from support.tiny import llama
from support.traffic import Traffic
from torch import nn

K, STEPS = 3, 4
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hybrid")
# DDP in bf16 is autocast: it holds and sends what it does in float32.
MEASURED = [pair for pair in itertools.product(STRATEGIES, ("no", "bf16")) if pair != ("ddp", "bf16")]


make_model = functools.partial(
    llama, vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, tie_word_embeddings=False
)


def tokens(step: int, micro: int, rank: int, rows: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, 512, (rows, 16), generator=generator)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def prepared(
    strategy: str, precision: str, accumulation: int, tied: bool = False, **kwargs: Any
) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator

    from toolkit import sharding_kwargs
    from toolkit.sharding.launched import accumulation_plugin
    from toolkit.sharding.plugin import reset_accelerate

    meet()
    reset_accelerate()
    sizes = {"shard_size": 2} if strategy == "hybrid" else {}
    accelerator = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_plugin=accumulation_plugin(accumulation),
        **sharding_kwargs(strategy, **sizes, **kwargs),
    )
    model = make_model(tie_word_embeddings=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return accelerator, *accelerator.prepare(model, optimizer)


def measure(strategy: str, precision: str) -> dict[str, Any]:
    """Bytes inside and outside the accumulation window of the second step, and its traffic."""
    from support.memory import memory_report

    accelerator, model, optimizer = prepared(strategy, precision, K)
    rank = accelerator.process_index
    found: dict[str, Any] = {}
    for step in range(2):
        with Traffic() as traffic:
            for micro in range(K):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, tokens(step, micro, rank)))
                    if micro == 1:
                        found["window"] = memory_report(model, optimizer)
                    optimizer.step()
                    optimizer.zero_grad()
        found["traffic"] = dict(traffic.bytes)
        found["between"] = memory_report(model, optimizer)
    return found


def on_four_ranks() -> tuple[dict[tuple[str, str], dict[str, Any]], dict[tuple[str, str, int], list[float]]]:
    return {pair: measure(*pair) for pair in MEASURED}, all_losses()


P = sum(p.numel() for p in make_model().parameters())


@pytest.fixture(scope="module")
def of_ranks() -> list[Any]:
    return run_on_ranks(on_four_ranks, 4)


@pytest.fixture(scope="module")
def measured(of_ranks: list[Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Of each rank, strategy and precision."""
    return [(*pair, found) for measured, _ in of_ranks for pair, found in measured.items()]


def group_size(strategy: str) -> int:
    return {"ddp": 1, "hybrid": 2}.get(strategy, 4)


def test_bytes_between_steps_are_16_p_over_f(measured: list[tuple[str, str, dict[str, Any]]]) -> None:
    """4 P / F of parameters and 8 P / F of moments, and 4 P / F of gradients until they are freed."""
    for strategy, precision, found in measured:
        report, per_rank, where = found["between"], P / group_size(strategy), (strategy, precision)
        assert report.sharded_parameters == pytest.approx(4 * per_rank, rel=0.02), where
        assert report.optimizer_state == pytest.approx(8 * per_rank, rel=0.02), where
        assert report.gathered_parameters == 0, where
        assert report.gradients == 0 or strategy == "ddp", where  # DDP's buckets hold the gradients


def test_bytes_inside_the_accumulation_window(measured: list[tuple[str, str, dict[str, Any]]]) -> None:
    for strategy, precision, found in measured:
        compute, where = {"no": 4, "bf16": 2}[precision], (strategy, precision)
        gathered = compute * P if strategy in ("zero1", "zero2") else 0
        gradients = 4 * P if strategy in ("ddp", "zero1") else 4 * P / group_size(strategy)
        assert found["window"].gathered_parameters == pytest.approx(gathered, rel=0.02), where
        assert found["window"].gradients == pytest.approx(gradients, rel=0.02), where


def test_traffic_per_optimizer_step(measured: list[tuple[str, str, dict[str, Any]]]) -> None:
    """Whole-tensor bytes of each collective; a ring sends (F - 1) / F of them.

    c: bytes of the compute type. zero3 gathers in forward and in backward, but the tail and the root,
    kept in between, once: 2 k c P - k c P_tail. The reduction is in float32.
    """
    tail = 512 * 128 + 128
    for strategy, precision, found in measured:
        c, ranks = {"no": 4, "bf16": 2}[precision], group_size(strategy)
        gathers = K * (2 * c * P - c * tail)
        expected = {
            "ddp": {"all_reduce": 4 * P},
            "zero1": {"all_gather": c * P, "reduce_scatter": 4 * P},
            "zero2": {"all_gather": c * P, "reduce_scatter": K * 4 * P},
            "zero3": {"all_gather": gathers, "reduce_scatter": K * 4 * P},
            "hybrid": {"all_gather": gathers, "reduce_scatter": K * 4 * P, "all_reduce": 4 * P / 2},
        }[strategy]
        sent = {kind: size for kind, size in found["traffic"].items() if size > 1000}
        exchanged = sent.get("all_gather", 0) + sent.get("reduce_scatter", 0)
        assert sent.pop("send", 0) == exchanged * (ranks - 1) // ranks, (strategy, precision)
        sent.pop("recv_", 0)
        assert sent == pytest.approx(expected, rel=0.02), (strategy, precision)


def losses(strategy: str, precision: str, accumulation: int, **kwargs: Any) -> list[float]:
    """Mean losses of 12 rows a step, whatever the ranks."""
    accelerator, model, optimizer = prepared(strategy, precision, accumulation, **kwargs)
    world_size, rank = accelerator.num_processes, accelerator.process_index
    rows = 12 // world_size // accumulation
    found = []
    for step in range(STEPS):
        batch = tokens(step, 0, 0, rows=12)
        total = torch.zeros(())
        for micro in range(accumulation):
            start = (micro * world_size + rank) * rows
            with accelerator.accumulate(model):
                loss = loss_of(model, batch[start : start + rows])
                accelerator.backward(loss)
                total += loss.detach() / accumulation
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        found.append(accelerator.reduce(total, "mean").item())
    return found


RUNS = [("hybrid", "no", 3), *((strategy, "bf16", 3) for strategy in STRATEGIES)]
"""Strategy, precision, accumulation. On 2 ranks in float32: test_all_pairs.py."""


def all_losses() -> dict[tuple[str, str, int], list[float]]:
    return {run: losses(*run) for run in RUNS}


def test_a_hand_written_loop_is_the_same_under_every_strategy(of_ranks: list[Any]) -> None:
    model = make_model()
    batches = [tokens(step, 0, 0, rows=12) for step in range(STEPS)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    plain = plain_loop(model, batches, lambda ids: loss_of(model, ids), max_norm=1.0, optimizer=optimizer).losses
    found = of_ranks[0][1]
    assert list(found) == RUNS
    for (strategy, precision, _), series in found.items():
        if precision == "no":
            assert series == pytest.approx(plain, rel=1e-6), strategy
        else:
            assert series == pytest.approx(found["ddp", "bf16", 3], rel=1e-3), strategy
            assert series == pytest.approx(plain, rel=1e-2), strategy
