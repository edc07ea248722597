"""The balance loss of routers, over more tokens than one micro-batch of one rank.

The balance loss of a layer is E x sum_e f_e P_e (Switch Transformer, arXiv 2101.03961), as transformers computes it.
E is the number of experts, f_e counts how often expert e is chosen per token, and P_e is the mean of its probability;
the loss is the mean over layers. f has no gradient, but it is known only after the forward. So the loss is not a term
of the objective's sum: backward adds its gradient to that of the router's logits, with an f over all ranks
(global-batch balance, arXiv 2501.11873). f covers the whole step if micro-batches run by block, and otherwise the
step's micro-batches so far.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit import ranks
from toolkit.data.samples.samples import Batch
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.model.routers import Router, find_routers, has_experts, own_coefficient
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.sharding.parallel.expert_parallel import expert_placement


class _MicroBatch:
    """One forward of this rank.

    Attributes:
        real: 1 for tokens, 0 for padding, (tokens,).
        loads: each router's choices per token, over everything counted, (experts,); known in backward.
    """

    def __init__(self, real: torch.Tensor) -> None:
        self.real = real
        self.loads: dict[int, torch.Tensor] = {}


class _ThreadState(threading.local):
    micro_batch: _MicroBatch | None = None


_thread_state = _ThreadState()  # micro-batches that run by block are in threads of their own


class Balance:
    """Counts the choices of a model's routers, and adds the gradients of the balance loss.

    Args:
        routers: the model's routers; if there are none, nothing happens.
        coefficient: of the balance loss.
        has_own: whether the model has a balance loss of its own, which always uses softmax probabilities.
    """

    def __init__(self, routers: list[Router], coefficient: float = 0.0, has_own: bool = True) -> None:
        self.routers = routers
        self.coefficient = coefficient
        self._has_own = has_own
        self._num_tokens, self._scale = 1, 1.0
        self._waiting: list[_MicroBatch] = []  # forwards whose loads are not known
        self._mine: dict[int, torch.Tensor] = {}  # of each router, (2, experts): choices and sums of probabilities
        self._all: dict[int, torch.Tensor] = {}  # the same, over all ranks
        self._minimised: torch.Tensor | float = 0.0  # summed over tokens, layers and ranks
        self._chosen: dict[int, int] = {}  # experts of a token, by router
        for number, router in enumerate(routers):
            router.module.register_forward_hook(_Hook(self, number))

    def begin(self, num_tokens: int, scale: float) -> None:
        """Begins a step.

        Args:
            num_tokens: tokens of all its micro-batches on all ranks, without padding.
            scale: factor for the gradients of the loss, so that their mean over the ranks is the loss's gradient.
        """
        self._num_tokens, self._scale = max(1, num_tokens), scale
        self._mine, self._all = {}, {}
        self._minimised = 0.0

    @contextmanager
    def observing(self, batch: Batch) -> Iterator[None]:
        """Counts choices during the forward of this micro-batch, in this thread."""
        if not self.routers:
            yield
            return
        _thread_state.micro_batch = _MicroBatch(_real_tokens(batch))
        self._waiting.append(_thread_state.micro_batch)
        try:
            yield
        finally:
            _thread_state.micro_batch = None

    def exchange(self) -> None:
        """Sums the loads over all ranks between forward and backward, all layers in one exchange. Collective."""
        if self.coefficient:
            before = dict(self._all)
            self._exchange()
            loads = {number: self._load(number) for number in self._all}
            for number, load in loads.items():
                sums = (self._all[number] - before.get(number, 0))[1]  # of these micro-batches alone
                self._minimised = self._minimised + len(load) * (load.double() @ sums)
            for one in self._waiting:
                one.loads = loads
        self._waiting.clear()

    def _exchange(self) -> None:
        if not self._mine:
            return
        numbers = sorted(self._mine)
        flat = torch.cat([self._mine[number].flatten() for number in numbers])
        if ranks.world_size() > 1:
            dist.all_reduce(flat)
        sizes = [self._mine[number].numel() for number in numbers]
        for number, sums in zip(numbers, torch.split(flat, sizes), strict=True):
            self._all[number] = sums.view(2, -1) + self._all.get(number, 0)
        self._mine = {}

    def _load(self, number: int) -> torch.Tensor:
        """Returns how often each expert is chosen per token, (experts,); the sum is the experts per token."""
        choices = self._all[number][0]
        return (self._chosen[number] * choices / choices.sum().clamp_min(1)).float()

    def loads(self) -> tuple[list[list[float]], float]:
        """Returns the step's share of choices by layer and expert, and its balance loss. Collective.

        The host waits for the device. The loss is the one that is minimised, so it uses the same loads; without a
        coefficient it is the whole step's.
        """
        self._exchange()
        if not self._all:
            return [], 0.0
        sizes = [found.shape[1] for found in self._all.values()]
        minimised = torch.as_tensor(self._minimised, dtype=torch.float64, device=next(iter(self._all.values())).device)
        # One transfer, so that the host waits for the device once.
        rows = iter(torch.cat([*(found.flatten() for found in self._all.values()), minimised.view(1)]).tolist())
        sums = {
            number: [list(islice(rows, size)) for _ in range(2)] for number, size in zip(self._all, sizes, strict=True)
        }
        shares = {number: [x / max(1.0, sum(choices)) for x in choices] for number, (choices, _) in sums.items()}
        total = sum(
            len(shares[number]) * self._chosen[number] * sum(f * p for f, p in zip(shares[number], probs, strict=True))
            for number, (_, probs) in sums.items()
        )
        if self.coefficient:
            total = next(rows)
        return list(shares.values()), total / len(sums) / self._num_tokens

    def experts_of_a_token(self, number: int) -> int:
        """Returns how many experts a router chooses for each token."""
        return self._chosen[number]

    def count(self, number: int, output: Any, one: _MicroBatch) -> None:
        """Adds a router's choices and probabilities for a micro-batch.

        Raises:
            RuntimeError: if the router sees another number of tokens than the micro-batch has.
        """
        logits, chosen = self.routers[number].logits(output), self.routers[number].chosen(output)
        if len(one.real) != len(logits):
            raise RuntimeError(
                f"{self.routers[number].path} routes {len(logits)} tokens of a micro-batch of {len(one.real)}; set "
                "objective.router_aux_coef=0"
            )
        with torch.no_grad():
            weight = one.real.to(torch.float64)
            probabilities = self.probabilities(number, logits.detach().float())
            choices = weight.new_zeros(logits.shape[-1])
            choices.index_add_(0, chosen.flatten(), weight.repeat_interleave(chosen.shape[1]))
            sums = torch.stack([choices, (probabilities.double() * weight[:, None]).sum(dim=0)])
        self._chosen[number] = chosen.shape[1]
        self._mine[number] = sums + self._mine.get(number, 0)

    def probabilities(self, number: int, logits: torch.Tensor) -> torch.Tensor:
        """Returns probabilities (tokens, experts) of logits of the same shape.

        Models with a balance loss of their own use softmax; otherwise this is DeepSeek V3's normalised sigmoid.
        """
        if self._has_own or self.routers[number].bias is None:
            return logits.softmax(dim=-1)
        scores = logits.sigmoid()
        return scores / scores.sum(dim=-1, keepdim=True)

    def gradient(self, number: int, logits: torch.Tensor, one: _MicroBatch) -> torch.Tensor:
        """Returns the gradient of the loss with respect to a router's logits, both (tokens, experts)."""
        with torch.enable_grad():
            wanted, load = logits.detach().float().requires_grad_(), one.loads[number]
            each = self.coefficient * len(load) * (self.probabilities(number, wanted) @ load)
            total = (each * one.real).sum() * (self._scale / (self._num_tokens * len(self._chosen)))
            (found,) = torch.autograd.grad(total, wanted)
        return found.to(logits.dtype)


