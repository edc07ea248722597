"""A configuration that no machine could build ends at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from toolkit.data.tokens import tokenizer
from toolkit.data.tokens.layer_limit import require_few_layers
from toolkit.errors import BadInputError
from toolkit.model.load import _configuration, _without_weights
from toolkit.recipe.schema import DataSection, ModelSection


def test_too_many_layers_are_refused_before_anything_is_built() -> None:
    config = LlamaConfig(num_hidden_layers=10_001)
    with pytest.raises(
        BadInputError, match=r"model.config: num_hidden_layers is 10,001 in model.config; at most 10,000"
    ):
        _without_weights(None, config, {}, 0, "model.config")


READERS: dict[str, Callable[[ModelSection], object]] = {
    "tokenizer": lambda model: tokenizer.load(model, DataSection(train="rows.jsonl", max_length=8)),
    "model": lambda model: _configuration(model, None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("reader", READERS)
def test_a_configuration_that_would_never_be_read(reader: str, tmp_path: Path) -> None:
    """lfm2's looks through the list of its layers once for each layer."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lfm2", "num_hidden_layers": 1_000_000}))
    with pytest.raises(BadInputError, match=r"model.name_or_path: num_hidden_layers is 1,000,000 in config.json of"):
        READERS[reader](ModelSection(name_or_path=str(tmp_path)))


@pytest.mark.parametrize("fields", [{"n_layer": 10_001}, {"text_config": {"num_hidden_layers": 10_001}}])
def test_layers_by_other_names(fields: dict[str, Any]) -> None:
    with pytest.raises(BadInputError, match=r"is 10,001 in it; at most 10,000"):
        require_few_layers(fields, "model.config", "it")
