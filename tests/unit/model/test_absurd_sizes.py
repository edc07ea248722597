"""A configuration that no machine could build ends at once, or at the time limit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from toolkit.data import time_limit, tokenizer
from toolkit.data.layer_limit import require_few_layers
from toolkit.errors import BadInputError
from toolkit.model import limits
from toolkit.model.limits import within_limits
from toolkit.model.load import _configuration
from toolkit.recipe.schema import DataSection, ModelSection


def test_too_many_layers_are_refused_before_anything_is_built() -> None:
    config = LlamaConfig(num_hidden_layers=10_001)
    with (
        pytest.raises(
            BadInputError, match=r"model.config: num_hidden_layers is 10,001 in model.config; at most 10,000"
        ),
        within_limits(config, "model.config", "model.config"),
    ):
        raise AssertionError("it is built")


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


def test_a_model_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUILD_SECONDS", 0.2)
    monkeypatch.setattr(time_limit, "LOOK_SECONDS", 0.05)
    started = time.monotonic()
    with (
        pytest.raises(BadInputError, match=r"type llama that its config.json asks for is not built after 0.2 s"),
        within_limits(LlamaConfig(), "model.name_or_path", "its config.json"),
    ):
        list(iter(lambda: time.monotonic() - started < 60, False))
    assert time.monotonic() - started < 30
