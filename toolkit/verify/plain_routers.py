"""Computes the router losses of a mixture of experts as plain terms of the loss, and leaves the rest to autograd.

The formulas, and the tokens over which they are taken, are those of docs/experts.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.data.samples.samples import Batch
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.recipe.recipe import Recipe

BIAS = "e_score_correction_bias"


@dataclass
class Seen:
    """The router outputs of a forward.

    Attributes:
        logits: the logits of each layer, (tokens, experts).
        chosen: the expert indices of each layer, (tokens, k).
    """

    logits: list[torch.Tensor]
    chosen: list[torch.Tensor]

    def choices(self, real: torch.Tensor) -> list[torch.Tensor]:
        """Counts for each layer how many of the real tokens chose each expert, (experts,).

        Args:
            real: whether a token is not padding, (tokens,).
        """
        pairs = zip(self.logits, self.chosen, strict=True)
        return [F.one_hot(chosen[real], logits.shape[-1]).sum(dim=(0, 1)).double() for logits, chosen in pairs]


class PlainRouters:
    """Adds the losses of a model's routers to those of a step, and records their loads.

    Args:
        model: the plain model.
        recipe: sets the coefficients.
        groups: the number of micro-batches that the ranks run at the same time.

    Attributes:
        loads: for each step and layer, the share of choices of each expert.
        balance: for each step, the balance loss without its coefficient.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, groups: int) -> None:
        self._base: Any = base_of(model)
        own = getattr(self._base.config.get_text_config(), "router_aux_loss_coef", None)
        section = recipe.objective
        self._coefficient = (own if section.router_aux_coef is None else section.router_aux_coef) or 0.0
        self._sigmoid = own is None and any(name.endswith(BIAS) for name, _ in self._base.named_buffers())
        self._groups = groups
        self._whole_step = recipe.sharding.accumulate == "by_block"
        self.loads: list[list[list[float]]] = []
        self.balance: list[float] = []

    @contextmanager
    def watching(self) -> Iterator[Seen]:
        """Records the router outputs of the forward inside the `with` block."""
        seen = Seen([], [])

        def ask(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, "output_router_logits": True}

        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            seen.logits += [one.flatten(0, -2) for one in output.router_logits or ()]

        def look(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            # The indices of the experts that are really computed.
            tensors = (one for one in (*args, *kwargs.values()) if torch.is_tensor(one))
            seen.chosen.append(next(one for one in tensors if one.dtype == torch.long).flatten(0, -2))

        inner = self._base.base_model
        hooks = [inner.register_forward_pre_hook(ask, with_kwargs=True), inner.register_forward_hook(note)]
        for path, module in self._base.named_modules():
            if path.rpartition(".")[2] == "experts":
                hooks.append(module.register_forward_pre_hook(look, with_kwargs=True))
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def begin(self, window: list[Batch], forward: Callable[[Batch], torch.Tensor]) -> None:
        """Runs the forwards of all micro-batches of a step, because the experts' shares are known only afterwards.

        Args:
            window: the micro-batches of the step.
            forward: runs the model on a micro-batch. Its output, of any shape, is not used.

        Raises:
            BadInputError: if the model does not show which experts it computes.
        """
        self._tokens = max(1, sum(int(_is_real(batch).sum()) for batch in window))
        self._choices, self._sums = [], []  # by micro-batch and layer
        for batch in window:
            with self.watching() as seen:
                forward(batch)
            if len(seen.logits) != len(seen.chosen):
                raise BadInputError(
                    f"model: {type(self._base).__name__} does not show the plain loop which experts it computes, so it "
                    "cannot be verified"
                )
            self._experts_of_a_token = [one.shape[-1] for one in seen.chosen]
            real = _is_real(batch).to(seen.logits[0].device)
            self._choices.append(seen.choices(real))
            self._sums.append([self._router_scores(one)[real].double().sum(dim=0) for one in seen.logits])
        totals = [torch.stack(layer).sum(dim=0) for layer in zip(*self._choices, strict=True)]
        self.loads.append([(total / total.sum().clamp_min(1)).tolist() for total in totals])
        terms = [
            len(sums) * (self._load_share(number, layer) @ sums)
            for number, layers in enumerate(self._sums)
            for layer, sums in enumerate(layers)
        ]
        self.balance.append(float(torch.stack(terms).sum()) / self._tokens / len(totals))

    def loss(self, number: int, batch: Batch, seen: Seen) -> torch.Tensor:
        """Returns the router losses of a micro-batch, a scalar: its part of the step's mean over layers and tokens.

        Args:
            number: the index of the micro-batch in its step.
            batch: the micro-batch.
            seen: the router outputs of its forward.
        """
        real = _is_real(batch).to(seen.logits[0].device)
        total = torch.zeros((), device=real.device)
        for layer, logits in enumerate(seen.logits):
            share = self._load_share(number, layer).float()
            balance = len(share) * (self._router_scores(logits) * share).sum(dim=-1)
            total = total + self._coefficient * balance[real].sum()
        return total / (self._tokens * len(seen.logits))

    def _load_share(self, number: int, layer: int) -> torch.Tensor:
        """Returns f_e, (experts,): the choices of each expert per token, as far as this micro-batch knows them."""
        # Without a coefficient nothing is minimised, and the figure of the step is reported. Otherwise
        # micro-batches that run at the same time know only themselves and earlier ones, unless they run by block.
        whole = self._whole_step or not self._coefficient
        last = len(self._choices) if whole else (number // self._groups + 1) * self._groups
        counted = torch.stack([choices[layer] for choices in self._choices[:last]]).sum(dim=0)
        return self._experts_of_a_token[layer] * counted / counted.sum().clamp_min(1)

    def _router_scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns scores (tokens, experts): softmax, or normalised sigmoids as in DeepSeek V3 and similar models."""
        if not self._sigmoid:
            return logits.float().softmax(dim=-1)
        scores = logits.float().sigmoid()
        return scores / scores.sum(dim=-1, keepdim=True)


def _is_real(batch: Batch) -> torch.Tensor:
    """Returns whether each token is not padding, (tokens,)."""
    ids = batch["input_ids"]
    lengths = batch.get("lengths", torch.full(ids.shape[:1], ids.shape[-1]))
    return (torch.arange(ids.shape[-1]) < lengths[:, None]).flatten()
