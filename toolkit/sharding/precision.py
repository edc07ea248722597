"""What a model's authors keep in float32 where it computes in 16 bits, as transformers loads it in that type.

transformers keeps what `_keep_in_fp32_modules_strict` names (in float16 also `_keep_in_fp32_modules`), and what the
model makes in float32 itself. Buffers are the other way round: they are made in float32 here, and some of them would
meet activations in 16 bits (openai-gpt's mask, minimax's decays).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

LEARNED = "e_score_correction_bias"
"""A buffer that moves by less than bfloat16 tells apart; it is added to scores in float32."""


def types_of_authors(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Type of each floating parameter and buffer where the model computes in `dtype`; empty for a model of no library.

    Names are those of the model, adapters in place; what adapters add is not among them.
    """
    get_base = getattr(model, "get_base_model", None)  # peft's
    base: Any = model if get_base is None else get_base()
    if not hasattr(base, "_from_config"):
        return {}
    # One without weights, as only its making tells in which type a buffer or a parameter is meant to be.
    with torch.device("meta"):
        reference = type(base)._from_config(copy.deepcopy(base.config), dtype=dtype)
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in reference._get_dtype_plan(dtype)]
    meant = {name: tensor.dtype for name, tensor in (*_tensors(reference),)}
    for name in meant:
        if name.endswith(LEARNED) or any(pattern.search(name) for pattern in kept):
            meant[name] = torch.float32
    of_plain = {id(tensor): _plain_name(name) for name, tensor in _tensors(base)}
    return {name: meant[of_plain[id(tensor)]] for name, tensor in _tensors(model) if of_plain.get(id(tensor)) in meant}


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if tensor.is_floating_point():
            yield name, tensor


def _plain_name(name: str) -> str:
    """Without the wrapper that adapters put around a module."""
    return name.replace(".base_layer.", ".")


def kept_in_float32(model: nn.Module, types: dict[str, torch.dtype]) -> list[str]:
    """Names of the floating parameters that stay in float32."""
    return [name for name, _ in model.named_parameters() if types.get(name) == torch.float32]


def hold_in_float32(model: nn.Module, names: list[str]) -> None:
    """Makes parameters float32, the frozen ones too."""
    for name in names:
        parameter = model.get_parameter(name)
        if parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()


def round_buffers(model: nn.Module, types: dict[str, torch.dtype]) -> None:
    """Makes float32 buffers those that transformers would have made in 16 bits.

    What is saved of them stays in float32.
    """
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, buffer in module.named_buffers(recurse=False):
            meant = types.get(prefix + name, buffer.dtype)
            if buffer.dtype == torch.float32 and meant != torch.float32:
                setattr(module, name, buffer.to(meant))
                if name not in module._non_persistent_buffers_set:
                    module.register_state_dict_post_hook(_Unrounded(name, buffer))


class _Unrounded:
    """Puts a buffer as it was before it was rounded into the state of its module."""

    def __init__(self, name: str, buffer: torch.Tensor) -> None:
        self._name, self._buffer = name, buffer

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        now = state.get(prefix + self._name)
        # One that has changed since is what it is.
        if now is not None and torch.equal(now, self._buffer.to(now)):
            state[prefix + self._name] = self._buffer
