"""Finds what stays in float32 when a model computes in 16 bits, as if transformers had loaded it in that type.

transformers keeps the parameters that `_keep_in_fp32_modules_strict` names (in float16 also `_keep_in_fp32_modules`),
and those that the model itself creates in float32. Buffers are the opposite case: here they are created in float32, and
some of them must be rounded because they meet 16-bit activations (openai-gpt's mask, minimax's decays).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

LEARNED = "e_score_correction_bias"
"""A buffer that changes by less than bfloat16 resolves. It is added to scores in float32."""


def types_of_authors(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Returns the dtype of each floating-point parameter and buffer, by name, if the model computes in `dtype`.

    The names are those of the model with its adapters. Tensors that adapters add are left out. Returns an empty dict
    for a model that is not from transformers.
    """
    get_base = getattr(model, "get_base_model", None)  # peft's
    base: Any = model if get_base is None else get_base()
    if not hasattr(base, "_from_config"):
        return {}
    meant = _types_when_built(type(base), base.config, dtype)
    # Names without the wrapper that peft puts around a module.
    of_plain = {id(tensor): name.replace(".base_layer.", ".") for name, tensor in _float_tensors(base)}
    return {
        name: meant[of_plain[id(tensor)]] for name, tensor in _float_tensors(model) if of_plain.get(id(tensor)) in meant
    }


def _types_when_built(kind: Any, config: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Returns the dtype of each floating-point tensor of a model of this class, by name."""
    key = (kind, repr(config.to_dict()), dtype)
    if key not in _built:
        # A model without weights: only its construction shows the intended type of a buffer or a parameter.
        with torch.device("meta"):
            reference = kind._from_config(copy.deepcopy(config), dtype=dtype, attn_implementation="eager")
        kept = [re.compile(pattern.replace("*", ".*")) for pattern in reference._get_dtype_plan(dtype)]
        meant = {name: tensor.dtype for name, tensor in _float_tensors(reference)}
        for name in meant:
            if name.endswith(LEARNED) or any(pattern.search(name) for pattern in kept):
                meant[name] = torch.float32
        _built.clear()  # of one model: a plan asks a dozen times, of 126 layers each 0.1 s
        _built[key] = meant
    return _built[key]


_built: dict[tuple[Any, str, torch.dtype], dict[str, torch.dtype]] = {}
"""The last answer of `_types_when_built`."""


def _float_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if tensor.is_floating_point():
            yield name, tensor


def kept_in_float32(model: nn.Module, types: dict[str, torch.dtype]) -> list[str]:
    """Returns the names of the floating-point parameters that stay in float32."""
    return [name for name, _ in model.named_parameters() if types.get(name) == torch.float32]


def hold_in_float32(model: nn.Module, names: list[str]) -> None:
    """Converts the named parameters to float32, frozen ones included."""
    for name in names:
        parameter = model.get_parameter(name)
        if parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()


def round_buffers(model: nn.Module, types: dict[str, torch.dtype]) -> None:
    """Rounds the float32 buffers that transformers would have created in 16 bits.

    The state dict still holds their float32 values.
    """
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, buffer in module.named_buffers(recurse=False):
            meant = types.get(prefix + name, buffer.dtype)
            if buffer.dtype == torch.float32 and meant != torch.float32:
                setattr(module, name, buffer.to(meant))
                if name not in module._non_persistent_buffers_set:
                    module.register_state_dict_post_hook(_SaveUnrounded(name, buffer))


class _SaveUnrounded:
    """A state-dict hook that saves a buffer as it was before it was rounded."""

    def __init__(self, name: str, buffer: torch.Tensor) -> None:
        self._name, self._buffer = name, buffer

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        now = state.get(prefix + self._name)
        # A buffer that has changed since is saved as it is.
        if now is not None and torch.equal(now, self._buffer.to(now)):
            state[prefix + self._name] = self._buffer
