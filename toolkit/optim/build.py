"""Builds parameter groups and the optimizer, which may be Muon."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.model.adapters.targets import stacked_experts
from toolkit.paths import install_command
from toolkit.recipe.schema import OptimizerSection
from toolkit.sharding.blocks.compiling import forget_compiled_steps
from toolkit.sharding.fsdp2.shards import local_tensor, row_counts, shard_group, sharded_dim
from toolkit.sharding.parallel.sequence_parallel import all_to_all
from toolkit.sharding.plan.unit_plan import UnitPlan
from toolkit.sharding.plan.units import plan_units

DEFAULT_MOMENTUM = 0.95
"""Default momentum of muon, as in torch.optim.Muon."""

QUANTISED = {"adamw_8bit": "AdamW8bit", "adamw_4bit": "AdamW4bit", "adamw_fp8": "AdamWFp8"}
"""Kind of optimizer -> its class in torchao.optim."""


def build_optimizer(
    model: nn.Module, section: OptimizerSection, unit_classes: Sequence[str] | None = None
) -> torch.optim.Optimizer:
    """Returns the recipe's optimizer over the trainable parameters.

    AdamW (arXiv 1711.05101) is fused: foreach is 4 times slower on CPU.

    Args:
        unit_classes: as for `plan_units`, which finds the blocks for muon.

    Raises:
        BadInputError: if the optimizer is not installed, or a setting has no effect; see `parameter_groups`.
    """
    groups = parameter_groups(model, section)
    settings: dict[str, Any] = {
        "lr": section.learning_rate,
        "betas": (section.beta1, section.beta2),
        "eps": section.eps,
    }
    if section.kind in QUANTISED:
        optimizer: torch.optim.Optimizer = _quantised_class(section.kind)(groups, **settings)
        return optimizer
    if section.kind == "muon":
        momentum = DEFAULT_MOMENTUM if section.momentum is None else section.momentum
        return Muon(_with_block_matrices_apart(model, groups, unit_classes), momentum=momentum, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)


def _quantised_class(kind: str) -> Any:
    forget_compiled_steps()
    try:
        return getattr(importlib.import_module("torchao.optim"), QUANTISED[kind])
    except (ImportError, AttributeError) as error:
        raise BadInputError(
            f"optimizer.kind: {kind} needs torchao ({error}); {install_command('torchao')}, or set optimizer.kind=adamw"
        ) from error


def _with_block_matrices_apart(
    model: nn.Module, groups: list[dict[str, Any]], unit_classes: Sequence[str] | None
) -> list[dict[str, Any]]:
    """Returns the groups, with the blocks' matrices in groups of their own, marked `muon`.

    AdamW still steps embeddings, head and vectors (Jordan et al., "Muon", 2024), and the kernels of convolutions.
    """
    within = {id(parameter) for parameter in block_matrices(model, plan_units(model, unit_classes))}
    apart: list[dict[str, Any]] = []
    for group in groups:
        for muon in (True, False):
            chosen = [parameter for parameter in group["params"] if (id(parameter) in within) is muon]
            apart += [{**group, "params": chosen, "muon": muon}] if chosen else []
    return apart


def block_matrices(model: nn.Module, plan: UnitPlan) -> list[nn.Parameter]:
    """Returns the parameters that muon steps: the blocks' matrices and stacked experts, trained or not."""
    base: Any = base_of(model)
    experts = stacked_experts(base) if hasattr(base, "config") else []
    stacks = {id(base.get_parameter(name)) for name in experts}
    blocks = [model.get_submodule(path) for unit in plan.blocks for path in unit.modules]
    decaying = matrices(model)
    found = [p for block in blocks for p in block.parameters() if id(p) in decaying]
    return [p for p in found if p.ndim == 2 or id(p) in stacks]


def matrices(model: nn.Module) -> set[int]:
    """Returns the ids of the parameters of two or more dimensions, without stacked biases and norms."""
    return {
        id(parameter)
        for owner in model.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if parameter.ndim >= 2 and not name.endswith("bias") and "Norm" not in type(owner).__name__
    }


def parameter_groups(model: nn.Module, section: OptimizerSection) -> list[dict[str, Any]]:
    """Returns parameter groups: matrices, which decay, and vectors (biases and norms), which do not.

    Parameters with a rate of their own get groups of their own. Empty groups are left out.

    Raises:
        BadInputError: if the recipe sets a rate that no trained parameter takes.
    """
    apart: dict[str | None, list[nn.Parameter]] = {pattern: [] for pattern in (None, *section.learning_rates)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            apart[next((one for one in section.learning_rates if fnmatchcase(name, one)), None)].append(parameter)
    decaying, groups = matrices(model), list[dict[str, Any]]()
    for pattern, parameters in apart.items():
        if pattern is not None and not parameters:
            raise BadInputError(
                f"optimizer.learning_rates: {pattern!r} matches no trained parameter that no pattern before it does, "
                f"of names such as {next(iter(dict(model.named_parameters())))!r}; correct it, or remove it"
            )
        rate = {} if pattern is None else {"lr": section.learning_rates[pattern]}
        for decays, decay in ((True, section.weight_decay), (False, 0.0)):
            chosen = [parameter for parameter in parameters if (id(parameter) in decaying) is decays]
            groups.append({"params": chosen, "weight_decay": decay, **rate})
    return [group for group in groups if group["params"]]


# ---- Muon for sharded matrices (Jordan et al., "Muon", 2024; arXiv 2502.16982), and AdamW for other parameters ----
# Newton-Schulz needs whole matrices. F matrices at a time are distributed to the F ranks of the shard group: one
# all-to-all makes each rank's matrix whole, each rank orthogonalises its own, and one all-to-all brings the rows
# back. So a rank computes 1 / F of the work, and no rank holds more than one whole matrix.
#
# Experts' stacked matrices (experts, rows, columns) are mostly sharded by experts: each rank has whole ones, and
# nothing is exchanged. Stacks that are sharded by rows are distributed as matrices are.


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
