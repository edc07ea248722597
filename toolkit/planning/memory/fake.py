"""Tensors without memory, and a ledger of the memory that they would take.

Only this file and toolkit/model/structure/fake_tensors.py use private names of torch for planning;
tests/unit/planning/memory/test_planning_private_names.py fails when one of them moves.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_iter, tree_map, tree_map_only, tree_unflatten

from toolkit.model.structure.fake_tensors import has_values
from toolkit.sharding.fsdp2.precision import kept_in_float32, round_buffers, types_of_authors

__all__ = [
    "Ledger",
    "TorchDispatchMode",
    "autocast",
    "cuda_dropout",
    "exchanged_bytes",
    "give_parameters",
    "host_copies",
    "tree_flatten",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]

GRANULE = 512
"""CUDA's caching allocator hands out multiples of this many bytes."""

_DEVICE = torch.ops.prim.device.default


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the live bytes of storages, each once, rounded up as CUDA's allocator does.

    The ledger sees every tensor that an operator returns, and what FSDP2 frees by resizing a storage to nothing.
    Fake tensors and real ones are counted alike.

    Args:
        on_operator: called after every operator with `(function, args, kwargs, output)`.

    Attributes:
        current: live bytes.
        peak: the most live bytes since `restart`.
        host: live bytes that `host_copies` moved to the host.
        host_peak: the most of them.
        label: name of the current phase; `peak_label` is the label at the peak.
    """

    def __init__(self, granule: int = GRANULE, on_operator: Callable[..., None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = self.peak = self.host = self.host_peak = 0
        self.label = self.peak_label = ""
        self._granule = granule
        self._on_operator = on_operator
        self._sizes: dict[int, int] = {}
        self._references: dict[int, Any] = {}

    def restart(self) -> None:
        """Resets the peak to the current bytes."""
        self.peak, self.peak_label = self.current, self.label

    def see(self, tensor: torch.Tensor) -> None:
        """Counts a tensor of any shape that existed before the ledger was opened."""
        # A DTensor has no storage of its own.
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type == "meta":
            return
        storage = local.untyped_storage()
        # The address of the C++ storage, which all views share.
        key = storage._cdata
        if key not in self._sizes:
            # Views share a storage, so it is the storage's end that frees the bytes, not the tensor's.
            self._references[key] = weakref.ref(storage, functools.partial(self._forget, key))
            self._sizes[key] = 0
        self._resize(key, storage.nbytes())

    def _resize(self, key: int, num_bytes: int) -> None:
        size = -(-num_bytes // self._granule) * self._granule
        self.current += size - self._sizes[key]
        self._sizes[key] = size
        if self.current > self.peak:
            self.peak, self.peak_label = self.current, self.label

    def _forget(self, key: int, _storage: Any) -> None:
        del self._references[key]
        self.current -= self._sizes.pop(key)

    def keep_on_host(self, num_bytes: int) -> None:
        self.host += num_bytes
        self.host_peak = max(self.host_peak, self.host)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and not has_values(args[0]):
            return args[0].fake_device  # a shortcut: autograd reads devices twice as often as it calls operators
        # Counting both would count each shard twice.
        if any(issubclass(cls, torch.distributed.tensor.DTensor) for cls in types):
            return NotImplemented  # its local operators come next
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        if self._on_operator is not None:
            self._on_operator(func, args, kwargs or {}, out)
        return out

    def __enter__(self) -> Ledger:
        # FSDP2 frees a gathered parameter by `resize_(0)` on its storage: not an operator, so it is not dispatched.
        original = self._original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in self._sizes:
                self._resize(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        gc.disable()  # if the collector freed cycles at random times, the figures would not be reproducible
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        gc.enable()
        torch.UntypedStorage.resize_ = self._original  # type: ignore[method-assign]


def exchanged_bytes(func: Any, args: Any, out: Any) -> int:
    """Returns the bytes that a rank sends in an operator that stands for an exchange in a plan; 0 for all others."""
    namespace, _, name = func.name().partition("::")
    if namespace != "toolkit" or name not in ("planned_exchange", "planned_reduction"):
        return 0
    # All ranks get equal parts of an exchange. Around a ring a rank adds to all parts of a sum but its own.
    whole, ranks = out if name == "planned_exchange" else args[0], args[1]
    return int(whole.numel() * whole.element_size() * (ranks - 1) // ranks)


@contextmanager
def cuda_dropout() -> Iterator[None]:
    """Makes dropout keep a mask of one byte per element, as on CUDA; on a CPU the mask would have the input's type."""
    original = torch.nn.functional.dropout
    torch.nn.functional.dropout = _dropout
    try:
        yield
    finally:
        torch.nn.functional.dropout = original


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0.0:
        return input
    dropped: torch.Tensor = _Dropout.apply(input)  # type: ignore[no-untyped-call]
    return dropped


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        # No values are drawn: only the size of what is kept matters.
        ctx.save_for_backward(torch.empty_like(tensor, dtype=torch.bool))
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (mask,) = ctx.saved_tensors
        masked: torch.Tensor = gradient * mask
        return masked


@contextmanager
def host_copies(ledger: Ledger) -> Iterator[None]:
    """Makes `torch.autograd.graph.save_on_cpu` move tensors out of the ledger, which it would not on a CPU."""

    class SaveOnHost(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
            def pack(tensor: torch.Tensor) -> torch.Tensor:
                num_bytes = tensor.numel() * tensor.element_size()
                ledger.keep_on_host(num_bytes)
                # Host and device are both the CPU here: a copy would stay in the ledger as if on the device.
                kept = torch.empty_like(tensor, device="meta")
                weakref.finalize(kept, ledger.keep_on_host, -num_bytes)
                return kept

            super().__init__(pack, lambda kept: torch.empty_like(kept, device="cpu"))

    original = torch.autograd.graph.save_on_cpu
    torch.autograd.graph.save_on_cpu = SaveOnHost  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.autograd.graph.save_on_cpu = original  # type: ignore[misc]


def give_parameters(model: nn.Module, dtype: torch.dtype | None) -> bool:
    """Gives a model on the meta device parameters as FSDP2 gathers them.

    Parameters that FSDP2 casts get the compute dtype; the replay adds the float32 shards.

    Returns:
        Whether its units cast their inputs; as in `toolkit.sharding.apply`, only the root casts those of a model whose
        authors choose dtypes.
    """
    with _disable_current_modes():  # building a model may read numbers, as Qianfan's rates of dropped paths
        types = {} if dtype is None else types_of_authors(model, dtype)
    kept = set(kept_in_float32(model, types))
    made: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        own = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        empty = torch.empty(parameter.shape, dtype=torch.float32 if name in kept else own, device="cpu")
        made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for module in model.modules():  # keeps tied parameters tied; `to_empty` would untie them
        module._parameters.update({name: made[id(old)] for name, old in module._parameters.items() if old is not None})
    round_buffers(model, types)
    return not types


def autocast(forward: Callable[..., Any], dtype: torch.dtype | None) -> Callable[..., Any]:
    """Wraps a forward in autocast as `Accelerator.prepare` does, with the CPU's lists of operators for CUDA's."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        # autocast for CUDA is off in a process without CUDA.
        with torch.autocast("cpu", dtype=dtype):
            output = forward(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, output)

    return run
