"""Chooses the attention implementation of a run: the recipe's, or the best available, named with its reason."""

from __future__ import annotations

import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.utils import import_utils

from toolkit.errors import BadInputError, first_line
from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.document_attention import BY_DOCUMENT, register_by_document
from toolkit.model.attention.positions import rotary_limit, takes_positions
from toolkit.sharding.fsdp2.fsdp import class_name
from toolkit.sharding.parallel.sequence_parallel import (
    WholeRows,
    heads_for_tokens,
    own_part,
    rows_under_way,
    tokens_for_heads,
)

NOT_INSTALLED = "neither flash-attn nor flash-attn-3 is installed for this GPU"


def attention_of(model: nn.Module) -> str:
    """Returns the attention implementation that transformers has chosen; empty if it does not say."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) or ""


def is_flash(model: nn.Module) -> bool:
    """Tells whether the model uses flash attention, which transformers also takes from the hub under other names."""
    return "flash" in attention_of(model)


@contextmanager
def known_packing(shares_rows: bool) -> Iterator[None]:
    """Tells transformers during a forward whether rows hold several documents, which the host knows.

    Otherwise it asks the device in every forward for each mask, and the host waits until the device, which is far
    behind, has answered.
    """

    mask_by_what_is_known()
    before, _here.shares_rows = _here.shares_rows, shares_rows
    try:
        yield
    finally:
        _here.shares_rows = before


def mask_by_what_is_known() -> None:
    """Makes transformers build masks from `known_packing` and the rows under way. A second call changes nothing."""
    # The module's own names, which its functions look up at each call.
    masking_utils.find_packed_sequence_indices = _indices
    masking_utils.remap_positions_for_packed_sequence = _at_positions
    masking_utils.chunked_causal_mask_function = _chunked


class _ForwardFacts(threading.local):
    """Facts of this thread's forward: with by_block, several forwards are under way at the same time."""

    shares_rows: bool | None = None


_here = _ForwardFacts()
_asked: Callable[[torch.Tensor], torch.Tensor | None] = masking_utils.find_packed_sequence_indices
_remapped: Callable[..., Any] = masking_utils.remap_positions_for_packed_sequence
_of_chunks: Callable[..., Any] = masking_utils.chunked_causal_mask_function


def _whole_row_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns positions of all tokens of the rows, (B, T), if a forward has a part, (B, T / n)."""
    rows = rows_under_way()
    return position_ids if rows is None else rows.positions


def _chunked(*args: Any) -> Any:
    mask = _of_chunks(*args)
    mask.by_position = True
    return mask


def _at_positions(mask: Any, position_ids: torch.Tensor) -> Any:
    """Returns a mask that asks `mask` for positions in documents, as only chunks need; others for places in a row.

    Inside a document a window is the same in both. transformers 5.24 asks for positions always, also whether they are
    of one image, which Gemma 3 and 4 know by places.
    """
    return _remapped(mask, _whole_row_positions(position_ids)) if hasattr(mask, "by_position") else mask


def _indices(position_ids: torch.Tensor) -> torch.Tensor | None:
    position_ids = _whole_row_positions(position_ids)
    if _here.shares_rows is None:
        return _asked(position_ids)
    return (position_ids.diff(prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1) if _here.shares_rows else None


def settle_attention(
    model: PreTrainedModel,
    asked: str,
    device: torch.device,
    in_16_bits: bool,
    packed: bool,
    compiled: bool,
) -> str:
    """Gives `model` the best attention if `asked` is auto. Returns which it has, and why.

    Flash attention runs each document of a packed row alone, and so does `BY_DOCUMENT` on a CPU. `sdpa` computes all
    pairs of a row and masks them; it is the choice elsewhere. flex_attention skips masked blocks too, but `auto`
    does not choose it: it compiles a kernel for each shape, and no measurement here showed it to be faster.

    Args:
        packed: whether documents share rows.
        compiled: whether blocks are compiled, for one shape; documents have many.
    """
    if asked != "auto":
        return f"{attention_of(model) or 'its own'} (model.attention)"
    wanted, why = best_flash(model, device, in_16_bits)
    if device.type == "cpu" and packed and not compiled and attention_of(model) == "sdpa":
        register_by_document()
        wanted = BY_DOCUMENT
    if wanted is not None:
        try:
            model.set_attn_implementation(wanted)
        except (ImportError, ValueError) as error:
            why = f"{wanted} refused: {first_line(error)}"
    return f"{attention_of(model) or 'its own'} ({why})"


def best_flash(model: PreTrainedModel, device: torch.device, in_16_bits: bool) -> tuple[str | None, str]:
    """Returns the flash attention to use, by transformers' name, or None; and the reason."""
    if device.type != "cuda":
        return None, "no GPU"
    if not in_16_bits:
        return None, "float32 compute: flash attention takes 16 bits"
    if not getattr(model, "_supports_flash_attn", False):
        return None, f"{type(model).__name__} has no flash attention"
    major, _ = torch.cuda.get_device_capability(device)
    if major == 9 and import_utils.is_flash_attn_3_available():  # written for Hopper
        return "flash_attention_3", "installed, for this GPU"
    if major >= 8 and import_utils.is_flash_attn_2_available():
        return "flash_attention_2", "installed"
    return None, NOT_INSTALLED


