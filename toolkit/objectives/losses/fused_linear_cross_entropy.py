"""Next-token cross-entropy from the head's inputs, with the logits of a few tokens at a time.

Whole logits and what their cross-entropy keeps take 10 to 12 bytes per token and vocabulary entry: 5 to 6 GiB for
4096 tokens of a vocabulary of 128k. Here each chunk of tokens gets its logits, their losses and their gradient before
the next one (as in Liger, arXiv 2410.10989); what is kept grows with tokens and with the vocabulary, not with both.

While a loss is computed, the head's forward is replaced by one that returns losses instead of logits, and the model's
forward by one that returns these. Both modules are called as usual, so the hooks of FSDP2, DDP and autocast still run.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from toolkit.data.samples.samples import IGNORED
from toolkit.model.structure.fake_tensors import has_values
from toolkit.objectives.losses.chunks import each_alike
from toolkit.objectives.losses.replaced import own_forward, replaced
from toolkit.sharding.tensor.cut import ranks_of_head
from toolkit.sharding.tensor.moves import TensorRanks

CHUNK_ENTRIES = 2**27
"""Logits of a chunk, 512 MiB in float32: with less, a GPU spends its time on adding to the weight's gradient.

It is the same on all devices, because planning measures a GPU's memory on a CPU.
"""

MIN_CHUNK_TOKENS = 64

LOGITS_BIAS = "final_logits_bias"
"""Name of the buffer (1, V) that BART, Marian and their kin add to the head's outputs."""

