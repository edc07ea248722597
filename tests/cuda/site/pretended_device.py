"""Loads the pretended device's libraries, and computes on the CPU what its kernels would.

Each operator of torch on CUDA tensors first runs as it is: its allocations, streams and launches are real. Then it is
computed on the CPU into the same memory, which the host can read and write. So numbers are right, while everything
above the kernels is torch's own CUDA code.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

SONAMES = ("libcudart.so.13", "libcuda.so.1", "libcublasLt.so.13", "libcublas.so.13", "libnccl.so.2", "libcudnn.so.9")
COUNTERS = ("launches", "products", "collectives", "to_device_bytes", "to_host_bytes", "host_waits", "misuses")

computed: Counter[str] = Counter()
failed: dict[str, str] = {}
"""Operators that the CPU could not compute, and why: their results are wrong."""

_loaded: dict[str, ctypes.CDLL] = {}
_kept: list[Any] = []


def load(folder: str, largest: int) -> None:
    """Before torch is imported.

    Args:
        largest: operators on floating tensors of more elements are not computed; small results of them are zeros.
    """
    for name in SONAMES:
        _loaded[name] = ctypes.CDLL(str(Path(folder, name)), ctypes.RTLD_GLOBAL)
    if largest:
        sys.meta_path[:0] = [_After(package, namespace, largest) for package, namespace in OPERATORS.items()]


OPERATORS = {"torch": "aten", "bitsandbytes": "bitsandbytes"}
"""Packages, and the namespace of the operators that each brings."""


class _After(importlib.abc.MetaPathFinder):
    """Takes a package's operators over as soon as it is imported."""

    def __init__(self, package: str, namespace: str, largest: int) -> None:
        self._package, self._namespace, self._largest = package, namespace, largest

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._package:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load_package = spec.loader.exec_module

        def load_and_install(module: Any) -> None:
            load_package(module)
            install(self._namespace, self._largest)

        spec.loader.exec_module = load_and_install  # type: ignore[method-assign]
        return spec


# What the device has seen


def counters() -> dict[str, int]:
    runtime = _loaded[SONAMES[0]]
    runtime.pretended_counter.restype = ctypes.c_uint64
    return {name: int(runtime.pretended_counter(number)) for number, name in enumerate(COUNTERS)}


def call_on_wait(function: Callable[[str, list[str]], None] | None) -> None:
    """From now on, `function` gets each wait of the host for the device, and the Python lines that led to it."""
    if function is None:
        _loaded[SONAMES[0]].pretended_call_on_wait(None)
        return

    def called(what: bytes) -> None:
        lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()[:-1]]
        function(what.decode(), lines)

    kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    _kept.append(kind(called))
    _loaded[SONAMES[0]].pretended_call_on_wait(_kept[-1])


# Numbers

LEFT_ALONE = {
    # views, and what makes, names or asks for memory
    *(
        "as_strided",
        "view",
        "_reshape_alias",
        "set_",
        "resize_",
        "resize_as_",
        "empty",
        "empty_strided",
        "alias",
        "data",
    ),
    *("record_stream", "is_pinned", "_pin_memory", "unfold", "view_as_real", "view_as_complex", "is_set_to"),
    *("_local_scalar_dense", "_fused_sdp_choice", "_has_same_storage_numel", "_efficientzerotensor"),
}
PREFIXES_LEFT_ALONE = ("empty", "_cudnn", "cudnn", "miopen", "_nested", "_sparse", "_thnn", "_cufft", "_fft")
SIZED_BY_DATA = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "histc")
"""The host side of these reads what the kernel wrote; so they are computed first, inside of other operators, too."""


def install(namespace: str, largest: int) -> None:
    import torch

    library = torch.library.Library(namespace, "IMPL")
    _kept.append(library)
    names = {*torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"), "aten::copy_"}
    for name in sorted(name for name in names if name.startswith(f"{namespace}::")):
        base, _, overload = name.removeprefix(f"{namespace}::").partition(".")
        if base in LEFT_ALONE or base.startswith(PREFIXES_LEFT_ALONE):
            continue
        packet = getattr(getattr(torch.ops, namespace), base, None)
        operator = getattr(packet, overload or "default", None)
        if operator is None or _gives_views(operator._schema):
            continue
        if not any("Tensor" in str(argument.type) for argument in operator._schema.arguments):
            continue
        kernel = torch.library.get_kernel(name, "CUDA")
        implementation = _Computed(name, base, operator, kernel, largest)
        library.impl(name.removeprefix(f"{namespace}::"), implementation, "CUDA", with_keyset=True, allow_override=True)


def _gives_views(schema: Any) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)


_busy = threading.local()


