"""The routers of a mixture of experts, found by what transformers records of a model: `router_logits`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils.output_capturing import OutputRecorder

from toolkit.model.adapters import base_of

BIAS = "e_score_correction_bias"
"""The buffer that DeepSeek V3 and its kin add to a router's scores before they choose (arXiv 2412.19437)."""

CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
"""What configurations call the number of experts of a token."""


@dataclass(frozen=True)
class Router:
    """A module that chooses experts for tokens.

    Attributes:
        path: dotted.
        index: where its logits stand among its outputs; they are (..., experts).
        top_k: experts of a token, where its outputs do not say which these are.
    """

    path: str
    module: nn.Module
    index: int
    top_k: int

    @property
    def bias(self) -> torch.Tensor | None:
        """What is added to its scores before experts are chosen, (experts,); None: nothing.

        Looked up anew: a buffer is another tensor once the model has its weights.
        """
        return next((tensor for name, tensor in self.module.named_buffers() if name.endswith(BIAS)), None)

    def logits(self, output: Any) -> torch.Tensor:
        """Its logits, (tokens, experts)."""
        logits: torch.Tensor = output if torch.is_tensor(output) else output[self.index]
        return logits.flatten(0, -2)

    def chosen(self, output: Any) -> torch.Tensor:
        """The experts of each token, (tokens, k)."""
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
    """The model's routers, in the order of its modules; none where it has no experts."""
    base: Any = base_of(model)
    config: Any = getattr(base, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found: dict[int, Router] = {}
    for path, module, index in _recorded(base):
        found.setdefault(id(module), Router(path, module, index, experts_of_a_token(text, path)))
    return list(found.values())


def experts_of_a_token(config: Any, path: str) -> int:
    """How many experts a token has in the layer that a path names, by the model's configuration."""
    value = next((value for name in CHOSEN if (value := getattr(config, name, None))), 1)
    if not isinstance(value, list | tuple):
        return int(value)
    # HunYuan's may list a number for each layer.
    layer = next(int(part) for part in path.split(".") if part.isdecimal())
    return int(value[layer])


def own_coefficient(model: nn.Module) -> float | None:
    """`router_aux_loss_coef` of the model's configuration; None where it has no balance loss of its own."""
    config: Any = getattr(base_of(model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    value = getattr(text, "router_aux_loss_coef", None)
    return None if value is None else float(value)


def _recorded(base: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Path, module and the logits' index for each module whose router logits transformers records."""
    names = {id(module): path for path, module in base.named_modules()}
    for owner in base.modules():
        told = (getattr(owner, "_can_record_outputs", None) or {}).get("router_logits", [])
        for recorder in told if isinstance(told, list) else [told]:
            kind, index, layer = _spelled_out(recorder)
            for path, module in owner.named_modules():
                # An adapter that trains a router whole keeps the one of before, which no longer runs.
                replaced = path.endswith(".original_module")
                if isinstance(module, kind) and (layer is None or layer in path) and not replaced:
                    yield names[id(module)], module, index


def _spelled_out(recorder: Any) -> tuple[Any, int, str | None]:
    """Class, index and part of the path. A bare class stands for the second output, as in transformers."""
    if isinstance(recorder, OutputRecorder):
        return recorder.target_class, recorder.index, recorder.layer_name
    return recorder, 1, None
