"""Tensors without memory whose values are known, because they follow from a batch alone and not from weights.

Vision towers read the sizes of grids, and slice and select by them. Each fake tensor that is computed from known ones
gets real values next to it, for code that reads them; only the fake tensor is counted.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from toolkit.data.samples.image_samples import KINDS_OF_TOKENS
from toolkit.model.structure.fake_tensors import DynamicOutputShapeException, has_values, unset_fake_temporarily
from toolkit.planning.memory.fake import TorchDispatchMode, tree_flatten, tree_map, tree_unflatten

_ITEM = "aten::_local_scalar_dense"
_INDEX = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
_DRAWN = ("rand", "normal", "bernoulli", "empty", "dropout", "new_empty")


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode to enter inside of FakeTensorMode and below the ledger."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._real: Any = WeakTensorKeyDictionary()

    def without_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a fake tensor of a real tensor's shape and dtype, with known values; call it under FakeTensorMode."""
        fake = torch.empty_like(tensor, device="cpu")
        self._real[fake] = tensor
        return fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name() == _ITEM and args[0] in self._real:
            with unset_fake_temporarily():
                return self._real[args[0]].item()
        if func in _INDEX:
            args = (args[0], self._masks_as_indices(args[1]), *args[2:])
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not all(tensor in self._real or has_values(tensor) for tensor in tensors) or _draws_values(func):
            return func(*args, **kwargs)
        reals = [self._real.get(leaf, leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        with unset_fake_temporarily():
            real_args, real_kwargs = tree_unflatten(reals, spec)
            real = func(*real_args, **real_kwargs)
        try:
            fake = func(*args, **kwargs)
        except DynamicOutputShapeException:
            fake = tree_map(lambda t: torch.empty_like(t) if isinstance(t, torch.Tensor) else t, real)
        for made, value in zip(tree_flatten(fake)[0], tree_flatten(real)[0], strict=True):
            if isinstance(made, torch.Tensor):
                self._real[made] = value
        return fake

    def _masks_as_indices(self, indices: Any) -> list[Any]:
        """Replaces masks with known values by indices, because the number of selected elements must be known."""
        found: list[Any] = []
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) and index in self._real:
                with unset_fake_temporarily():
                    numbers = self._real[index].nonzero(as_tuple=True)
                found += [self.without_memory(each) for each in numbers]
            else:
                found.append(index)
        return found


def known_batch(stack: ExitStack, batch: dict[str, Any], objective: Any) -> dict[str, Any]:
    """Returns a batch as the model gets it under FakeTensorMode: real values become fake tensors with known values.

    Args:
        stack: keeps the values known.
    """
    if KINDS_OF_TOKENS not in batch:  # batches of text have no values
        return batch
    with unset_fake_temporarily():
        # All tokens are planned as targets, as in batches without values.
        uncounted = {name: value for name, value in objective.on_host(batch).items() if name != "counted"}
    known = stack.enter_context(KnownValues())
    return {
        n: known.without_memory(value) if isinstance(value, torch.Tensor) else value for n, value in uncounted.items()
    }


def _draws_values(func: Any) -> bool:
    return any(word in func._schema.name for word in _DRAWN)
