"""Loads of a mixture's experts: figures in each train record, and a warning if a router collapses."""

from __future__ import annotations

import math
from typing import Any

from toolkit.objectives.losses.balance import Balance, experts_fact
from toolkit.run.stages.part import Loop, RunPart
from toolkit.run.stages.stages import PreparedRun
from toolkit.training.extension import Extension
from toolkit.training.metrics import Metrics

LOAD_EVERY = 10
"""Steps between two records with the load of every expert: 60 layers of 128 experts take 60 kB of JSON."""

COLLAPSED = 0.5
"""A router has collapsed if exp(entropy) of its loads is less than this share of its experts."""


class Experts(RunPart):
    def prepared(self, run: PreparedRun) -> None:
        if run.balance.routers:
            asked, by_block = self.recipe.objective.router_aux_coef, run.sharded.by_block is not None
            self.facts["experts"] = experts_fact(run.inner, run.balance, asked, by_block)

    def extension(self, loop: Loop) -> Extension | None:
        return ExpertLoads(loop.run.balance, loop.metrics) if loop.run.balance.routers else None


class ExpertLoads(Extension):
    """Records the loads that `balance` counts, and warns of routers that collapse."""

    def __init__(self, balance: Balance, metrics: Metrics) -> None:
        self.balance = balance
        self._metrics = metrics
        self._loads: list[list[float]] = []  # of the step under way: each layer's share of choices by expert
        self._loss = 0.0  # of the balance, without its coefficient
        self._told: set[int] = set()

    def before_update(self) -> None:
        self._loads, self._loss = self.balance.loads()

    def after_update(self, step: int, skipped: bool) -> dict[str, Any]:
        loads = self._loads
        if not loads:
            return {}
        figures: dict[str, Any] = {
            "balance_loss": self._loss,
            "expert_entropy": sum(map(entropy, loads)) / len(loads),
            "dead_experts": sum(share == 0 for layer in loads for share in layer),
            "max_expert_load": max(max(layer) * len(layer) for layer in loads),
        }
        if step == 1 or step % LOAD_EVERY == 0:
            for number, layer in enumerate(loads):
                self._warn_of_collapse(step, number, layer)
            figures["expert_load"] = [[round(share, 4) for share in layer] for layer in loads]
        return figures

    def _warn_of_collapse(self, step: int, number: int, layer: list[float]) -> None:
        """Warns, once for each router, if its loads have collapsed."""
        top_k = self.balance.experts_of_a_token(number)
        spread = math.exp(entropy(layer) * math.log(len(layer)))
        # A router that sends all to the same k experts spreads over k; where k is more than half, that is not a sign.
        if number in self._told or spread >= COLLAPSED * len(layer) or top_k >= COLLAPSED * len(layer):
            return
        self._told.add(number)
        path = self.balance.routers[number].path
        self._metrics.warn(
            f"step {step}: the router {path} has collapsed: its tokens go to {spread:.1f} of {len(layer)} experts, "
            f"{max(layer):.0%} of the choices to one; raise objective.router_aux_coef or lower the learning rate"
        )


def entropy(shares: list[float]) -> float:
    """Returns the entropy of a layer's loads, divided by that of even loads: 1 is even, 0 is one expert only.

    Args:
        shares: the load of each expert, with the sum 1.
    """
    if len(shares) < 2:
        return 1.0
    return -sum(share * math.log(share) for share in shares if share > 0) / math.log(len(shares))
