"""Counts the bytes that this rank hands to collectives, by kind."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.sharding.fsdp2 import gloo as pairwise

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
    """Bytes of the whole tensor of each collective: an all-gather's output, the others' input.

    Those that are made of sends count whole, too; `bytes["send"]` has what they send, and `by_torch` only what torch's
    own collectives carry.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.by_torch: Counter[str] = Counter()
        self._patches = ExitStack()

    def __enter__(self) -> Any:
        for kind in ("all_gather", "reduce_scatter"):
            self._patches.enter_context(patch.object(pairwise, kind, self._counted(kind)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.close()
        super().__exit__(*error)

    def _counted(self, kind: str) -> Any:
        original = getattr(pairwise, kind)

        def call(output: torch.Tensor, given: torch.Tensor, group: Any) -> None:
            self.calls[kind] += 1
            self.bytes[kind] += max(output.nbytes, given.nbytes)
            original(output, given, group)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        result = func(*args, **(kwargs or {}))
        if namespace in ("c10d", "_c10d_functional"):
            kind = KINDS.get(name, name)
            self.calls[kind] += 1
            self.bytes[kind] += _largest(args)
            self.by_torch[kind] += _largest(args)
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