# Layers that carry a state along a row (gated delta rules, state spaces, short convolutions), and their kernels


_MARK = "is_new_implementation"
"""transformers sets it in `use_kernel_func_from_hub_with_fallback` if a kernel has replaced the function."""


def kernels_take_documents(model: nn.Module) -> bool:
    """Tells whether a model has such layers, and a kernel for each of their functions."""
    files = {type(module).__module__ for module in base_of(model).modules()}
    marks = [mark for file in files for mark in _marks(sys.modules[file])]
    return bool(marks) and all(marks)


def _marks(file: Any) -> list[bool]:
    functions = [found for found in vars(file).values() if isinstance(found, FunctionType)]
    return [
        inspect.getclosurevars(function).nonlocals[_MARK]
        for function in functions
        if _MARK in function.__code__.co_freevars
    ]


# ---- Attention of rows that a group of ranks shares: each rank attends with its heads over all tokens ----
# The functions that transformers has by name are wrapped under their own names. While a forward has a part of its rows
# (`sharding.sequence.rows_shared`), they exchange tokens for heads, call the function that was there, and exchange
# back; otherwise they only call it. Masks are made for whole rows alike, so that sliding windows, soft caps, sinks and
# the documents of packed rows are the model's own.

WITHIN_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers, as configurations name them, that mix tokens only in attention."""

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def require_sequence(model: nn.Module, parts: int, max_length: int) -> None:
    """Checks by the configuration that `parts` ranks can share the rows of this model.

    Raises:
        BadInputError: if they cannot.
    """
    name, config = class_name(base_of(model)), base_of(model).config.get_text_config()
    if "Classification" in name and not hasattr(base_of(model), "score"):
        raise BadInputError(
            f"sharding.sequence: {name} is not a decoder with a head called `score`: it may need the padding's mask, "
            "or the first token or the mean of a row, of which each rank has a part; remove it"
        )
    if not takes_positions(model):
        raise BadInputError(
            f"sharding.sequence: {name} takes no position_ids, and a part of a row may begin at any; remove it"
        )
    mixing = sorted(set(getattr(config, "layer_types", None) or ()) - WITHIN_ATTENTION)
    if mixing:
        raise BadInputError(
            f"sharding.sequence: {name} has layers of the kind {', '.join(mixing)}, which mix the tokens of a row "
            "outside attention; remove it"
        )
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise BadInputError(f"sharding.sequence: {name} does not tell its number of attention heads; remove it")
    if heads % parts:
        raise BadInputError(_cannot_share(parts, heads, name))
    limit = rotary_limit(model)
    if limit is not None and max_length > limit[1]:
        raise BadInputError(
            f"sharding.sequence: the rotary embeddings of {name} ({limit[0]}) change with the length of a row beyond "
            f"{limit[1]} tokens, and each rank has a part of it; lower data.max_length to {limit[1]}, or remove it"
        )


def _cannot_share(parts: int, heads: int, name: str) -> str:
    allowed = [number for number in range(1, heads + 1) if heads % number == 0]
    return (
        f"sharding.sequence: {parts} does not divide the {heads} attention heads of {name}; "
        f"set it to one of {', '.join(map(str, allowed))}"
    )


def attend_by_heads(model: nn.Module) -> None:
    """Wraps the attention functions that the model uses, under their own names; a second call changes nothing."""
    mask_by_what_is_known()
    used = {attention_of(module) for module in base_of(model).modules() if hasattr(module, "config")}
    for name in sorted(used - {""}):
        # "eager" is each model's own function, which transformers takes where it knows no other by that name.
        own = AttentionInterface().get(name)
        if not hasattr(own, "by_heads"):
            AttentionInterface.register(name, _wrapped_attention(own))
        mask = AttentionMaskInterface().get(name)
        if mask is not None and not hasattr(mask, "by_heads"):
            AttentionMaskInterface.register(name, _wrapped_mask(mask))


def _wrapped_mask(own: Callable[..., Any]) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        rows = rows_under_way()
        if rows is not None:
            kwargs |= dict.fromkeys(("q_length", "kv_length"), rows.positions.shape[1])
        return own(*args, **kwargs)

    mask.by_heads = True  # type: ignore[attr-defined]
    return mask


def _wrapped_attention(own: Attention | None) -> Attention:
    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        base, rows = own or _eager_attention_of(module), rows_under_way()
        if rows is None:
            return base(module, query, key, value, attention_mask, *args, **kwargs)
        shared: tuple[torch.Tensor, None] = _by_heads(
            base, rows, module, query, key, value, attention_mask, *args, **kwargs
        )
        return shared

    attend.by_heads = True  # type: ignore[attr-defined]
    return attend


def _eager_attention_of(module: nn.Module) -> Attention:
    """Returns the eager function of the module that defines the model."""
    forward = inspect.unwrap(type(module).forward)
    found: Attention = forward.__globals__["eager_attention_forward"]
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_heads(
    base: Attention,
    rows: WholeRows,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes `base` for this rank's tokens: (B, T / n, H, E).

    Args:
        base: attention of whole rows.
        query: queries of this rank's tokens, (B, H, T / n, D).
        key: (B, K, T / n, D).
        value: (B, K, T / n, E).
        attention_mask: the mask of whole rows.
    """
    heads, parts = query.shape[1], rows.parts
    if heads % parts:
        raise BadInputError(_cannot_share(parts, heads, type(module).__name__))
    # Each rank needs keys for its queries: heads that are fewer than ranks are held by several.
    common = math.lcm(key.shape[1], parts)
    repeats = common // key.shape[1]
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    share = _WithRankHeads(module, heads, parts, heads // common)
    kwargs = {name: share.own(argument) for name, argument in kwargs.items()}
    if kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = rows.positions.view(query.shape[0], -1)
    exchanged = [_all_tokens(tensor, rows) for tensor in (query, key, value)]
    output, _ = base(share, *exchanged, attention_mask, *args, **kwargs)  # (B, T, H / n, E)
    own = tokens_for_heads(output.reshape(*rows.positions.shape, *output.shape[2:]), parts)
    return own.reshape(query.shape[0], query.shape[2], heads, -1), None


def _all_tokens(local: torch.Tensor, rows: WholeRows) -> torch.Tensor:
    """Exchanges (B, H, T / n, D) for (B, H / n, T, D); several rows may stand in one, as for flash attention."""
    num_rows, tokens = rows.positions.shape
    of_rows = local.transpose(1, 2).reshape(num_rows, tokens // rows.parts, *local.shape[1::2])
    whole = heads_for_tokens(of_rows, rows.parts)
    return whole.reshape(local.shape[0], -1, *whole.shape[2:]).transpose(1, 2)


class _WithRankHeads:
    """An attention module with only this rank's heads: tensors with an entry for each head are cut.

    Args:
        groups: number of queries for each key on this rank.
    """

    def __init__(self, module: nn.Module, heads: int, parts: int, groups: int) -> None:
        self._module, self._heads = module, heads
        self._mine = slice(own_part() * heads // parts, (own_part() + 1) * heads // parts)
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return self.own(getattr(self._module, name))

    def own(self, value: Any) -> Any:
        """Cuts a tensor (H,), such as attention sinks, to this rank's heads."""
        is_by_head = isinstance(value, torch.Tensor) and value.shape == (self._heads,)
        return value[self._mine] if is_by_head else value
