"""Bugs that other tools had with mixtures of experts, by number: what ours does is what a plain loop does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.moe import by_batched_mm, mixture, plain_step
from support.moe_steps import Case, sharded_step, windows_of
from support.ranks import meet, run_on_ranks

COEF, MAX_NORM = 0.3, 0.05
RUNS: dict[str, tuple[Case, float, float | None, int]] = {
    "plain": (("mixtral", "zero3", 1, False, "by_micro_batch"), COEF, None, 1),
    "accumulated": (("qwen3_moe", "zero2", 3, False, "by_micro_batch"), COEF, None, 1),
    "clipped": (("gpt_oss", "zero3", 1, False, "by_micro_batch"), COEF, MAX_NORM, 1),
    "without balance": (("mixtral", "zero3", 1, False, "by_micro_batch"), 0.0, None, 1),
    "checkpointed": (("mixtral", "zero3", 1, True, "by_micro_batch"), COEF, None, 1),
    "spread": (("olmoe", "zero3", 1, False, "by_micro_batch"), COEF, None, 2),
    "spread and clipped": (("mixtral", "zero3", 1, False, "by_micro_batch"), COEF, MAX_NORM, 2),
}
"""Case, coefficient of the balance loss, limit of the norm, ranks that spread their experts."""


def unchanged(model: Any) -> Any:
    return model


def steps() -> dict[str, Any]:
    found = {}
    for name, (case, coef, max_norm, spread) in RUNS.items():
        meet()
        change = by_batched_mm if name == "spread" else unchanged
        found[name] = sharded_step(case, coef, 0.0, max_norm, spread, change)
    return found


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    found: dict[str, Any] = run_on_ranks(steps, 2)[0]
    return found


def plain(name: str) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients of a plain loop, and their norm."""
    (kind, _, accumulation, _, _), coef, _, _ = RUNS[name]
    gradients = plain_step(mixture(kind), windows_of(2, accumulation), coef, 0.0, whole=False).gradients
    return gradients, float(torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt())


def same(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], names: list[str], factor: float = 1.0
) -> None:
    assert names
    for name in names:
        allowed = 1e-6 * max(1.0, float(wanted[name].abs().max()))
        torch.testing.assert_close(found[name], factor * wanted[name], rtol=0, atol=allowed, msg=name)


def experts(gradients: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, gradient in gradients.items() if gradient.ndim == 3]


def test_deepspeed_8475_the_norm_counts_every_expert_once(ours: dict[str, Any]) -> None:
    assert ours["plain"]["norm"] == pytest.approx(plain("plain")[1], rel=1e-6)


def test_deepspeed_8469_experts_are_averaged_over_the_tokens_of_all_ranks(ours: dict[str, Any]) -> None:
    for name in ("plain", "accumulated"):
        gradients, _ = plain(name)
        same(ours[name]["gradients"], gradients, experts(gradients))


def test_automodel_3816_one_factor_clips_experts_and_the_rest(ours: dict[str, Any]) -> None:
    gradients, norm = plain("clipped")
    assert norm > 10 * MAX_NORM
    same(ours["clipped"]["gradients"], gradients, list(gradients), factor=MAX_NORM / (norm + 1e-6))


def test_trl_5713_what_the_optimizer_sees_is_clipped(ours: dict[str, Any]) -> None:
    seen = torch.stack([gradient.square().sum() for gradient in ours["clipped"]["gradients"].values()]).sum().sqrt()
    assert float(seen) == pytest.approx(MAX_NORM, rel=1e-4)
    assert ours["clipped"]["norm"] == pytest.approx(plain("clipped")[1], rel=1e-6)  # told as it was


def test_automodel_1408_the_balance_loss_reaches_the_router(ours: dict[str, Any]) -> None:
    wanted, without = plain("plain")[0], plain("without balance")[0]
    routers = [name for name in wanted if name.endswith("mlp.gate.weight")]
    for name in routers:
        share = ours["plain"]["gradients"][name] - ours["without balance"]["gradients"][name]
        torch.testing.assert_close(share, wanted[name] - without[name], rtol=0, atol=2e-6)
        assert float(share.abs().max()) > 1e-3


def test_torchtitan_4772_the_balance_loss_goes_with_checkpointing(ours: dict[str, Any]) -> None:
    gradients, norm = plain("checkpointed")
    same(ours["checkpointed"]["gradients"], gradients, list(gradients))
    assert ours["checkpointed"]["norm"] == pytest.approx(norm, rel=1e-6)
    assert ours["checkpointed"]["experts"] == ours["plain"]["experts"]  # nothing is counted twice


def test_pytorch_160285_gradients_are_not_doubled_where_experts_are_on_two_ranks(ours: dict[str, Any]) -> None:
    gradients, _ = plain("spread")
    same(ours["spread"]["gradients"], gradients, experts(gradients))


def test_megatron_5916_the_norm_counts_all_spread_experts(ours: dict[str, Any]) -> None:
    gradients, norm = plain("spread and clipped")
    assert ours["spread and clipped"]["norm"] == pytest.approx(norm, rel=1e-6)
    clipped = ours["spread and clipped"]["gradients"]
    same(clipped, gradients, list(gradients), factor=MAX_NORM / (norm + 1e-6))


def test_transformers_45473_each_score_weights_its_own_expert_on_every_rank(ours: dict[str, Any]) -> None:
    (kind, *_), coef, _, _ = RUNS["spread"]
    wanted = plain_step(mixture(kind), windows_of(2, 1), coef, 0.0, whole=False)
    assert ours["spread"]["loss"] == pytest.approx(wanted.loss, rel=1e-6)


def test_transformers_48687_routers_of_batched_mm_get_the_plain_gradient(ours: dict[str, Any]) -> None:
    gradients, _ = plain("spread")
    same(ours["spread"]["gradients"], gradients, [name for name in gradients if name.endswith("mlp.gate.weight")])
