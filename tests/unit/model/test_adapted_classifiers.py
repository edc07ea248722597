"""Adapters on every linear layer of a classifier leave its head to be trained in full, whatever it is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from toolkit.model.adapters.adapters import add_adapter
from toolkit.model.adapters.targets import layers_to_quantise
from toolkit.recipe.schema import AdapterSection

SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 96}
MODELS = {
    "distilbert": {"dim": 32, "n_heads": 2, "n_layers": 2, "hidden_dim": 64, "vocab_size": 96},
    "bert": SMALL,
    "roberta": SMALL,
    "electra": {**SMALL, "embedding_size": 32},
    "llama": {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0},
}
AUTO: dict[str, Any] = {"texts": AutoModelForSequenceClassification, "words": AutoModelForTokenClassification}


@pytest.mark.parametrize("kind", AUTO)
@pytest.mark.parametrize("name", MODELS)
def test_all_linear_leaves_the_head_to_be_trained_in_full(name: str, kind: str) -> None:
    section = AdapterSection(kind="lora", target_modules="all-linear")
    with torch.device("meta"):
        model = AUTO[kind].from_config(AutoConfig.for_model(name, **MODELS[name]))
    linear = {path for path, module in model.named_modules() if type(module) is torch.nn.Linear}
    head = {path for path in linear if "classifier" in path or "score" in path}
    chosen = layers_to_quantise(model, section)
    adapted = add_adapter(model, section, None)
    trained = [name.removeprefix("base_model.model.") for name, p in adapted.named_parameters() if p.requires_grad]
    # What stands inside a head is trained with it.
    assert {name.partition(".modules_to_save.")[0] for name in trained if "lora_" not in name} >= {
        path for path in head if not any(path.startswith(f"{other}.") for other in ("classifier", "score"))
    }
    with_adapters = {name.partition(".lora_")[0] for name in trained if "lora_" in name}
    assert with_adapters == linear - head
    assert not head & set(chosen)
