"""Estimates how long operators take: the longer of arithmetic and memory traffic, and never less than a launch.

It applies the roofline model (Williams et al., doi 10.1145/1498765.1498785) to each operator that autograd really
runs, as a `TorchDispatchMode` sees them, so that no formula for a layer is written down here. It works on fake
tensors, because only shapes are read.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils.flop_counter import flop_registry

from toolkit.planning.time.hardware import Hardware, Quantile

OperatorKind = Literal["matmul", "attention", "memory", "exchange"]

Operator = tuple[OperatorKind, int, int]
"""What bounds an operator, its FLOPs, and its bytes of memory traffic."""

ATTENTION_FACTOR = 0.75
"""Share of a matrix product's efficiency that attention reaches, because softmax separates its two products."""


@dataclass(frozen=True)
class Work:
    """Operators of one segment of a step, equal ones counted together."""

    operators: Mapping[Operator, int] = field(default_factory=dict)

    def __add__(self, other: Work) -> Work:
        total = Counter(self.operators)
        total.update(other.operators)
        return Work(total)

    @property
    def flops(self) -> int:
        return sum(flops * count for (_, flops, _), count in self.operators.items())

    @property
    def bytes(self) -> int:
        return sum(size * count for (kind, _, size), count in self.operators.items() if kind != "exchange")

    @property
    def exchanged(self) -> int:
        """Bytes that this rank sends to the ranks with which it shares rows or experts."""
        return sum(size * count for (kind, _, size), count in self.operators.items() if kind == "exchange")

    def seconds(self, hardware: Hardware, dtype: str, quantile: Quantile = "mid") -> float:
        """Returns the time on one device.

        Args:
            dtype: dtype of matrix products: `float32`, `bfloat16` or `float16`.
            quantile: quantile of the time; `low` is the shortest.
        """
        speed = {kind: hardware.flops(dtype, quantile) for kind in ("matmul", "memory")}
        # FlashAttention-2 reaches 50 to 73 % of an A100's peak, products of its size 80 to 90 % (arXiv 2307.08691).
        speed["attention"] = speed["matmul"] * ATTENTION_FACTOR
        bandwidth = hardware.memory(quantile)
        return sum(
            count * max(flops / speed[kind], size / bandwidth, hardware.kernel_seconds)
            for (kind, flops, size), count in self.operators.items()
            if kind != "exchange"
        )


# What one operator does

Arguments = Mapping[str, Any]
Count = Callable[[Arguments, Any], int]
"""FLOPs or bytes of a call, from its arguments by name and its result."""


@dataclass(frozen=True)
class _Rule:
    kind: OperatorKind
    flops: Count
    bytes: Count