class _Computed:
    """One operator: its CUDA kernel, and then the same on the CPU."""

    def __init__(self, name: str, base: str, operator: Any, kernel: Any, largest: int) -> None:
        self._name, self._base, self._kernel, self._largest = name, base, kernel, largest
        self._compute = OTHERWISE.get(base, operator)
        self._operator = operator
        self._is_in_place = operator._schema.is_mutable
        self._tensors_at = [
            number
            for number, argument in enumerate(operator._schema.arguments)
            if str(argument.type) in ("Tensor", "Optional[Tensor]")
        ]

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        args = self._with_tensors(args)
        if self._base in SIZED_BY_DATA and not self._is_in_place and self._is_small((args, kwargs)):
            return _on_device(self._compute(*_on_host(args), **_on_host(kwargs)), args[0].device)
        if getattr(_busy, "on", False):
            return self._kernel.call_boxed(keys, *args, **kwargs)
        _busy.on = True
        try:
            return self._run(keys, args, kwargs)
        finally:
            _busy.on = False

    def _with_tensors(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The dispatcher hands numbers on as numbers where the schema has a tensor."""
        import torch

        def tensor(number: Any) -> Any:
            return torch.tensor(number) if isinstance(number, bool | int | float | complex) else number

        return tuple(tensor(each) if at in self._tensors_at else each for at, each in enumerate(args))

    def _run(self, keys: Any, args: Any, kwargs: Any) -> Any:
        small = self._is_small((args, kwargs))
        made = self._kernel.call_boxed(keys, *args, **kwargs)
        if not small or not self._is_small(made):
            if not self._is_in_place:
                self._clear(made)
            return made
        told = {name: _host_setting(name, value) for name, value in kwargs.items()}
        try:
            result = self._compute(*_on_host(args), **told)
        except Exception as error:
            if self._name not in failed:
                print(f"[pretended device] {self._name} is not computed: {error}", file=sys.stderr, flush=True)
            failed[self._name] = f"{type(error).__name__}: {error}"[:300]
            return made
        computed[self._name] += 1
        if not self._is_in_place:
            _write(made, result)
        return made

    def _is_small(self, values: Any) -> bool:
        # Positions and masks are computed whatever their size: the host side goes by what is in them.
        return all(tensor.numel() <= self._largest or not tensor.is_floating_point() for tensor in _tensors(values))

    def _clear(self, values: Any) -> None:
        for tensor in _tensors(values):
            if tensor.is_cuda and tensor.numel() <= 4096:
                _alias(tensor).zero_()


def _tensors(values: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _host_setting(name: str, value: Any) -> Any:
    import torch

    if name == "device":
        return torch.device("cpu")
    return False if name == "pin_memory" else _on_host(value)


def _on_host(values: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, _alias, values)


def _alias(tensor: Any) -> Any:
    """A tensor of the CPU over the same memory."""
    import torch

    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    if not storage.nbytes() or not storage.data_ptr():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    alias = torch.empty(0, dtype=tensor.dtype).set_(raw, tensor.storage_offset(), tensor.shape, tensor.stride())
    return torch._neg_view(alias) if tensor.is_neg() else alias


def _on_device(result: Any, device: Any) -> Any:
    """Memory of the device that holds what the CPU has computed."""
    import torch

    if isinstance(result, tuple):
        return tuple(_on_device(each, device) for each in result)
    made = torch.empty(result.shape, dtype=result.dtype, device=device)
    _write(made, result)
    return made


def _write(made: Any, result: Any) -> None:
    import torch

    if isinstance(made, torch.Tensor):
        if isinstance(result, torch.Tensor) and made.is_cuda and made.numel():
            alias = _alias(made)
            if alias.numel() == result.numel():
                result = result.reshape(alias.shape)
            for dim in range(result.ndim):  # log-sums of attention are padded on a device
                alias = alias.narrow(dim, 0, result.shape[dim]) if alias.ndim == result.ndim else alias
            alias.copy_(result)
    elif isinstance(made, list | tuple) and isinstance(result, list | tuple):
        for each, its_result in zip(made, result, strict=False):
            _write(each, its_result)


# Attention: the CPU has one fused kernel, a GPU four, whose arguments stand in other places


def _forward(bias_at: int | None, causal_at: int) -> Callable[..., Any]:
    def attend(query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any) -> Any:
        import torch

        bias = rest[bias_at] if bias_at is not None else None
        causal = rest[causal_at] if len(rest) > causal_at else kwargs.get("is_causal", False)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias, scale=kwargs.get("scale")
        )

    return attend


def _backward(out_at: int, bias_at: int | None, causal_at: int) -> Callable[..., Any]:
    def attend(gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any) -> Any:
        import torch

        out, log_sum = rest[out_at], rest[out_at + 1]
        log_sum = log_sum.reshape(*log_sum.shape[:2], -1)[..., : query.shape[2]].float()
        bias = rest[bias_at] if bias_at is not None else None
        causal = rest[causal_at] if len(rest) > causal_at else kwargs.get("is_causal", False)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, log_sum, 0.0, causal, attn_mask=bias, scale=kwargs.get("scale")
        )

    return attend


def _histogram(values: Any, bins: int = 100, low: float = 0, high: float = 0) -> Any:
    """The CPU's counts no integers."""
    import torch

    return torch.histc(values if values.is_floating_point() else values.double(), bins, low, high).to(values.dtype)


OTHERWISE = {
    "histc": _histogram,
    "_scaled_dot_product_flash_attention": _forward(None, 1),
    "_scaled_dot_product_efficient_attention": _forward(0, 3),
    "_scaled_dot_product_cudnn_attention": _forward(0, 3),
    "_scaled_dot_product_flash_attention_backward": _backward(0, None, 7),
    "_scaled_dot_product_efficient_attention_backward": _backward(1, 0, 7),
    "_scaled_dot_product_cudnn_attention_backward": _backward(0, 4, 10),
}