BLOCK_ENTRIES = 2**24
"""Entries of the weight's gradient that exist in 16 bits at a time, before they are added in float32."""


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's part of a vocabulary that a tensor group has cut. The sums of a softmax are over all parts."""

    ranks: TensorRanks
    vocabulary: int

    @property
    def most(self) -> int:
        """Returns the tokens of the largest part, by which all ranks choose the same chunks."""
        return -(-self.vocabulary // self.ranks.size)

    @property
    def own_rows(self) -> slice:
        """Returns the tokens of this part."""
        return self.ranks.part(self.vocabulary)

    def largest(self, z: torch.Tensor) -> torch.Tensor:
        """Returns the largest logit of each token, (n, 1), of all parts. This one (n, v) may have none."""
        largest = z.amax(dim=1, keepdim=True) if z.shape[1] else z.new_full((len(z), 1), -torch.inf)
        if not self.ranks.is_planned:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.ranks.group)
        return largest

    def own(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns columns of targets (n,) in this part, both (n, 1): a column of it, and whether it is the target's."""
        part = self.own_rows
        is_here = (targets >= part.start) & (targets < part.stop)
        return (targets - part.start).clamp(0, part.stop - part.start - 1)[:, None], is_here[:, None]

    def summed(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the sums over all parts of tensors (n, 1)."""
        both = torch.cat(parts, dim=1)
        if not self.ranks.is_planned:
            dist.all_reduce(both, group=self.ranks.group)
        return torch.split(both, 1, dim=1)


@dataclass(frozen=True)
class AfterHead:
    """What a model does to its head's output z: scale * z, or cap * tanh(scale * z / cap).

    Attributes:
        part: the part of the vocabulary whose outputs this rank's head has, or None for all.
    """

    scale: float = 1.0
    cap: float | None = None
    part: VocabularyPart | None = None


@dataclass(frozen=True)
class _Chunk:
    """exp(logits - largest) (n, V), their sums (n, 1), and tanh's values (n, V) if there is a cap; float32."""

    exponentials: torch.Tensor
    totals: torch.Tensor
    bounded: torch.Tensor | None


@dataclass(frozen=True)
class Head:
    """A linear head: weight (V, D) and bias (V,) in the compute dtype, and what comes after it."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    after: AfterHead
    entries: int | None = None

    def chunks(self, num_tokens: int) -> list[slice]:
        """Returns the chunks of tokens whose logits exist at the same time."""
        part = self.after.part
        size = chunk_tokens(self.weight.shape[0] if part is None else part.most, self.entries)
        return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]

    def logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns logits (n, V), float32, of hidden states (n, D), and tanh's values (n, V) if there is a cap."""
        z = F.linear(hidden, self.weight, self.bias).float()
        if self.after.cap is not None:
            bounded = z.mul_(self.after.scale / self.after.cap).tanh_()
            return bounded * self.after.cap, bounded
        return (z.mul_(self.after.scale) if self.after.scale != 1.0 else z), None

    def losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, _Chunk]:
        """Returns losses (n,), float32, of hidden states (n, D) and targets (n,), and what `gradient` needs."""
        z, bounded = self.logits(hidden)
        part = self.after.part
        if part is not None:
            columns, is_here = part.own(targets)
            z.sub_(part.largest(z))
            picked = z.gather(1, columns).masked_fill_(~is_here, 0.0)
            totals, picked = part.summed(z.exp_().sum(dim=1, keepdim=True), picked)
            return (totals.log() - picked).squeeze(1), _Chunk(z, totals, bounded)
        # Subtracting the largest keeps exp from overflowing; the loss stays the same.
        z.sub_(z.amax(dim=1, keepdim=True))
        picked = z.gather(1, targets[:, None])
        totals = z.exp_().sum(dim=1, keepdim=True)
        return (totals.log() - picked).squeeze(1), _Chunk(z, totals, bounded)

    def gradient(self, chunk: _Chunk, targets: torch.Tensor, upstream: torch.Tensor | None) -> torch.Tensor:
        """Returns the gradient of the losses times `upstream` (n,) with respect to the head's outputs z.

        It is (n, V), in the compute dtype. The chunk's tensors are overwritten.
        """
        # In float32 up to here: in bfloat16 p - 1 would cancel to 0 for p near 1.
        z = chunk.exponentials.div_(chunk.totals)
        if self.after.part is None:
            z.scatter_add_(1, targets[:, None], torch.full_like(chunk.totals, -1.0))
        else:
            columns, is_here = self.after.part.own(targets)
            z.scatter_add_(1, columns, -is_here.to(z.dtype))
        if upstream is not None:
            z.mul_(upstream[:, None])
        return self.to_outputs(z, chunk.bounded)

    def to_outputs(self, z: torch.Tensor, bounded: torch.Tensor | None) -> torch.Tensor:
        """Returns the gradient with respect to the head's outputs, (n, V), in the compute dtype.

        Args:
            z: the gradient with respect to the logits, (n, V), float32; overwritten.
            bounded: tanh's values, (n, V), overwritten; None without a cap.
        """
        if bounded is not None:
            # The derivative of tanh is 1 - tanh^2.
            z.addcmul_(z, bounded.square_(), value=-1.0)
        if self.after.scale != 1.0:
            z.mul_(self.after.scale)
        return z.to(self.weight.dtype)


def chunk_tokens(vocabulary: int, entries: int | None = None) -> int:
    """Returns the tokens of a chunk whose logits have about `entries` entries, or `CHUNK_ENTRIES`."""
    return max(MIN_CHUNK_TOKENS, (entries or CHUNK_ENTRIES) // vocabulary)


@dataclass(frozen=True)
class Gradients:
    """Gradients of hidden states (N, D), weight (V, D) and bias (V,), in the compute dtype.

    The weight's is float32 if there are several chunks, the bias's always.
    """

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @staticmethod
    def zeros(head: Head, hidden: torch.Tensor, wanted: tuple[bool, bool, bool]) -> Gradients:
        """Returns zero gradients of the `wanted` tensors for hidden states (N, D)."""
        dtype = torch.float32 if len(head.chunks(len(hidden))) > 1 else head.weight.dtype
        return Gradients(
            torch.zeros_like(hidden) if wanted[0] else None,
            torch.zeros_like(head.weight, dtype=dtype) if wanted[1] else None,
            torch.zeros_like(head.weight[:, 0], dtype=torch.float32) if wanted[2] else None,
        )

    def add(self, head: Head, rows: slice, hidden: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds a chunk's share, from its hidden states (n, D) and the gradient (n, V) of the head's outputs."""
        if self.hidden is not None:
            torch.mm(gradient, head.weight, out=self.hidden[rows])
        if self.weight is not None:
            _add_product(self.weight, gradient, hidden)
        if self.bias is not None:
            self.bias.add_(gradient.float().sum(dim=0))

    def times(self, upstream: torch.Tensor, dtypes: tuple[torch.dtype | None, ...]) -> tuple[torch.Tensor | None, ...]:
        """Returns each gradient times `upstream` (0-dim), in place, and then cast to its entry of `dtypes`."""
        pairs = zip((self.hidden, self.weight, self.bias), dtypes, strict=True)
        return tuple(None if tensor is None else tensor.mul_(upstream).to(dtype) for tensor, dtype in pairs)


def _add_product(total: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
    """Adds gradient^T (V, n) times hidden (n, D) to the total (V, D)."""
    if gradient.dtype == total.dtype:
        torch.addmm(total, gradient.t(), hidden, out=total)
        return
    # A product in 16 bits is one rounding of each entry; sums of them have to be in float32.
    size = max(1, BLOCK_ENTRIES // hidden.shape[1])
    for block, columns in zip(torch.split(total, size), torch.split(gradient, size, dim=1), strict=True):
        block.add_(columns.t() @ hidden)


def dtypes_of(*tensors: torch.Tensor | None) -> tuple[torch.dtype | None, ...]:
    """Returns the dtypes of tensors of any shape; None for None."""
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


@dataclass(frozen=True)
class How:
    """How to run a head: what comes after it, the compute dtype, and which of `Gradients` are wanted."""

    after: AfterHead
    dtype: torch.dtype
    wanted: tuple[bool, bool, bool]

    def head(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Head:
        return Head(weight.to(self.dtype), None if bias is None else bias.to(self.dtype), self.after)


class _SummedLoss(torch.autograd.Function):
    """Computes the summed loss, (1, 1, 1), and its gradients in the forward pass, from the same logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        how: How,
    ) -> torch.Tensor:
        head = how.head(weight, bias)
        ctx.dtypes, hidden = dtypes_of(hidden, weight, bias), hidden.to(how.dtype)
        total = torch.zeros((1, 1, 1), dtype=torch.float32, device=hidden.device)
        gradients = Gradients.zeros(head, hidden, how.wanted)
        for rows in each_alike(head.chunks(len(hidden))):
            losses, chunk = head.losses(hidden[rows], targets[rows])
            total += losses.sum()
            if any(how.wanted):
                gradients.add(head, rows, hidden[rows], head.gradient(chunk, targets[rows], None))
            del chunk  # before the next one is there
        ctx.gradients = gradients
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the loss's gradients are scaled in place; a second backward needs a second forward")
        return (*gradients.times(upstream[0].squeeze(), ctx.dtypes), None, None)


class _TokenLosses(torch.autograd.Function):
    """Computes the loss of each token, (1, N, 1).

    Backward computes the logits again, as only then the factor of each loss is known.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        how: How,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.how = how
        head = how.head(weight, bias)
        each = torch.empty((1, len(hidden), 1), dtype=torch.float32, device=hidden.device)
        for rows in each_alike(head.chunks(len(hidden))):
            each[0, rows, 0] = head.losses(hidden[rows].to(how.dtype), targets[rows])[0]
        return each

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        how: How = ctx.how
        head = how.head(weight, bias)
        factors = upstream[0].flatten()
        dtypes, hidden = dtypes_of(hidden, weight, bias), hidden.to(how.dtype)
        gradients = Gradients.zeros(head, hidden, how.wanted)
        for rows in each_alike(head.chunks(len(hidden))):
            _, chunk = head.losses(hidden[rows], targets[rows])
            gradients.add(head, rows, hidden[rows], head.gradient(chunk, targets[rows], factors[rows]))
            del chunk  # before the next one is there
        return (*gradients.times(factors.new_ones(()), dtypes), None, None)


def summed_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    after: AfterHead = AfterHead(),
) -> torch.Tensor:
    """Returns the summed cross-entropy of a linear head, (1, 1, 1), float32.

    The head runs in autocast's type if autocast is on.

    Args:
        hidden: (N, D), of any floating type.
        weight: (V, D).
        bias: (V,).
        targets: (N,), int64, from 0 and below V.
        after: what the model does to the head's outputs.
    """
    if how_of(hidden, weight, bias, after).dtype == torch.float16:
        # A gradient computed before the factor of the loss is known may overflow float16, which no loss scale repairs.
        return token_losses(hidden, weight, bias, targets, after).sum().view(1, 1, 1)
    return _apply_without_autocast(_SummedLoss, hidden, weight, bias, targets, after)


def token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    after: AfterHead = AfterHead(),
) -> torch.Tensor:
    """Returns the cross-entropy of each token, (1, N, 1), float32; the arguments are those of `summed_loss`."""
    return _apply_without_autocast(_TokenLosses, hidden, weight, bias, targets, after)


def how_of(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, after: AfterHead) -> How:
    """Returns how to run a head on hidden states (N, D): autocast's dtype if it is on, and the gradients to compute.

    Args:
        weight: (V, D).
        bias: (V,).
    """
    kind, learns = hidden.device.type, torch.is_grad_enabled()
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    wanted = tuple(learns and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias))
    return How(after, dtype, wanted)  # type: ignore[arg-type]


def _apply_without_autocast(
    function: type[torch.autograd.Function],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    after: AfterHead,
) -> torch.Tensor:
    how = how_of(hidden, weight, bias, after)
    # The type is chosen above; autocast would round the float32 sums to it.
    with torch.autocast(hidden.device.type, enabled=False):
        return function.apply(hidden, weight, bias, targets, how)  # type: ignore[no-any-return,no-untyped-call]


class HeadLoss:
    """Losses of a model whose head is linear and whose logits are the head's outputs, scaled or capped.

    Args:
        base: the model without its wrappers.
        head: the module of `base` that computes the logits.
        after: what `base` does to the head's outputs.
        biased: whether `base` adds its buffer `final_logits_bias` to them, as BART does.
    """

    def __init__(self, base: Any, head: Any, after: AfterHead, biased: bool = False) -> None:
        self._base, self.head, self.after, self._biased = base, head, after, biased
        self.vocabulary: int = head.out_features

    @property
    def chunk_tokens(self) -> int:
        return chunk_tokens(self.vocabulary)

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias (V,), or None; looked up anew, because loading and sharding replace tensors."""
        own: torch.Tensor | None = self.head.bias
        if not self._biased:
            return own
        added: torch.Tensor = getattr(self._base, LOGITS_BIAS).flatten()
        return added if own is None else own + added

    def summed(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        targets: torch.Tensor,
        counted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the summed loss, 0-dim, float32, with a graph to the parameters.

        Args:
            model: the base, or what wraps it.
            inputs: arguments of the model's forward.
            targets: what each token predicts, (tokens,) in the order of `inputs`; `IGNORED` for no target.
            counted: `numbers_of_targets(targets)` if it is known; finding it makes the host wait for a GPU.
        """
        return self.run(summed_loss, model, inputs, targets, counted)[0].squeeze()

    def by_token(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        targets: torch.Tensor,
        counted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the loss of each token, (tokens,), float32, 0 without a target; arguments are those of `summed`."""
        each, counted = self.run(token_losses, model, inputs, targets, counted)
        return each.new_zeros(len(targets)).index_copy(0, counted, each.flatten())

    def run(
        self,
        function: Callable[..., torch.Tensor],
        model: nn.Module,
        inputs: Mapping[str, Any],
        targets: torch.Tensor,
        known: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs `function` on the head's inputs of the n tokens with a target.

        Args:
            function: takes hidden states (n, D), weight, bias, targets (n,) and `AfterHead`.
            model: the base, or what wraps it.
            inputs: arguments of the model's forward.
            targets: (tokens,); `IGNORED` for no target.
            known: `numbers_of_targets(targets)` if it is known.

        Returns:
            The result of `function`, and the numbers of these tokens, (n,).

        Raises:
            RuntimeError: if the head does not run exactly once on all tokens, or `model` is not this objective's model.
        """
        counted = numbers_of_targets(targets) if known is None else known
        cut_by = ranks_of_head(self.head)
        part = None if cut_by is None else VocabularyPart(cut_by, self.vocabulary)
        after = replace(self.after, part=part)
        found: list[torch.Tensor] = []

        def losses(hidden: torch.Tensor) -> torch.Tensor:
            if hidden.shape[:-1].numel() != len(targets):
                raise RuntimeError(f"the head was given {tuple(hidden.shape)}, but there are {len(targets)} tokens")
            rows = hidden.flatten(0, -2).index_select(0, counted)
            chosen = targets.index_select(0, counted).clamp_min(0)
            return function(rows, self.head.weight, self.bias, chosen, after)

        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            original(*args, **kwargs)
            if len(found) != 1:
                raise RuntimeError(f"the head of {type(self._base).__name__} ran {len(found)} times, not once")
            return found.pop()  # the output that the head's hooks saw, before the model changed it

        original = own_forward(self._base)
        thread = threading.get_ident()
        # Micro-batches that run by block are in other threads, and their hooks are on the same head.
        hook = self.head.register_forward_hook(
            lambda _module, _args, output: found.append(output) if threading.get_ident() == thread else None
        )
        try:
            with replaced(self.head, losses), replaced(self._base, functools.wraps(original)(run)):
                output = model(**inputs)
        finally:
            hook.remove()
        if not torch.is_tensor(output):
            raise RuntimeError("the objective was made for another model than this one")
        return output, counted


def numbers_of_targets(targets: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of the tokens with a target, (n,), int64, of targets (tokens,).

    In a trace without values these are all tokens, because the targets are not known.
    """
    if not has_values(targets):
        return torch.arange(len(targets), device=targets.device)
    return (targets != IGNORED).nonzero().squeeze(1)
