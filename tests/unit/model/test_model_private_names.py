"""The private names of transformers that toolkit/model uses mean what they did; private_names.yaml lists the others.

When one of these fails after an upgrade, the named place in toolkit/model is what to mend.
"""

from __future__ import annotations

import inspect

import torch
from torch.nn.attention import SDPBackend
from transformers import (
    AttentionInterface,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    masking_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from toolkit.model.attention.attention import known_packing


def test_what_says_whether_a_model_has_flash_attention() -> None:
    """`attention.best_flash` reads it before it asks for the kernels."""
    assert PreTrainedModel._supports_flash_attn is False
    assert LlamaForCausalLM._supports_flash_attn is True


def test_what_says_which_kernel_sdpa_takes() -> None:
    """`attention.sdpa_kernel` asks it; its number is one of `SDPBackend`."""
    rows = torch.zeros(1, 2, 4, 8)
    assert SDPBackend(torch._fused_sdp_choice(rows, rows, rows, attn_mask=None, is_causal=True)).name


def test_what_says_which_attention_a_model_has() -> None:
    """`attention.attention_of` reads the name from the configuration."""
    assert PretrainedConfig(attn_implementation="sdpa")._attn_implementation == "sdpa"


def test_what_says_whether_rows_hold_several_documents() -> None:
    """`attention.known_packing` answers in its place: None for one document a row, else numbers that grow with them."""
    assert "find_packed_sequence_indices(position_ids)" in inspect.getsource(masking_utils._preprocess_mask_arguments)
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    theirs = masking_utils.find_packed_sequence_indices(positions)
    with known_packing(True):
        assert torch.equal(masking_utils.find_packed_sequence_indices(positions), theirs)
    with known_packing(False):
        assert masking_utils.find_packed_sequence_indices(positions) is None
    assert masking_utils.find_packed_sequence_indices(torch.arange(4)[None]) is None


def test_what_attention_by_document_is_registered_with() -> None:
    """`document_attention.register_by_document`: the kernel is called as transformers calls its own."""
    assert callable(AttentionInterface.register)
    names = list(inspect.signature(sdpa_attention_forward).parameters)
    assert names[:7] == ["module", "query", "key", "value", "attention_mask", "dropout", "scaling"]
