"""Chooses the attention implementation of a run: the recipe's, or the best available, named with its reason."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend
from transformers import PreTrainedModel, masking_utils
from transformers.utils import import_utils

from toolkit.errors import first_line
from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.document_attention import BY_DOCUMENT, register_by_document
from toolkit.sharding.parallel.sequence_parallel import rows_under_way

TRIED_TOKENS = 128
"""Tokens of the row with which torch is asked for its kernel."""

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
        return f"{_described(model, device, in_16_bits, packed)} (model.attention)"
    wanted, why = best_flash(model, device, in_16_bits)
    if device.type == "cpu" and packed and not compiled and attention_of(model) == "sdpa":
        register_by_document()
        wanted = BY_DOCUMENT
    if wanted is not None:
        try:
            model.set_attn_implementation(wanted)
        except (ImportError, ValueError) as error:
            why = f"{wanted} refused: {first_line(error)}"
    return f"{_described(model, device, in_16_bits, packed)} ({why})"


def _described(model: PreTrainedModel, device: torch.device, in_16_bits: bool, packed: bool) -> str:
    """Names the implementation, and for `sdpa` on a device the kernel that torch chooses."""
    name = attention_of(model)
    if name != "sdpa" or device.type == "cpu":
        return name or "its own"
    kernel = sdpa_kernel(model, device, in_16_bits, packed)
    return name if kernel is None else f"{name} by {kernel}"


def sdpa_kernel(model: PreTrainedModel, device: torch.device, in_16_bits: bool, packed: bool) -> str | None:
    """Returns the kernel that torch's attention takes for rows of this model, by its name in `SDPBackend`.

    On capability 9.0 torch 2.14 takes cuDNN's, which has a workspace of its own.
    None if the configuration names no heads, or torch no kernel for the device.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    dtype = torch.bfloat16 if in_16_bits else torch.float32
    rows = torch.empty((1, heads, TRIED_TOKENS, width), dtype=dtype, device=device, requires_grad=True)
    shape = (1, 1, TRIED_TOKENS, TRIED_TOKENS)
    mask = torch.ones(shape, dtype=torch.bool, device=device) if packed else None
    try:
        return SDPBackend(torch._fused_sdp_choice(rows, rows, rows, attn_mask=mask, is_causal=not packed)).name
    except (RuntimeError, ValueError):  # a device that does not say, or a kernel without a name: the run goes on
        return None


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
