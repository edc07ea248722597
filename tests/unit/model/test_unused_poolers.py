"""What DDP must know of poolers: it looks for unused parameters, and warns if it finds none."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    SqueezeBertConfig,
    SqueezeBertForSequenceClassification,
    SqueezeBertForTokenClassification,
)

from toolkit.model.structure.model_parts import may_leave_unused

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GROUPS = {f"{name}_groups": 1 for name in ("q", "k", "v", "post_attention", "intermediate", "output")}


@pytest.mark.parametrize(
    ("kind", "config", "unused"),
    [
        (SqueezeBertForTokenClassification, SqueezeBertConfig(**SIZES, **GROUPS, embedding_size=16), True),
        (SqueezeBertForSequenceClassification, SqueezeBertConfig(**SIZES, **GROUPS, embedding_size=16), False),
        (BertForSequenceClassification, BertConfig(**SIZES), False),
    ],
)
def test_only_a_pooler_that_no_classifier_reads_is_unused(kind: Any, config: Any, unused: bool) -> None:
    assert may_leave_unused(kind(config), ("language",)) == unused


def test_a_frozen_pooler_is_not_looked_for() -> None:
    model = SqueezeBertForTokenClassification(SqueezeBertConfig(**SIZES, **GROUPS, embedding_size=16))
    model.transformer.pooler.requires_grad_(False)
    assert not may_leave_unused(model, ("language",))
