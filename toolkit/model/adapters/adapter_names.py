"""Names the tensors of an adapter's file so that peft finds them again.

peft renames what it reads by the rules of transformers for the base's files. Of some types these rules break the names
that the model itself has: Laguna's `mlp.shared_experts.up_proj` becomes `mlp.shared_experts..up_proj`, and peft
silently ignores the tensor. Such tensors are written under the names of the base's files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from toolkit.errors import BadInputError, listed

if TYPE_CHECKING:
    import peft

PREFIX = "base_model.model."
"""The prefix that peft puts before the names of the model's parameters."""

NAME = "default"
"""peft's name of the adapter."""


def names_in_file(model: peft.PeftModel, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Returns the name of each tensor in the adapter's file, by the name that peft gives it.

    Args:
        tensors: tensors of peft's state, on any device; only their shapes are used.

    Raises:
        BadInputError: if peft would not find a tensor under any name.
    """
    # Without values: experts would be joined, which takes memory.
    empty = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    names = {name: name for name in tensors}
    if lost := _not_found_again(model, empty, names):
        names |= {name: _as_in_base_files(model, name) for name in lost}
    if len(set(names.values())) < len(names) or (lost := _not_found_again(model, empty, names)):
        raise BadInputError(
            f"adapter.target_modules: of {type(model.get_base_model()).__name__} peft would not read "
            f"{listed(lost)} again, as transformers gives them other names; leave them out of "
            "adapter.target_modules, or set export.merge=true"
        )
    return names


def _not_found_again(model: peft.PeftModel, tensors: dict[str, torch.Tensor], names: dict[str, str]) -> list[str]:
    """Returns the tensors to which peft gives other names when it reads them."""
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    stored = {names[name]: tensor for name, tensor in tensors.items()}
    found = convert_peft_adapter_state_dict_for_transformers(model, model.peft_config[NAME], stored, NAME)
    return sorted(name for name in tensors if name not in found or found[name].shape != tensors[name].shape)


def _as_in_base_files(model: peft.PeftModel, name: str) -> str:
    conversions: Iterable[object] = get_model_conversion_mapping(model.get_base_model(), add_legacy=False)
    renamings = [each.reverse_transform() for each in conversions if isinstance(each, WeightRenaming)]
    stored: str = rename_source_key(name.removeprefix(PREFIX), renamings[::-1], [], reverse=True)[0]
    return PREFIX + stored
