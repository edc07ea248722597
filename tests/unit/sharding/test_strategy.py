"""toolkit.sharding: the strategy's word, where it comes from, and what is refused."""

from __future__ import annotations

import pickle

import pytest

from toolkit.errors import BadInputError
from toolkit.sharding import plugin
from toolkit.sharding.plugin import ShardingMesh, ShardingPlugin, accumulation_plugin, resolve_strategy, sharding_kwargs
from toolkit.sharding.strategy import STRATEGIES, parse_strategy


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FSDP_SHARDING_STRATEGY", "WORLD_SIZE", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "name"), [("zero3", "zero3"), (" ZeRO3 ", "zero3"), ("FULL_SHARD", "zero3"), ("DDP", "ddp")]
)
def test_words(text: str, name: str) -> None:
    assert parse_strategy(text, "here").name == name


def test_an_unknown_word_lists_the_known() -> None:
    with pytest.raises(BadInputError, match=r"here: unknown strategy 'zero4'; allowed: .*zero3"):
        parse_strategy("zero4", "here")


def test_where_the_strategy_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_strategy(None).name == "zero3"
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "ddp")
    assert resolve_strategy(None).name == "ddp"
    assert resolve_strategy("ddp").name == "ddp"
    with pytest.raises(BadInputError, match=r"sharding.strategy is zero3, but .*fsdp_sharding_strategy is ddp"):
        resolve_strategy("zero3")


def test_an_untested_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "SUPPORTED_VERSIONS", {"torch": ">=99"})
    with pytest.raises(BadInputError, match=r"torch .* is installed, but the sharding backend needs torch>=99"):
        sharding_kwargs("zero3")


@pytest.mark.parametrize("key", ["FSDP_OFFLOAD_PARAMS"])
def test_stock_settings_that_would_mean_something_else_are_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv(key, "true")
    with pytest.raises(BadInputError, match=key.lower()):
        ShardingPlugin("zero3")


def test_the_config_may_not_ask_for_another_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accumulation_plugin(3).num_steps == 3
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    assert accumulation_plugin(3).num_steps == 3
    with pytest.raises(BadInputError, match=r"gradient_accumulation_steps is 2, but"):
        accumulation_plugin(2)


def test_plugin_and_mesh_can_be_pickled_as_training_arguments_are() -> None:
    mesh = ShardingMesh(plugin=ShardingPlugin("zero3"))
    again = pickle.loads(pickle.dumps(mesh))
    assert again.plugin.strategy == STRATEGIES["zero3"]


def test_the_plugin_keeps_reduction_and_loss_in_float32() -> None:
    import torch

    from toolkit.sharding.apply import precision_policies

    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        unit, root = precision_policies(precision)
        assert (unit.param_dtype, unit.reduce_dtype) == (dtype, torch.float32)
        assert (root.param_dtype, root.reduce_dtype, root.output_dtype) == (dtype, torch.float32, torch.float32)