def record(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Operator | None:
    """Returns the cost of a dispatched operator, or None if it moved and computed nothing.

    Args:
        func: an `OpOverload`, as `__torch_dispatch__` gets it.
        out: its result, real or fake.
    """
    rule = _rule(func)
    if rule is None:
        return None
    names = (argument.name for argument in func._schema.arguments)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    return rule.kind, rule.flops(arguments, out), rule.bytes(arguments, out)


@functools.cache
def _rule(func: Any) -> _Rule | None:
    if not hasattr(func, "_schema"):
        return None  # a higher-order operator; the operators that it calls are dispatched themselves
    namespace, _, name = func._schema.name.partition("::")
    if name == "planned_exchange":  # an exchange of tokens; toolkit.planning.time.traffic counts what FSDP2 sends
        return _Rule("exchange", _no_flops, _exchanged_bytes)
    if name == "planned_reduction":
        return _Rule("exchange", _no_flops, _reduced_bytes)
    if namespace in SILENT_NAMESPACES or name in SILENT or _only_views(func):
        return None
    # torch 2.13 has no formula for it.
    if "grouped_mm" in name:
        return _Rule("matmul", _grouped_flops, _read_and_written)
    # torch's formula raises if keys and values have fewer heads than queries.
    if name.startswith("_scaled_dot_product"):
        products = _attention_backward if name.endswith("backward") else _attention_forward
        return _Rule("attention", products, _read_and_written)
    if func.overloadpacket in flop_registry:
        kind: OperatorKind = "attention" if "attention" in name else "matmul"
        return _Rule(kind, functools.partial(_torch_flops, func), _read_and_written)
    return _Rule("memory", _no_flops, TRAFFIC.get(name) or TRAFFIC.get(name.rstrip("_"), _read_and_written))


SILENT_NAMESPACES = ("prim", "prims", "c10d", "_c10d_functional", "profiler")
"""Namespaces that are not counted here; toolkit.planning.time.traffic counts collectives."""

SILENT = frozenset(
    (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"),
        *("_unsafe_view", "lift_fresh", "_local_scalar_dense", "is_same_size", "equal", "sym_size"),
        *("sym_numel", "sym_stride", "sym_storage_offset"),
    )
)
"""Operators without a kernel worth counting, although the schema does not say that the result is a view."""


def _only_views(func: Any) -> bool:
    """Returns whether every result is a view of an argument that is not written to."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


# Memory traffic


def _read_and_written(arguments: Arguments, out: Any) -> int:
    """Counts every argument as read once and every result as written once."""
    # `x * x` reads x once.
    read = {id(tensor): tensor for tensor in _tensors(arguments.values())}
    return sum(map(_tensor_bytes, read.values())) + sum(map(_tensor_bytes, _tensors((out,))))


def _written_bytes(_arguments: Arguments, out: Any) -> int:
    return sum(map(_tensor_bytes, _tensors((out,))))


def _copied_bytes(arguments: Arguments, out: Any) -> int:
    return _tensor_bytes(arguments["src"]) + _tensor_bytes(out)


def _looked_up(arguments: Arguments, out: Any) -> int:
    """Counts only the selected rows as read."""
    tensors = [value for name, value in arguments.items() if name not in ("self", "weight")]
    return sum(map(_tensor_bytes, _tensors(tensors))) + 2 * _written_bytes(arguments, out)


def _scattered_in_place(arguments: Arguments, _out: Any) -> int:
    """Counts indices and source as read, and their destinations as read and written."""
    tensors = list(_tensors(value for name, value in arguments.items() if name != "self"))
    source = max(map(_tensor_bytes, tensors), default=0)
    return sum(map(_tensor_bytes, tensors)) + 2 * source


def _scattered(arguments: Arguments, out: Any) -> int:
    """Counts a copy and then the update in place."""
    return 2 * _written_bytes(arguments, out) + _scattered_in_place(arguments, out)


def _embedding_gradient(arguments: Arguments, out: Any) -> int:
    """Counts zeroing the whole gradient and then adding to rows."""
    gradient = _tensor_bytes(arguments["grad_output"])
    return _written_bytes(arguments, out) + 3 * gradient + _tensor_bytes(arguments["indices"])


def _picked_loss(arguments: Arguments, out: Any) -> int:
    """Counts one number of each row as read."""
    return 2 * _tensor_bytes(arguments["target"]) + _written_bytes(arguments, out)


def _picked_loss_gradient(arguments: Arguments, out: Any) -> int:
    return _tensor_bytes(arguments["target"]) + _written_bytes(arguments, out)


def _exchanged_bytes(arguments: Arguments, out: Any) -> int:
    """Counts the bytes sent to other ranks; all ranks, with this one, get equal parts."""
    ranks: int = arguments["ranks"]
    return _written_bytes(arguments, out) * (ranks - 1) // ranks


def _reduced_bytes(arguments: Arguments, out: Any) -> int:
    """Counts the bytes sent to other ranks around a ring: of each rank's part this one adds to all but its own."""
    ranks: int = arguments["ranks"]
    return _tensor_bytes(arguments["rows"]) * (ranks - 1) // ranks


TRAFFIC: dict[str, Count] = {
    **dict.fromkeys(("fill", "zero", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like"), _written_bytes),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "arange", "bernoulli", "uniform", "normal"), _written_bytes),
    **dict.fromkeys(("embedding", "index", "index_select", "gather", "take"), _looked_up),
    **dict.fromkeys(("scatter", "scatter_add", "index_put", "index_add", "index_copy"), _scattered),
    **dict.fromkeys(("scatter_", "scatter_add_", "index_put_", "index_add_", "index_copy_"), _scattered_in_place),
    "_index_put_impl_": _scattered_in_place,
    "copy": _copied_bytes,
    "embedding_dense_backward": _embedding_gradient,
    "nll_loss_forward": _picked_loss,
    "nll_loss_backward": _picked_loss_gradient,
}
"""Counts of bytes by the operator's name, for operators that do not read and write every argument and result."""


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _tensor_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor; of an expanded one, those in memory."""
    itemsize = tensor.element_size()
    numel = tensor.numel()
    # A mask that is expanded over heads is read from one copy in the cache.
    if numel and not tensor.is_contiguous():
        numel = math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return numel * itemsize


# Arithmetic


def _no_flops(_arguments: Arguments, _out: Any) -> int:
    return 0


def _torch_flops(func: Any, arguments: Arguments, out: Any) -> int:
    """Applies torch's own formula, which takes the operator's arguments and ignores causality."""
    positional = [argument.name for argument in func._schema.arguments if not argument.kwarg_only]
    given = [arguments[name] for name in positional if name in arguments]
    named = {name: value for name, value in arguments.items() if name not in positional}
    flops = int(flop_registry[func.overloadpacket](*given, **named, out_val=out))
    # Flash kernels skip the blocks above the diagonal.
    return flops // 2 if arguments.get("is_causal") else flops


def _attention_forward(arguments: Arguments, _out: Any) -> int:
    """Counts the FLOPs of Q K^T and P V."""
    features: int = arguments["query"].shape[-1] + arguments["value"].shape[-1]
    return _scores(arguments) * features


def _attention_backward(arguments: Arguments, _out: Any) -> int:
    """Counts Q K^T again, dQ, dK, dP and dV, because flash attention keeps no scores (arXiv 2205.14135)."""
    features: int = 3 * arguments["query"].shape[-1] + 2 * arguments["value"].shape[-1]
    return _scores(arguments) * features


def _scores(arguments: Arguments) -> int:
    """Returns the FLOPs of all scores for one feature: query (B, H, T, D), key (B, H', T', D).

    torch's formula requires H = H'.
    """
    batch, heads, length, _ = arguments["query"].shape
    scores: int = 2 * batch * heads * length * arguments["key"].shape[-2]
    return scores // 2 if arguments.get("is_causal") else scores


def _grouped_flops(arguments: Arguments, out: Any) -> int:
    """Counts products with one matrix per expert: (T, K) x (E, K, N), or for the weights' gradient (K, T) x (T, N).

    Each token is multiplied by one expert's matrix. Two results are the two gradients of one call.
    """
    first, second = [tensor for tensor in _tensors(arguments.values()) if tensor.is_floating_point()][:2]
    groups = first.shape[0] if first.ndim == 3 and second.ndim == 2 else 1
    return 2 * first.numel() * second.shape[-1] // groups * len(list(_tensors((out,))))
