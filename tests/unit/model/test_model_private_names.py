"""The private names of transformers that toolkit/model uses mean what they did; private_names.yaml lists the others.

When one of these fails after an upgrade, the named place in toolkit/model is what to mend.
"""

from __future__ import annotations

import inspect

import torch
from transformers import AttentionInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from toolkit.model.attention.attention import known_packing


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
