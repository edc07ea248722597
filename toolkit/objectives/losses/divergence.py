"""The divergence of a student's next-token probabilities from a teacher's, with the logits of a few tokens at a time.

As in `fused_linear_cross_entropy`, each chunk of tokens gets its logits, here of both models, and its gradient before
the next one. Until then only hidden states of the teacher are held.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from toolkit.objectives.losses.chunks import each_alike
from toolkit.objectives.losses.fused_linear_cross_entropy import (
    CHUNK_ENTRIES,
    AfterHead,
    Gradients,
    Head,
    How,
    VocabularyPart,
    dtypes_of,
    how_of,
)

ENTRIES = CHUNK_ENTRIES // 2
"""Entries of a chunk's student logits: three or four tensors of this size exist at a time; one model has one or two."""


@dataclass(frozen=True)
class Divergence:
    """The loss (1 - r) CE + r T^2 D of each token; D compares the softmax of logits / T over the shared vocabulary.

    D is KL(teacher || student), KL(student || teacher), or b KL(teacher || M) + (1 - b) KL(student || M) with
    M = b teacher + (1 - b) student (generalised JSD, arXiv 2306.13649, eq. 1); CE is the labels' cross-entropy, at
    temperature 1 and over all of the student's vocabulary. T^2 keeps the gradients' size whatever the temperature is
    (arXiv 1503.02531).

    Attributes:
        beta: b of `jsd`.
        ratio: r.
    """

    kind: str = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0
    ratio: float = 0.5

    def loss(self, cross_entropies: torch.Tensor, divergences: torch.Tensor) -> torch.Tensor:
        """Returns the loss of cross-entropies and divergences of one shape: (n,) by token, or 0-dim sums."""
        return (1 - self.ratio) * cross_entropies + self.ratio * self.temperature**2 * divergences

    def compare(
        self, z: torch.Tensor, y: torch.Tensor, targets: torch.Tensor, part: VocabularyPart | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cross-entropy and the divergence of each token, both (n,), float32.

        Args:
            z: the student's logits (n, V), float32; overwritten by the gradient of `loss` with respect to them.
            y: the teacher's logits (n, S), S <= V, float32; overwritten.
            targets: (n,), int64.
            part: the part of the vocabulary whose columns z and y have; None for all.
        """
        shared, t = slice(y.shape[1]), self.temperature
        whole = _logsumexp(z, part)
        columns, is_here = (targets[:, None], None) if part is None else part.own(targets)
        losses = whole - _picked(z, columns, is_here, part)
        z.div_(t)
        y.div_(t)
        normaliser = _logsumexp(z[:, shared], part)
        z.sub_(normaliser)
        y.sub_(_logsumexp(y, part))
        divergences, gradient = self._divergences_and_gradient(z[:, shared], y, part)
        if self.ratio < 1:  # the cross-entropy's gradient: its softmax is at temperature 1
            z.mul_(t).add_(t * normaliser - whole).exp_()
            z.scatter_add_(1, columns, torch.full_like(whole, -1.0) if is_here is None else -is_here.to(z.dtype))
            z.mul_(1 - self.ratio)
        else:
            z.zero_()
        # T^2 of the loss, 1 / T of the logits that are divided.
        z[:, shared].add_(gradient, alpha=self.ratio * t)
        return losses.squeeze(1), divergences

    def _divergences_and_gradient(
        self, s: torch.Tensor, t: torch.Tensor, part: VocabularyPart | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the divergences (n,), and their gradients (n, S) with respect to the student's logits, stored in t.

        Args:
            s: the student's log-probabilities (n, S).
            t: the teacher's (n, S).
            part: the part of the vocabulary that they have; None for all.
        """
        if self.kind == "forward_kl":
            q = t.exp()
            divergences = _summed(t.sub_(s).mul_(q), part).squeeze(1)
            return divergences, torch.exp(s, out=t).sub_(q)
        if self.kind == "reverse_kl":
            p = s.exp()
            each = t.neg_().add_(s).mul_(p)
            means = _summed(each, part)
            return means.squeeze(1), each.addcmul_(p, means, value=-1.0)
        of_student = math.log1p(-self.beta)
        mixture = torch.logaddexp(s, t + (math.log(self.beta) - of_student)).add_(of_student)
        p = t.exp()
        of_teacher = _summed(t.sub_(mixture).mul_(p), part).squeeze(1)
        p = torch.exp(s, out=p)
        each = torch.sub(s, mixture, out=t).mul_(p)
        means = _summed(each, part)
        gradient = each.addcmul_(p, means, value=-1.0).mul_(1 - self.beta)
        return self.beta * of_teacher + (1 - self.beta) * means.squeeze(1), gradient


def _summed(each: torch.Tensor, part: VocabularyPart | None) -> torch.Tensor:
    """Returns the sums over the vocabulary, (n, 1), of columns (n, v) of a part of it."""
    own = each.sum(dim=1, keepdim=True)
    return own if part is None else part.summed(own)[0]


def _logsumexp(z: torch.Tensor, part: VocabularyPart | None) -> torch.Tensor:
    """Returns the log of the summed exponentials over the vocabulary, (n, 1), of columns (n, v) of a part of it."""
    if part is None:
        return z.logsumexp(dim=1, keepdim=True)
    largest = part.largest(z)
    return _summed((z - largest).exp_(), part).log_().add_(largest)


def _picked(
    z: torch.Tensor, columns: torch.Tensor, is_here: torch.Tensor | None, part: VocabularyPart | None
) -> torch.Tensor:
    """Returns the entries (n, 1) of `columns` (n, 1), from the rank whose part has them."""
    found = z.gather(1, columns)
    if is_here is None or part is None:
        return found
    return part.summed(found.masked_fill_(~is_here, 0.0))[0]


@dataclass(frozen=True)
class TeacherSide:
    """A teacher's hidden states (N, D) of N tokens and its head: weight (S, D) and bias (S,)."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    after: AfterHead

    def head(self, rows: slice, dtype: torch.dtype) -> Head:
        """Returns those of the head's rows that are in `rows`, which the student has too, in type `dtype`."""
        bias = None if self.bias is None else self.bias[rows].to(dtype)
        return Head(self.weight[rows].to(dtype), bias, self.after)


class _SummedDivergence(torch.autograd.Function):
    """Computes the summed loss, (1, 1, 1), with its gradients in the forward, and the sums of CE and D, (2,)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        teacher: TeacherSide,
        divergence: Divergence,
        how: How,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = replace(how.head(weight, bias), entries=ENTRIES)
        part = how.after.part
        teachers = teacher.head(slice(weight.shape[0]) if part is None else part.own_rows, how.dtype)
        ctx.dtypes, hidden = dtypes_of(hidden, weight, bias), hidden.to(how.dtype)
        sums = torch.zeros(2, dtype=torch.float32, device=hidden.device)
        gradients = Gradients.zeros(head, hidden, how.wanted)
        for rows in each_alike(head.chunks(len(hidden))):
            z, bounded = head.logits(hidden[rows])
            y = teachers.logits(teacher.hidden[rows].to(how.dtype))[0]
            sums += torch.stack([each.sum() for each in divergence.compare(z, y, targets[rows], part)])
            del y  # before the gradient is rounded
            if any(how.wanted):
                gradients.add(head, rows, hidden[rows], head.to_outputs(z, bounded))
            del z, bounded  # before the next chunk's are allocated
        ctx.gradients = gradients
        ctx.mark_non_differentiable(sums)
        return divergence.loss(sums[0], sums[1]).view(1, 1, 1), sums

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the loss's gradients are scaled in place; a second backward needs a second forward")
        return (*gradients.times(upstream[0].squeeze(), ctx.dtypes), None, None, None, None)


def summed_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    teacher: TeacherSide,
    divergence: Divergence,
    after: AfterHead,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the summed loss of a linear head, (1, 1, 1), and the summed cross-entropy and divergence, (2,); float32.

    The head runs in autocast's type if autocast is on.

    Args:
        hidden: (N, D), of any floating type.
        weight: (V, D), or this rank's part of it.
        bias: (V,).
        targets: (N,), int64, from 0 and below V.
        after: what the model does to the head's outputs.
    """
    how = how_of(hidden, weight, bias, after)
    with torch.autocast(hidden.device.type, enabled=False):
        return _SummedDivergence.apply(  # type: ignore[no-any-return,no-untyped-call]
            hidden, weight, bias, targets, teacher, divergence, how
        )
