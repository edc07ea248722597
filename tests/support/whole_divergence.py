"""The divergence of full logits, as its definitions are written, and tensors to compute it of."""

from __future__ import annotations

from typing import Any

import torch

V, D, D_TEACHER, N = 37, 12, 20, 23
KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1)]


def whole_divergence(z: torch.Tensor, y: torch.Tensor, kind: str, beta: float, t: float) -> torch.Tensor:
    """Of each token, from logits z (N, V) and the teacher's y (N, V)."""
    p, q = (z / t).softmax(dim=1), (y / t).softmax(dim=1)

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * (a.log() - b.log())).sum(dim=1)

    if kind == "jsd":
        mixture = beta * q + (1 - beta) * p
        return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)
    return kl(q, p) if kind == "forward_kl" else kl(p, q)


def heads(vocabulary: int = V, of_teacher: int = V, tokens: int = N) -> tuple[Any, ...]:
    """The student's hidden states, weight and bias; targets; those of the teacher."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    hidden, weight, bias = drawn(tokens, D) / 4, drawn(vocabulary, D), drawn(vocabulary)
    student = tuple(tensor.requires_grad_() for tensor in (hidden, weight, bias))
    targets = torch.randint(min(vocabulary, of_teacher), (tokens,), generator=draw)
    return student, targets, (drawn(tokens, D_TEACHER) / 4, drawn(of_teacher, D_TEACHER), drawn(of_teacher))
