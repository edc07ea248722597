"""Builds parameter groups and the optimizer."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.model.adapters.targets import stacked_experts
from toolkit.model.routers import find_routers
from toolkit.model.structure.model_parts import PROJECTOR, VISION, parts_of
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

    Parts with a rate or decay of their own get groups of their own. Empty groups are left out.

    Raises:
        BadInputError: if the recipe sets a rate or decay for a part that is not trained, or does not exist.
    """
    apart = _settings_of_their_own(model, section)
    with_own = {id(parameter) for parameters, _ in apart for parameter in parameters}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rest: Any = ([parameter for parameter in trained if id(parameter) not in with_own], {})
    decaying, groups = matrices(model), []
    for parameters, settings in (rest, *apart):
        decay = {"weight_decay": section.weight_decay, **settings}
        groups.append({"params": [p for p in parameters if id(p) in decaying], **decay})
        groups.append({"params": [p for p in parameters if id(p) not in decaying], **decay, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def _settings_of_their_own(
    model: nn.Module, section: OptimizerSection
) -> list[tuple[list[nn.Parameter], dict[str, float]]]:
    """Returns trained parameters with a rate or decay of their own, and these settings.

    Raises:
        BadInputError: if a setting has no such parameters.
    """
    found = []
    for prefix, what in (("router", "no router"), (PROJECTOR, "no projector"), (VISION, "no vision tower")):
        fields = {"lr": f"{prefix}_learning_rate", "weight_decay": f"{prefix}_weight_decay"}
        given = {key: getattr(section, field, None) for key, field in fields.items()}
        settings = {key: float(value) for key, value in given.items() if value is not None}
        if not settings:
            continue
        parameters = [parameter for parameter in _parameters_of(model, prefix) if parameter.requires_grad]
        if not parameters:
            field = fields[next(iter(settings))]
            raise BadInputError(
                f"optimizer.{field}: {getattr(section, field)} has no effect: {what} of the model is trained; remove it"
            )
        found.append((parameters, settings))
    return found


def _parameters_of(model: nn.Module, what: str) -> list[nn.Parameter]:
    """Returns the parameters of all routers, or of a part in words of `model.train`."""
    base = base_of(model)
    if what == "router":
        return [parameter for router in find_routers(model) for parameter in router.module.parameters()]
    return [base.get_parameter(name) for name, part in parts_of(base).items() if part == what]
