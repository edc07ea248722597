"""Runs norms and MLPs of blocks on a few tokens at a time.

A module that treats each token independently does not need a whole row at once. Such a module keeps only its input for
backward. Backward recomputes one chunk, computes its gradients and frees it before the next (TiledMLP of ALST, arXiv
2506.13996). After the attention of a checkpointed block this adds no work to the checkpoint's own: the second forward
of the block stops as soon as the last kept input is known.
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
"""Tokens of a chunk if the plan chooses it. With fewer, a GPU mostly adds to the gradients of the MLP."""


@dataclass
class Chunks:
    """The size of the chunks.

    Attributes:
        tokens: the tokens of a chunk, summed over all rows of a micro-batch.
    """

    tokens: int


def chunked_modules(block: nn.Module) -> list[nn.Module]:
    """Returns the children of a block that can run in chunks: with parameters, one argument and no experts.

    A module that routes tokens to experts counts its tokens, and its routing may depend on all of them. Experts are
    recognised as parameters with three dimensions or as a list of modules.
    """
    return [
        child
        for child in block.children()
        if any(True for _ in child.parameters()) and _takes_one_argument(child) and not _has_experts(child)
    ]


def _takes_one_argument(module: nn.Module) -> bool:
    return len(inspect.signature(type(module).forward).parameters) == 2  # with `self`


def _has_experts(module: nn.Module) -> bool:
    lists = any(isinstance(child, nn.ModuleList) for child in module.modules())
    return lists or any(parameter.ndim > 2 for parameter in module.parameters())


def in_chunks(module: nn.Module, chunks: Chunks) -> None:
    """Makes a module run in chunks whenever its input (B, T, D) has more tokens than a chunk."""
    forward = module.forward

    @functools.wraps(forward)
    def run(hidden: Any) -> Any:
        if not isinstance(hidden, torch.Tensor) or hidden.ndim != 3:
            return forward(hidden)
        size = max(1, chunks.tokens // hidden.shape[0])
        return forward(hidden) if hidden.shape[1] <= size else _run_in_chunks(module, forward, hidden, size)

    run.chunks = chunks  # type: ignore[attr-defined]
    module.forward = run


def _modules_in_chunks(model: nn.Module) -> Iterator[tuple[nn.Module, Chunks]]:
    for module in model.modules():
        chunks = getattr(module.__dict__.get("forward"), "chunks", None)
        if chunks is not None:
            yield module, chunks


def num_mlps_in_chunks(model: nn.Module) -> int:
    """Returns the number of MLPs that run in chunks. Norms are not counted: they have no matrices."""
    return sum(any(p.ndim > 1 for p in module.parameters()) for module, _ in _modules_in_chunks(model))


@contextmanager
def chunks_of(tokens: int, model: nn.Module) -> Iterator[None]:
    """Sets the number of tokens of a chunk inside the `with` block."""
    sizes = [(chunks, chunks.tokens) for _, chunks in _modules_in_chunks(model)]
    for chunks, _ in sizes:
        chunks.tokens = tokens
    try:
        yield
    finally:
        for chunks, size in sizes:
            chunks.tokens = size


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_in_chunks(module: nn.Module, forward: Callable[..., Any], hidden: torch.Tensor, size: int) -> torch.Tensor:
    parameters = _trainable_parameters(module)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (hidden, *parameters)):
        return _forward_in_chunks(forward, hidden, size)
    # Before the first chunk: a checkpoint's second forward goes no further than the last tensor that is kept.
    kept: Any = _SavedInput.apply(torch.empty(0, requires_grad=True), hidden)  # type: ignore[no-untyped-call]
    call = _ChunkedCall(module, forward, size, _rng_and_autocast(hidden), kept)
    output: torch.Tensor = _InChunks.apply(call, hidden, *parameters)  # type: ignore[no-untyped-call]
    return output


def _trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Returns the trainable parameters. Not kept from forward to backward: FSDP2 may gather them again in between."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _forward_in_chunks(forward: Callable[..., Any], hidden: torch.Tensor, size: int) -> torch.Tensor:
    """Runs `forward` on chunks of `hidden` (B, T, D) and returns the whole output (B, T, E)."""
    output: torch.Tensor | None = None
    for tokens in _token_slices(hidden, size):
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


def _token_slices(hidden: torch.Tensor, size: int) -> Iterator[slice]:
    return each_alike([slice(start, min(start + size, hidden.shape[1])) for start in range(0, hidden.shape[1], size)])


def each_alike(slices: Sequence[slice]) -> Iterator[slice]:
    """Yields the slices of a loop over chunks, but only the first, second and last inside `one_for_all_alike`."""
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
    """Runs one chunk in place of all equal ones inside the `with` block. For a plan, which reads no results.

    Args:
        count_as: called with the number of chunks that the next operators stand for.
    """
    global _count_as
    _count_as = count_as
    try:
        yield
    finally:
        _count_as = None


@dataclass(frozen=True)
class _ChunkedCall:
    """A forward that backward recomputes one chunk at a time.

    Attributes:
        size: the number of tokens of a chunk in each row.
        again: returns a context with the random state and the autocast of the first forward.
        kept: a tensor whose autograd node saves the input.
    """

    module: nn.Module
    forward: Callable[..., Any]
    size: int
    again: Callable[[], AbstractContextManager[Any]]
    kept: Any


def _rng_and_autocast(hidden: torch.Tensor) -> Callable[[], AbstractContextManager[Any]]:
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


class _SavedInput(torch.autograd.Function):
    """Saves a tensor for backward as the surrounding checkpoint would; `grad_fn.saved_tensors` returns it."""

    @staticmethod
    def forward(ctx: Any, nothing: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        return nothing.clone()

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> None:
        raise AssertionError("nothing depends on what keeps a tensor")


class _InChunks(torch.autograd.Function):
    """Computes a module's output in chunks. Backward sums each gradient over the chunks and returns it once."""

    @staticmethod
    def forward(ctx: Any, call: _ChunkedCall, hidden: torch.Tensor, *_parameters: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        return _forward_in_chunks(call.forward, hidden, call.size)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _ChunkedCall = ctx.call
        (hidden,) = call.kept.grad_fn.saved_tensors
        del ctx.call
        wanted = ctx.needs_input_grad[1:]
        of_hidden, of_parameters = _chunked_gradients(call, hidden, gradients[0], wanted)
        return None, of_hidden, *of_parameters


def _chunked_gradients(
    call: _ChunkedCall, hidden: torch.Tensor, upstream: torch.Tensor, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Returns the gradient of the input (B, T, D) and those of the trainable parameters. None if not needed.

    Args:
        upstream: the gradient of the output, (B, T, E).
        wanted: whether a gradient is needed, for the input first and then for each parameter.
    """
    parameters = _trainable_parameters(call.module)
    chosen = [number for number, is_wanted in enumerate(wanted[1:]) if is_wanted]
    whole = torch.empty_like(hidden) if wanted[0] else None
    sums: list[torch.Tensor | None] = [None] * len(parameters)
    with call.again():
        for tokens in _token_slices(hidden, call.size):
            chunk = hidden[:, tokens].detach().contiguous().requires_grad_(wanted[0])
            inputs = [*([chunk] if wanted[0] else []), *(parameters[number] for number in chosen)]
            found = list(torch.autograd.grad(call.forward(chunk), inputs, upstream[:, tokens], allow_unused=True))
            if whole is not None:
                whole[:, tokens] = found.pop(0)
            for number, part in zip(chosen, found, strict=True):
                sums[number] = _add_in_float32(sums[number], part)
    return whole, [None if total is None else total.to(p.dtype) for total, p in zip(sums, parameters, strict=True)]


def _add_in_float32(total: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    """Adds in float32: a 16-bit sum over many chunks loses small gradients."""
    if part is None:
        return total
    if total is None:
        return part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
    return total.add_(part)
