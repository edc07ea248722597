"""Norms and MLPs of blocks for a few tokens at a time.

What treats each token for itself needs no whole row at once. Such a module keeps its input alone; backward makes each
chunk again, takes its gradients, and lets go of it before the next (TiledMLP of ALST, arXiv 2506.13996). Behind a
checkpointed block's attention this costs no more work than the checkpoint does: the second forward of the block ends
where the last input is known.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import get_device_states, set_device_states

from toolkit.errors import BadInputError

CHUNK_TOKENS = 8192
"""Of a chunk that the plan chooses. With fewer, a GPU spends its time on adding to the gradients of the MLP."""


@dataclass
class Chunks:
    """How many tokens a chunk has, of all rows of a micro-batch together."""

    tokens: int


def chunked_modules(block: nn.Module) -> list[nn.Module]:
    """Children of a block that may run in chunks: they have parameters, take one argument, and choose no experts.

    What chooses experts counts its tokens, and may move its choice by all of them. Experts are matrices of three
    dimensions, or a list of modules.
    """
    return [
        child
        for child in block.children()
        if any(True for _ in child.parameters()) and _takes_one(child) and not _has_experts(child)
    ]


def _takes_one(module: nn.Module) -> bool:
    return len(inspect.signature(type(module).forward).parameters) == 2  # with `self`


def _has_experts(module: nn.Module) -> bool:
    lists = any(isinstance(child, nn.ModuleList) for child in module.modules())
    return lists or any(parameter.ndim > 2 for parameter in module.parameters())


def in_chunks(module: nn.Module, chunks: Chunks) -> None:
    """Has a module run in chunks wherever it is called with a tensor (B, T, D) that is longer than one."""
    forward = module.forward

    @functools.wraps(forward)
    def run(hidden: Any) -> Any:
        if not isinstance(hidden, torch.Tensor) or hidden.ndim != 3:
            return forward(hidden)
        size = max(1, chunks.tokens // hidden.shape[0])
        return forward(hidden) if hidden.shape[1] <= size else _run(module, forward, hidden, size)

    run.chunks = chunks  # type: ignore[attr-defined]
    module.forward = run


def _running_in_chunks(model: nn.Module) -> Iterator[tuple[nn.Module, Chunks]]:
    for module in model.modules():
        chunks = getattr(module.__dict__.get("forward"), "chunks", None)
        if chunks is not None:
            yield module, chunks


def num_mlps_in_chunks(model: nn.Module) -> int:
    """Modules with matrices, which norms have none of."""
    return sum(any(p.ndim > 1 for p in module.parameters()) for module, _ in _running_in_chunks(model))


@contextmanager
def chunks_of(tokens: int, model: nn.Module) -> Iterator[None]:
    """Inside, what runs in chunks has them of another size."""
    sizes = [(chunks, chunks.tokens) for _, chunks in _running_in_chunks(model)]
    for chunks, _ in sizes:
        chunks.tokens = tokens
    try:
        yield
    finally:
        for chunks, size in sizes:
            chunks.tokens = size


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(module: nn.Module, forward: Callable[..., Any], hidden: torch.Tensor, size: int) -> torch.Tensor:
    parameters = _trained(module)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (hidden, *parameters)):
        return _forward(forward, hidden, size)
    # Before the first chunk: a checkpoint's second forward goes no further than the last tensor that is kept.
    kept: Any = _Kept.apply(torch.empty(0, requires_grad=True), hidden)  # type: ignore[no-untyped-call]
    call = _Call(module, forward, size, _surroundings(hidden), kept)
    output: torch.Tensor = _InChunks.apply(call, hidden, *parameters)  # type: ignore[no-untyped-call]
    return output


def _trained(module: nn.Module) -> list[nn.Parameter]:
    """Not kept from forward to backward: FSDP2 may gather them anew in between."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _forward(forward: Callable[..., Any], hidden: torch.Tensor, size: int) -> torch.Tensor:
    """The module's output, (B, T, E)."""
    output: torch.Tensor | None = None
    for tokens in _slices(hidden, size):
        chunk = hidden[:, tokens].contiguous()  # GPT-2's layers take views of their inputs
        part = forward(chunk)
        if not isinstance(part, torch.Tensor) or part.shape[:2] != chunk.shape[:2]:
            raise BadInputError(
                "sharding.chunk_tokens: what a module of a block returns is not a tensor of its input's rows and "
                "tokens; remove sharding.chunk_tokens"
            )
        if output is None:
            output = part.new_empty(*hidden.shape[:2], *part.shape[2:])
        output[:, tokens] = part
    assert output is not None
    return output


