"""Finds the routers of a mixture of experts by the outputs that transformers records: `router_logits`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils.output_capturing import OutputRecorder

from toolkit.model.adapters.adapters import base_of

BIAS = "e_score_correction_bias"
"""The buffer that DeepSeek V3 and its kin add to a router's scores before they choose (arXiv 2412.19437)."""

CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
"""Names of the number of experts of a token in configurations."""

OWN_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Names of the coefficient of a model's own balance loss in configurations; the second is JetMoE's."""

_EXPERTS = re.compile(r"expert|moe(block)?$", re.IGNORECASE)
"""Classes of experts, or of layers with experts. Dense layers of such a family only begin with its name."""


@dataclass(frozen=True)
class Router:
    """A module that chooses experts for tokens.

    Attributes:
        path: dotted path.
        index: index of its logits, (..., experts), among its outputs.
        top_k: number of experts of a token, if the outputs do not name them.
    """

    path: str
    module: nn.Module
    index: int
    top_k: int

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of its scores before experts are chosen, (experts,), or None.

        It is read at each call: a buffer is another tensor once the model has its weights.
        """
        return next((tensor for name, tensor in self.module.named_buffers() if name.endswith(BIAS)), None)

    def logits(self, output: Any) -> torch.Tensor:
        """Returns its logits, (tokens, experts)."""
        logits: torch.Tensor = output if torch.is_tensor(output) else output[self.index]
        return logits.flatten(0, -2)

    def chosen(self, output: Any) -> torch.Tensor:
        """Returns the experts of each token, (tokens, k)."""
        logits = self.logits(output)
        parts = () if torch.is_tensor(output) else output
        for part in parts:
            # Some routers sort their tokens by expert, and give indices of one dimension.
            if torch.is_tensor(part) and part.dtype == torch.long and part.ndim >= 2:
                found = part.flatten(0, -2)
                if len(found) == len(logits):
                    return found
        # Detached: torch saves indices for a backward, which the second forward of a checkpointed block has not.
        return logits.detach().topk(self.top_k, dim=-1).indices


def find_routers(model: nn.Module) -> list[Router]:
    """Returns the model's routers, in the order of its modules; none for a model without experts."""
    base: Any = base_of(model)
    config: Any = getattr(base, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found: dict[int, Router] = {}
    for path, module, index in _recorded_modules(base):
        found.setdefault(id(module), Router(path, module, index, experts_of_a_token(text, path)))
    return list(found.values())


def experts_of_a_token(config: Any, path: str) -> int:
    """Returns the number of experts of a token in the layer of a path, by the model's configuration."""
    value = next((value for name in CHOSEN if (value := getattr(config, name, None))), 1)
    if not isinstance(value, list | tuple):
        return int(value)
    # HunYuan's may list a number for each layer.
    layer = next(int(part) for part in path.split(".") if part.isdecimal())
    return int(value[layer])


def own_coefficient(model: nn.Module) -> float | None:
    """Returns the coefficient of the balance loss in the model's configuration; None if it has no balance loss."""
    config: Any = getattr(base_of(model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = (getattr(text, name, None) for name in OWN_COEFFICIENTS)
    value = next((value for value in found if value is not None), None)
    return None if value is None else float(value)


def has_experts(model: nn.Module) -> bool:
    """Returns whether a model has experts, by the names of its classes: its routers may not be found."""
    return any(_EXPERTS.search(type(module).__name__) for module in base_of(model).modules())


def _recorded_modules(base: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yields path, module and index of the logits for each module whose router logits transformers records."""
    names = {id(module): path for path, module in base.named_modules()}
    for owner in base.modules():
        recorders = getattr(owner, "can_record_outputs", {}).get("router_logits", [])
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            kind, index, layer = _spelled_out(recorder)
            for path, module in owner.named_modules():
                # An adapter that trains a router whole keeps the one of before, which no longer runs.
                replaced = path.endswith(".original_module")
                if isinstance(module, kind) and (layer is None or layer in path) and not replaced:
                    yield names[id(module)], module, index


def _spelled_out(recorder: Any) -> tuple[Any, int, str | None]:
    """Returns class, index and part of the path. A bare class stands for the second output, as in transformers."""
    if isinstance(recorder, OutputRecorder):
        return recorder.target_class, recorder.index, recorder.layer_name
    return recorder, 1, None
