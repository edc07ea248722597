"""Counts the bytes that this rank hands to collectives, by kind."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
}


class Traffic(TorchDispatchMode):
    """Bytes of the whole tensor of each collective: an all-gather's output, the others' input."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        result = func(*args, **(kwargs or {}))
        if namespace in ("c10d", "_c10d_functional"):
            kind = KINDS.get(name, name)
            self.calls[kind] += 1
            self.bytes[kind] += _largest(args)
        return result


def _largest(args: Any) -> int:
    """The largest tensor, or list of tensors taken together, among the arguments."""
    sizes = [0]
    for value in args:
        if isinstance(value, torch.Tensor):
            sizes.append(value.numel() * value.element_size())
        elif isinstance(value, list | tuple):
            sizes.append(sum(t.numel() * t.element_size() for t in value if isinstance(t, torch.Tensor)))
    return max(sizes)