def _slices(hidden: torch.Tensor, size: int) -> Iterator[slice]:
    return each_alike([slice(start, min(start + size, hidden.shape[1])) for start in range(0, hidden.shape[1], size)])


def each_alike(slices: Sequence[slice]) -> Iterator[slice]:
    """The chunks of a loop; inside `one_for_all_alike` the first, one for those between, and the last."""
    if _count_as is None or len(slices) <= 3:
        yield from slices
        return
    # The first makes the sums that the others add to, and the last may be shorter.
    for chosen, times in ((slices[0], 1), (slices[1], len(slices) - 2), (slices[-1], 1)):
        _count_as(times)
        yield chosen
    _count_as(1)


_count_as: Callable[[int], None] | None = None


@contextmanager
def one_for_all_alike(count_as: Callable[[int], None]) -> Iterator[None]:
    """Inside, one chunk runs for all that are like it; for forwards whose results nobody reads, as a plan's.

    Args:
        count_as: told for how many chunks the next operators stand.
    """
    global _count_as
    _count_as = count_as
    try:
        yield
    finally:
        _count_as = None


@dataclass(frozen=True)
class _Call:
    """A forward that backward makes again, a chunk at a time.

    Attributes:
        size: tokens of a chunk.
        again: a context with the random numbers and the autocast of the first forward.
        kept: a tensor whose node saves the input; torch 2.11 frees what is saved where the node alone is held.
    """

    module: nn.Module
    forward: Callable[..., Any]
    size: int
    again: Callable[[], AbstractContextManager[Any]]
    kept: Any


def _surroundings(hidden: torch.Tensor) -> Callable[[], AbstractContextManager[Any]]:
    kind = hidden.device.type
    random, (devices, states) = torch.get_rng_state(), get_device_states(hidden)
    dtype, is_on = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def again() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(torch.random.fork_rng(devices=devices, device_type=kind if devices else "cuda"))
        stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on))
        stack.enter_context(torch.enable_grad())
        torch.set_rng_state(random)
        if devices:
            set_device_states(devices, states, device_type=kind)
        return stack

    return again


class _Kept(torch.autograd.Function):
    """Keeps a tensor where the checkpoint around it would: `grad_fn.saved_tensors` gives it back."""

    @staticmethod
    def forward(ctx: Any, nothing: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        return nothing.clone()

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> None:
        raise AssertionError("nothing depends on what keeps a tensor")


class _InChunks(torch.autograd.Function):
    """A module's output of chunks; each gradient is the sum of the chunks', and reaches its parameter once."""

    @staticmethod
    def forward(ctx: Any, call: _Call, hidden: torch.Tensor, *_parameters: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        return _forward(call.forward, hidden, call.size)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        (hidden,) = call.kept.grad_fn.saved_tensors
        del ctx.call
        wanted = ctx.needs_input_grad[1:]
        of_hidden, of_parameters = _gradients(call, hidden, gradients[0], wanted)
        return None, of_hidden, *of_parameters


def _gradients(
    call: _Call, hidden: torch.Tensor, upstream: torch.Tensor, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Of the input, (B, T, D), and of each trained parameter; None: not wanted, the input first."""
    parameters = _trained(call.module)
    chosen = [number for number, is_wanted in enumerate(wanted[1:]) if is_wanted]
    whole = torch.empty_like(hidden) if wanted[0] else None
    sums: list[torch.Tensor | None] = [None] * len(parameters)
    with call.again():
        for tokens in _slices(hidden, call.size):
            chunk = hidden[:, tokens].detach().contiguous().requires_grad_(wanted[0])
            inputs = [*([chunk] if wanted[0] else []), *(parameters[number] for number in chosen)]
            found = list(torch.autograd.grad(call.forward(chunk), inputs, upstream[:, tokens], allow_unused=True))
            if whole is not None:
                whole[:, tokens] = found.pop(0)
            for number, part in zip(chosen, found, strict=True):
                sums[number] = _added(sums[number], part)
    return whole, [None if total is None else total.to(p.dtype) for total, p in zip(sums, parameters, strict=True)]


def _added(total: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    """In float32: sums of many chunks in 16 bits lose what small gradients add."""
    if part is None:
        return total
    if total is None:
        return part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
    return total.add_(part)
