"""A configuration that no machine could build ends at once, or at the time limit."""

from __future__ import annotations

import time

import pytest
from transformers import LlamaConfig

from toolkit.data import time_limit
from toolkit.errors import BadInputError
from toolkit.model import limits
from toolkit.model.limits import within_limits


def test_too_many_layers_are_refused_before_anything_is_built() -> None:
    config = LlamaConfig(num_hidden_layers=10_001)
    with (
        pytest.raises(
            BadInputError, match=r"model.config: num_hidden_layers is 10,001 in model.config; at most 10,000"
        ),
        within_limits(config, "model.config", "model.config"),
    ):
        raise AssertionError("it is built")


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
