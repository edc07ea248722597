"""Builds parameter groups and the optimizer, which may be Muon."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.model.adapters.targets import stacked_experts
from toolkit.optim.muon import Muon
from toolkit.paths import install_command
from toolkit.recipe.schema import OptimizerSection
from toolkit.sharding.blocks.compiling import forget_compiled_steps
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