class _Hook:
    """Forward hook of a router: counts its choices, and adds the loss's gradient in backward."""

    def __init__(self, balance: Balance, number: int) -> None:
        self._balance = balance
        self._number = number

    # Not compiled: it changes what is counted, and blocks with experts leave their graph here anyway.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        one = _thread_state.micro_batch  # None if a checkpoint runs a block again, in backward
        if one is not None:
            self._balance.count(self._number, output, one)
        logits = self._balance.routers[self._number].logits(output)
        if not self._balance.coefficient or not logits.requires_grad:
            return None
        if torch.is_tensor(output):
            return _WithGradient.apply(output, logits, self, one)  # type: ignore[no-untyped-call]
        # In most models nothing uses the logits themselves, only what the router derives from them.
        carrier = next(
            i for i in _logits_last(output, self._balance.routers[self._number].index) if _has_graph(output[i])
        )
        carried = _WithGradient.apply(output[carrier], logits, self, one)  # type: ignore[no-untyped-call]
        return type(output)([*output[:carrier], carried, *output[carrier + 1 :]])

    def gradient(self, logits: torch.Tensor, one: _MicroBatch) -> torch.Tensor:
        return self._balance.gradient(self._number, logits, one)


def _logits_last(output: Any, last: int) -> list[int]:
    """Returns the positions in an output tuple, that of the logits last."""
    last %= len(output)
    return [i for i in range(len(output)) if i != last] + [last]


