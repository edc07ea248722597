"""Finds models whose tokens meet in full causal attention alone, which work on few tokens as they do on many."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.attention import attention_of
from toolkit.model.attention.document_attention import BY_DOCUMENT
from toolkit.model.attention.positions import rotary_limit
from toolkit.sharding.fsdp2.fsdp import class_name, original_class

KERNELS = ("eager", "sdpa", BY_DOCUMENT, "flash_attention_2", "flash_attention_3")
"""Implementations that have no blocks of tokens outside of a kernel."""

MASKS = {"create_causal_mask", "create_bidirectional_mask"}
WINDOWED = "create_sliding_window_causal_mask"
"""transformers' functions that make the masks of full attention, and of a window. A model's file imports its own."""

_BY_LENGTH = re.compile(r"window|chunk|local|block|topk|stride|distance|span|bucket|expert|moe")
"""In names of the configuration's numbers that say how many tokens meet."""

_OF_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers")


def attends_in_full(model: nn.Module) -> bool:
    """Tells whether rows of a few tokens go through all code of the model that longer rows go through.

    False if in doubt: code that is not transformers', windows, states along a row, routers and experts (for which
    tokens compete), rotary embeddings that change with the length, and kernels that work in blocks of tokens.
    """
    base = base_of(model)
    file = original_class(base).__module__
    if not file.startswith("transformers.models.") or attention_of(base) not in KERNELS or rotary_limit(base):
        return False
    masks = {name for name in vars(sys.modules[file]) if re.fullmatch(r"create_\w*mask\w*", name)}
    if "create_causal_mask" not in masks or not masks <= {*MASKS, WINDOWED}:
        return False
    # Mistral's file, for one, does not read the kinds of layers that a configuration may name.
    reads_kinds = "layer_types" in inspect.getsource(sys.modules[file])
    return not _has_windows(base.config.get_text_config(), WINDOWED in masks, reads_kinds) and all(
        map(_is_per_token, base.modules())
    )


def _has_windows(config: Any, imported: bool, reads_kinds: bool) -> bool:
    """Tells whether a number of the configuration limits which tokens meet, or a layer is of another kind."""
    kinds = getattr(config, "layer_types", None) if reads_kinds else None
    if kinds is not None and set(kinds) != {"full_attention"}:
        return True
    if imported and kinds is None and getattr(config, "sliding_window", 0) is not None:
        return True
    left_out = () if kinds is None else _OF_WINDOWS  # unused if no layer has a window
    numbers = (name for name, value in config.to_dict().items() if isinstance(value, int) and value)
    return any(_BY_LENGTH.search(name) and name not in left_out for name in numbers)


def _is_per_token(module: nn.Module) -> bool:
    """Tells whether a module has no parameters of its own, or takes each token by itself."""
    if not any(True for _ in module.parameters(recurse=False)):
        return True
    return isinstance(module, (nn.Linear, nn.Embedding, Conv1D)) or class_name(module).endswith("Norm")
