"""Probes a state space layer by a few tokens of each row, and counts the others.

Without the kernel of `mamba_ssm`, the layers of Mamba, Falcon-Mamba, Jamba and Zamba loop over the tokens of a row.
Each takes about 30 operators, and 15 ms of a probe. The first and the last tokens run. All between are alike: one of
them runs, and a tensor stands for what the others keep for backward.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.planning.memory.fake import Ledger

SCAN = "mamba_selective_scan"
"""Name of transformers' function in each of these models' files."""

ENDS = 4
"""Tokens that run at each end of a row: the first keep and the last accumulate other tensors than those between."""


@contextmanager
def few_tokens(model: nn.Module, ledger: Ledger) -> Iterator[None]:
    """Runs few tokens in place of all inside the `with` block. For a plan, which reads no results.

    Args:
        ledger: open inside the `with` block.
    """
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    originals = {file: vars(file)[SCAN] for file in files if SCAN in vars(file)}
    for file, scan in originals.items():
        setattr(file, SCAN, functools.partial(_scan, scan, ledger))
    try:
        yield
    finally:
        for file, scan in originals.items():
            setattr(file, SCAN, scan)


def _run_one(step: Callable[[], torch.Tensor], tokens: int, ledger: Ledger) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs one token for `tokens` alike; returns its output (B, I), and the other tokens' outputs (B, I, `tokens` - 1).

    Outputs stay until the scan returns, what backward needs until the backward of this step begins.
    """
    before = ledger.current
    output = step()
    kept = ledger.current - before
    before = ledger.current
    outputs = torch.empty_like(output)
    size = ledger.current - before
    outputs = torch.empty((tokens - 1) * size, dtype=torch.uint8, device=output.device).view(output.dtype)
    outputs = outputs[: (tokens - 1) * output.numel()].view(*output.shape, -1)
    # One element of it: a checkpoint compares shapes, and keeps nothing in its first forward.
    states = torch.empty(max(1, (tokens - 1) * (kept - size)), dtype=torch.uint8, device=output.device)[:1]
    return _Keep.apply(output, states), outputs  # type: ignore[no-untyped-call]


class _Keep(torch.autograd.Function):
    """Passes a tensor on, and keeps another until the gradient is there."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(kept)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # read: a checkpoint holds what is not
        return gradient, None


def _scan(
    scan: Callable[..., Any],
    ledger: Ledger,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    **given: Any,
) -> Any:
    """Does as transformers' function on `hidden_states` and `dt` (B, I, T), `a` (I, S), `b` and `c` (B, S, T)."""
    num_rows, width, num_tokens = hidden_states.shape
    if given.get("use_mambapy") or given.get("return_last_state") or num_tokens <= 2 * ENDS + 1:
        return scan(hidden_states, dt, a, b, c, **given)
    dtype, bias = hidden_states.dtype, given.get("delta_bias")
    if bias is not None:
        dt = dt + bias.to(dt.dtype)[..., None]
    if given.get("delta_softplus"):
        dt = F.softplus(dt)
    b, c = b.transpose(1, 2), c.transpose(1, 2)
    decay = torch.exp(a[None, :, None, :] * dt[:, :, :, None])
    discrete_b = dt[:, :, :, None] * b[:, None, :, :].float()  # kept to the end, as there
    inputs = discrete_b * hidden_states[:, :, :, None].float()
    state = torch.zeros(num_rows, width, a.shape[-1], dtype=dtype, device=hidden_states.device)

    def step(index: int) -> torch.Tensor:
        nonlocal state
        state = decay[:, :, index] * state + inputs[:, :, index]
        output = torch.matmul(state.to(dtype), c[:, index, :].unsqueeze(-1))
        return output[:, :, 0]

    outputs = [step(index) for index in range(ENDS)]
    output, like_it = _run_one(functools.partial(step, ENDS), num_tokens - 2 * ENDS, ledger)
    outputs += [output, *(step(index) for index in range(num_tokens - ENDS, num_tokens))]
    # As costly as a stack of all.
    scanned = torch.cat([*(output[:, :, None] for output in outputs), like_it], dim=-1)
    if (skip := given.get("D")) is not None:
        scanned = scanned + hidden_states * skip[None, :, None]
    return scanned if (gate := given.get("z")) is None else scanned * F.silu(gate)