def _has_graph(value: Any) -> bool:
    return torch.is_tensor(value) and value.requires_grad


class _WithGradient(torch.autograd.Function):
    """Identity on a router's output; backward adds the gradient of the loss to its logits."""

    @staticmethod
    def forward(
        ctx: Any, carrier: torch.Tensor, logits: torch.Tensor, hook: _Hook, one: _MicroBatch | None
    ) -> torch.Tensor:
        ctx.save_for_backward(logits)
        ctx.hook, ctx.one = hook, one
        # A copy, as models change their routing weights in place, which a view made here forbids.
        return carrier.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        return upstream[0], None if ctx.one is None else ctx.hook.gradient(logits, ctx.one), None, None


def _real_tokens(batch: Batch) -> torch.Tensor:
    """Returns 1 for each token and 0 for padding, (tokens,), in the order of the batch."""
    ids = batch["input_ids"]
    if "lengths" not in batch:
        return torch.ones(ids.numel(), device=ids.device)
    return (torch.arange(ids.shape[-1], device=ids.device) < batch["lengths"].to(ids.device)[:, None]).flatten().float()


def build_balance(section: ObjectiveSection, model: nn.Module) -> Balance:
    """Returns the `Balance` that hooks into the model's routers.

    Raises:
        BadInputError: for a coefficient without effect: the model has no experts. For a mixture of experts whose
            routers are not found, if it has a balance loss of its own or is given one.
    """
    routers, own, asked = find_routers(model), own_coefficient(model), section.router_aux_coef
    coefficient = (own if asked is None else asked) or 0.0
    if not routers and coefficient and has_experts(model):
        given = (
            f"objective.router_aux_coef is {asked:g}"
            if asked
            else f"its configuration has a balance loss with coefficient {own:g}"
        )
        raise BadInputError(
            f"{type(base_of(model)).__name__}: its routers are not found, because transformers records no "
            f"router_logits of it, but {given}, which would be left out; set objective.router_aux_coef=0 to train "
            "without, or install a version of transformers that records them"
        )
    if not routers and asked:
        raise BadInputError(f"objective.router_aux_coef: {asked} has no effect: the model has no experts; remove it")
    return Balance(routers, coefficient, own is not None)


def experts_fact(model: nn.Module, balance: Balance, asked: float | None, by_block: bool) -> str:
    """Describes how a run's experts are computed and balanced, with the recipe's coefficient, if it has one."""
    kernel = getattr(getattr(base_of(model), "config", None), "_experts_implementation", None) or "the model's own"
    told = [f"{len(balance.routers)} routers, kernel {kernel}"]
    if placement := expert_placement(model):
        told.append(placement)
    if balance.coefficient:
        source = "the model's router_aux_loss_coef" if asked is None else "objective.router_aux_coef"
        over = "the whole step" if by_block else "the step's micro-batches so far"
        told.append(f"balance loss {balance.coefficient:g} ({source}), over all ranks and {over}")
    else:
        told.append("no balance loss" + (" (the model has none of its own)" if asked is None else ""))
    if any(router.bias is not None for router in balance.routers):
        told.append("biases stay as they are")
    return "; ".join(told)
