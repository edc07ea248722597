"""Tiny causal language models that compute in bfloat16, as transformers loads them in that type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from support.tiny import tiny_config


def save_tiny(kind: str, folder: Path) -> None:
    """Saves a model in float32, none of whose weights bfloat16 could hold."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and ("gate" in name or "router" in name):
            nn.init.normal_(parameter)  # chooses clearly
        elif parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def loaded(folder: Path | str, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.config.use_cache = False
    return model.eval()  # without dropout


def output_types(model: nn.Module) -> dict[str, torch.dtype]:
    """Fills as the model runs: of each module, by its path, the type of its first output."""
    found: dict[str, torch.dtype] = {}

    def look(path: str, output: Any) -> None:
        first = output if torch.is_tensor(output) else next((x for x in output if torch.is_tensor(x)), None)
        if first is not None:
            found.setdefault(path, first.dtype)

    for path, module in model.named_modules():
        if path:  # what leaves the model is float32, so that the loss is

            def hook(_module: nn.Module, _args: Any, output: Any, path: str = path) -> None:
                look(path, output if torch.is_tensor(output) or isinstance(output, tuple | list) else ())

            module.register_forward_hook(hook)
    return found
