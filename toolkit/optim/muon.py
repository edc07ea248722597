"""Muon for sharded matrices (Jordan et al., "Muon", 2024; arXiv 2502.16982), and AdamW for other parameters.

Newton-Schulz needs whole matrices. F matrices at a time are distributed to the F ranks of the shard group: one
all-to-all makes each rank's matrix whole, each rank orthogonalises its own, and one all-to-all brings the rows
back. So a rank computes 1 / F of the work, and no rank holds more than one whole matrix.

Experts' stacked matrices (experts, rows, columns) are mostly sharded by experts: each rank has whole ones, and nothing
is exchanged. Stacks that are sharded by rows are distributed as matrices are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.sharding.fsdp2.shards import local_tensor, row_counts, shard_group, sharded_dim
from toolkit.sharding.parallel.sequence_parallel import all_to_all


class Muon(torch.optim.AdamW):
    """AdamW whose groups with `muon: True` hold matrices, or stacks of them, each stepped as in torch.optim.Muon.

    The update's length is matched to AdamW's (`match_rms_adamw`), so that both take one learning rate.

    Args:
        params: groups, each with the key `muon`.
        momentum: momentum of the matrices, with Nesterov's look-ahead.
    """

    def __init__(self, params: Iterable[dict[str, Any]], *, momentum: float, **settings: Any) -> None:
        super().__init__(params, fused=True, **settings)
        self.momentum = momentum
        # A gradient scaler lets fused optimizers skip steps themselves; it has to skip a step of this one as a whole.
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes one step. Collective: a matrix must have a gradient on every rank or on none."""
        # Matrices first: their gradients are dropped, so AdamW's step skips them.
        for group in self.param_groups:
            if group["muon"]:
                self._step_matrices(group)
        return super().step(closure)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        present = [parameter for parameter in group["params"] if parameter.grad is not None]
        split = [parameter for parameter in present if not _has_whole_experts(parameter)]
        # AdamW, which steps next, skips parameters without a gradient.
        changes = (self._momentum_of(parameter) for parameter in split)
        self._apply_updates(group, zip(split, orthogonalised(split, changes), strict=True))
        stacks = (parameter for parameter in present if _has_whole_experts(parameter))
        self._apply_updates(group, ((stack, _each_orthogonalised(self._momentum_of(stack))) for stack in stacks))

    def _apply_updates(self, group: dict[str, Any], updates: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        for parameter, update in updates:
            local = local_tensor(parameter)
            # Decoupled and before the update, as in torch.optim.Muon.
            local.mul_(1 - float(group["lr"]) * group["weight_decay"])
            local.add_(update.to(local.dtype), alpha=float(group["lr"]))

    def _momentum_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns this rank's rows of the Nesterov momentum, in the local shard's shape; the gradient is dropped."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        parameter.grad = None
        mean = local_tensor(state["momentum_buffer"])
        rows = local_tensor(gradient)
        mean.lerp_(rows, 1 - self.momentum)
        return rows.lerp(mean, self.momentum)


def _has_whole_experts(parameter: nn.Parameter) -> bool:
    return parameter.ndim == 3 and (not isinstance(parameter, DTensor) or sharded_dim(parameter) == 0)


def orthogonalised(parameters: list[nn.Parameter], rows: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields this rank's rows of each parameter's update at a learning rate of 1, to be added. Collective.

    Args:
        parameters: matrices (rows, columns) or stacks (experts, rows, columns).
        rows: this rank's rows ((experts,) rows of the shard, columns) of each parameter's momentum.
    """
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if not sharded:
        yield from (newton_schulz(whole) for whole in rows)
        return
    # The matrices of a stack come one after another, too.
    matrices = [parameter for parameter in sharded for _ in range(_num_matrices(parameter))]
    updates = _updates_in_turns(
        matrices, (matrix for part in rows for matrix in (part if part.ndim == 3 else part[None]))
    )
    for parameter in sharded:
        found = [next(updates) for _ in range(_num_matrices(parameter))]
        yield found[0] if parameter.ndim == 2 else torch.stack(found)


def _num_matrices(parameter: DTensor) -> int:
    return 1 if parameter.ndim == 2 else parameter.shape[0]


def _updates_in_turns(matrices: Sequence[DTensor], rows: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields this rank's rows of the update of each matrix; `matrices` give the shapes."""
    group = shard_group(matrices[0])
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    for start in range(0, len(matrices), size):
        dealt = matrices[start : start + size]
        mine = [next(rows) for _ in dealt]
        # The last round may be short: ranks without a matrix get nothing, but take part in both exchanges.
        there = [tensor.numel() for tensor in mine] + [0] * (size - len(dealt))
        here = [0] * size
        if rank < len(dealt):
            here = [count * dealt[rank].shape[-1] for count in row_counts(dealt[rank])]
        flat = all_to_all(torch.cat([tensor.flatten() for tensor in mine]), there, here, group)
        if rank < len(dealt):
            flat = newton_schulz(flat.view(dealt[rank].shape[-2:])).flatten()
        back = all_to_all(flat, here, there, group)
        yield from (part.view_as(old) for part, old in zip(torch.split(back, there[: len(mine)]), mine, strict=True))


def _each_orthogonalised(stack: torch.Tensor) -> torch.Tensor:
    """Returns the update of this rank's experts, (experts, rows, columns); it may have none."""
    return torch.stack([newton_schulz(matrix) for matrix in stack]) if len(stack) else stack


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Returns what torch.optim.Muon adds for a whole matrix: a step from zero, without momentum or decay.

    Args:
        matrix: (rows, columns); the result has its shape, dtype and device.
    """
    found = nn.Parameter(torch.zeros_like(matrix))
    found.grad = matrix
    once = torch.optim.Muon(
        [found], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
    )
    once.step()  # type: ignore[no-untyped-call]
    return found.detach()
