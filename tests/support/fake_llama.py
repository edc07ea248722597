"""A Llama of plain torch on fake tensors, cut into segments, for tests of the planner's speed."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.planning.time.roofline import Operator, Work, record
from toolkit.planning.time.speed import ModelSegment
from toolkit.planning.workload.unit_shapes import ParameterShape, UnitShape
from toolkit.sharding.plan.unit_plan import UnitKind


@dataclass(frozen=True)
class Shape:
    """Head width 128, 8 key and value heads, Llama 3's vocabulary, untied."""

    layers: int
    width: int
    inner: int
    vocabulary: int = 128256

    @property
    def block(self) -> int:
        return 2 * self.width**2 + 2 * self.width * 1024 + 3 * self.width * self.inner + 2 * self.width

    @property
    def units(self) -> tuple[UnitShape, ...]:
        table = self.vocabulary * self.width
        blocks = [unit("block", self.block)] * self.layers
        return unit("embeddings", table), *blocks, unit("tail", table + self.width)


def unit(kind: UnitKind, numel: int, trainable: bool = True) -> UnitShape:
    """A unit of one parameter with a row for every element."""
    parameters = (ParameterShape((numel,), trainable, held=4),) if numel else ()
    return UnitShape(kind, kind, kind in ("embeddings", "block"), parameters)


SHAPES = {"8b": Shape(32, 4096, 14336), "13b": Shape(40, 5120, 17920), "small": Shape(4, 1024, 3584, 32000)}


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        operator = record(func, args, kwargs or {}, out)
        if operator is not None:
            self.operators.append(operator)
        return out


def work_of(function: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> tuple[Work, Work]:
    """Operators of `function(*leaves)` and of its backward to those leaves that require gradients."""
    with Recorder() as forward:
        out = function(*leaves)
    seed = torch.empty_like(out)
    with Recorder() as backward:
        torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], seed)
    return Work(Counter(forward.operators)), Work(Counter(backward.operators))


@functools.cache
def segments(name: str, micro_batch: int, length: int, checkpointing: bool) -> tuple[ModelSegment, ...]:
    shape = SHAPES[name]
    with FakeTensorMode():
        hidden = leaf(micro_batch, length, shape.width)
        labels = torch.empty(micro_batch, length, dtype=torch.long)
        embeddings = work_of(F.embedding, labels, leaf(shape.vocabulary, shape.width))
        forward, backward = work_of(functools.partial(block, shape), hidden, *block_weights(shape))
        head = work_of(functools.partial(loss, labels), hidden, leaf(shape.width), leaf(shape.vocabulary, shape.width))
    return (
        ModelSegment("embeddings", *embeddings),
        ModelSegment("block", forward, forward + backward if checkpointing else backward, shape.layers),
        ModelSegment("head", *head),
    )


def leaf(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)


def block_weights(shape: Shape) -> list[torch.Tensor]:
    width, inner, narrow = shape.width, shape.inner, 8 * 128
    sizes = [(width, width), (narrow, width), (narrow, width), (width, width), (inner, width), (inner, width)]
    return [leaf(*size) for size in (*sizes, (width, inner), (width,), (width,))]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def heads(x: torch.Tensor) -> torch.Tensor:
    """(B, T, H x 128) -> (B, H, T, 128)."""
    return x.unflatten(-1, (-1, 128)).transpose(1, 2)


def rotated(x: torch.Tensor) -> torch.Tensor:
    cos, sin = torch.empty(2, x.shape[2], 128, dtype=x.dtype).unbind()
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def block(shape: Shape, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    wq, wk, wv, wo, gate, up, down, first, second = weights
    y = norm(x, first)
    q, k, v = rotated(heads(F.linear(y, wq))), rotated(heads(F.linear(y, wk))), heads(F.linear(y, wv))
    repeats = shape.width // (8 * 128)
    k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(attended.transpose(1, 2).flatten(2), wo)
    y = norm(x, second)
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


def loss(labels: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    logits = F.linear(norm(x, weight), head).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
