"""toolkit.sharding: the strategy's word, where it comes from, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import pickle
from typing import Any

import pytest
from support.cases import cases

from toolkit.errors import BadInputError
from toolkit.sharding.accelerate_config import STRATEGY_KEYS, AccelerateConfig
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.blocks.compiling import Compilation
from toolkit.sharding.fsdp2 import versions
from toolkit.sharding.launched import accumulation_plugin, resolve_strategy
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape, mesh_shape, parse_strategy, with_reshard_after_forward
from toolkit.sharding.plugin import ShardingMesh, ShardingPlugin, sharding_kwargs

TABLES = cases(__file__)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*map(str.upper, STRATEGY_KEYS), "WORLD_SIZE", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
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
    with pytest.raises(BadInputError, match=r"sharding.strategy is zero3, but .*FSDP_SHARDING_STRATEGY.* is ddp"):
        resolve_strategy("zero3")


def test_a_config_without_a_strategy_leaves_it_to_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's launcher hands on FULL_SHARD then. Under version 2 another key says whether units stay gathered."""
    for reshards, found in (("true", "zero3"), ("false", "zero2")):
        fsdp = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_version": "2", "fsdp_reshard_after_forward": reshards}
        for key, value in fsdp.items():
            monkeypatch.setenv(key.upper(), value)
        assert resolve_strategy(None).name == found
        in_file = {"fsdp_version": 2, "fsdp_reshard_after_forward": reshards == "true"}
        assert AccelerateConfig({"fsdp_config": in_file}, "here").strategy == (None if found == "zero3" else found)
    with pytest.raises(
        BadInputError, match=r"sharding.strategy is zero1, but .*fsdp_reshard_after_forward: false is zero2"
    ):
        resolve_strategy("zero1")
    monkeypatch.setenv("FSDP_VERSION", "1")
    assert resolve_strategy("zero1").name == "zero1"


@pytest.mark.parametrize(("text", "number"), [("4,2", "4"), (" 8 ", "8"), ("", None), ("0", None), ("all", None)])
def test_threads_are_one_number(text: str, number: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    ShardingPlugin("zero3")
    assert os.environ.get("OMP_NUM_THREADS") == number


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "SUPPORTED_VERSIONS", {"torch": ">=99,<100"})
    with pytest.raises(BadInputError, match=r"torch .* is installed, but the toolkit needs torch>=99"):
        sharding_kwargs("zero3")


def test_a_newer_version_is_tried_if_every_private_name_is_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "SUPPORTED_VERSIONS", {"torch": ">=2.0,<2.1"})
    with pytest.warns(UserWarning, match=r"torch .* is newer than the tested torch>=2.0,<2.1; all private names"):
        sharding_kwargs("zero3")
    moved = versions.PrivateName("torch:nowhere")
    monkeypatch.setattr(versions, "PRIVATE_NAMES", (*versions.PRIVATE_NAMES, moved))
    with pytest.raises(BadInputError, match=r"is newer .* have moved: torch:nowhere: .*; install a tested version"):
        sharding_kwargs("zero3")


@pytest.mark.parametrize(("package", "place"), TABLES["MOVED"])
def test_a_newer_library_that_moved_a_name_stops_by_that_name(
    monkeypatch: pytest.MonkeyPatch, package: str, place: str
) -> None:
    monkeypatch.setattr(versions, "SUPPORTED_VERSIONS", {package: ">=0.1,<0.2"})
    names = [name for name in versions.PRIVATE_NAMES if name.place == place]
    monkeypatch.setattr(versions, "PRIVATE_NAMES", names)
    with pytest.warns(UserWarning, match=f"{package} .* is newer than the tested {package}>=0.1,<0.2; all private"):
        sharding_kwargs("zero3")
    changed = dataclasses.replace(names[0], holds=("another text",))
    monkeypatch.setattr(versions, "PRIVATE_NAMES", [changed])
    with pytest.raises(BadInputError, match=f"^{package} .* have moved: {place} holds no 'another text'"):
        sharding_kwargs("zero3")


@pytest.mark.parametrize(("key", "told"), TABLES["STOCK"])
def test_stock_settings_that_would_mean_something_else_are_refused(
    monkeypatch: pytest.MonkeyPatch, key: str, told: str
) -> None:
    monkeypatch.setenv(key, "true")
    with pytest.raises(BadInputError, match=told):
        ShardingPlugin("zero3")


def test_the_config_may_not_ask_for_another_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accumulation_plugin(3).num_steps == 3
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    assert accumulation_plugin(3).num_steps == 3
    with pytest.raises(
        BadInputError, match=r"gradient_accumulation_steps is 2, but ACCELERATE_GRADIENT_ACCUMULATION_STEPS of"
    ):
        accumulation_plugin(2)


@pytest.mark.parametrize("axis", ["cp", "sp"])
def test_axes_that_the_backend_does_not_run_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, axis: str) -> None:
    """Not by the number of processes, nor by dp sizes that contradict the strategy because of them."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(BadInputError, match=rf"^{axis}_size of ShardingMesh, .* is 2, but .* has no .*; remove it"):
        ShardingMesh(plugin=ShardingPlugin("zero3"), dp_shard_size=2, **{f"{axis}_size": 2})
    key = f"PARALLELISM_CONFIG_{axis.upper()}_SIZE"
    for value, told in (("2", "is 2, but the sharding backend has no"), ("two", "is 'two'; needs a number")):
        monkeypatch.setenv(key, value)
        monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
        with pytest.raises(BadInputError, match=f"^parallelism_config_{axis}_size {told}"):
            sharding_kwargs("zero3")
    monkeypatch.setenv(key, "1")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    assert sharding_kwargs("zero3")["parallelism_config"].total_size == 4


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


@pytest.mark.parametrize(("strategy", "world_size", "replicate", "shard", "expected"), TABLES["MESHES"])
def test_the_mesh_of_a_strategy(
    strategy: str, world_size: int, replicate: int | None, shard: int | None, expected: list[int]
) -> None:
    shape = mesh_shape(STRATEGIES[strategy], world_size, replicate=replicate, shard=shard)
    assert [shape.replicate, shape.shard] == expected


@pytest.mark.parametrize(("strategy", "world_size", "replicate", "shard", "message"), TABLES["IMPOSSIBLE"])
def test_a_mesh_that_cannot_be(
    strategy: str, world_size: int, replicate: int | None, shard: int | None, message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        mesh_shape(STRATEGIES[strategy], world_size, replicate=replicate, shard=shard)


def test_a_node_keeps_units_from_forward_to_backward() -> None:
    zero3, shape = STRATEGIES["zero3"], MeshShape(1, 16)
    assert with_reshard_after_forward(shape, zero3, 8, 8) == MeshShape(1, 16, 8)
    assert with_reshard_after_forward(shape, zero3, 4, 8).backward == 4, "half a node"
    assert with_reshard_after_forward(shape, zero3, 8, 16).reshard_after_forward == 8, "half of the only node"
    assert with_reshard_after_forward(shape, STRATEGIES["ddp"], None, 8) == shape


@pytest.mark.parametrize(("strategy", "node", "ranks_per_node", "message"), TABLES["NODES"])
def test_a_node_that_cannot_be(strategy: str, node: int, ranks_per_node: int, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        with_reshard_after_forward(MeshShape(1, 16), STRATEGIES[strategy], node, ranks_per_node)


def test_a_group_of_backward_lies_inside_a_node() -> None:
    """Groups of 4 divide 12 ranks, but not the 6 of a node: the second group would span two nodes."""
    assert with_reshard_after_forward(MeshShape(1, 12), STRATEGIES["zero3"], 3, 6) == MeshShape(1, 12, 3)
    with pytest.raises(BadInputError, match=r"4 is not a group inside of the 6 ranks of a node .* one of 2, 3, 6$"):
        with_reshard_after_forward(MeshShape(1, 12), STRATEGIES["zero3"], 4, 6)


REFUSED_OF_THE_BACKEND: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("ddp", {"offload": "optimizer"}, "sharding.offload optimizer is not possible"),
    ("ddp", {"checkpointing": Checkpointing(every=1)}, "sharding.activation_checkpointing is not possible"),
    ("ddp", {"compilation": Compilation()}, "training.compile is not possible"),
    ("ddp", {"experts": 2}, "sharding.experts is not possible"),
    ("ddp", {"reshard_after_forward": 2}, "sharding.reshard_after_forward has no effect"),
    ("zero1", {"reshard_after_forward": 2}, "sharding.reshard_after_forward has no effect"),
    ("hybrid", {"reshard_after_forward": 2}, "sharding.reshard_after_forward has no effect"),
    ("zero3", {"reshard_after_forward": 2, "experts": 2}, "sharding.reshard_after_forward is not possible"),
)


@pytest.mark.parametrize(("strategy", "asked", "problem"), REFUSED_OF_THE_BACKEND)
def test_a_loop_of_ones_own_is_refused_what_a_recipe_is(strategy: str, asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadInputError, match=problem):
        sharding_kwargs(strategy, **asked)


def test_sizes_come_from_the_accelerate_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    mesh = sharding_kwargs("hybrid")["parallelism_config"]
    assert (mesh.dp_replicate_size, mesh.dp_shard_size) == (2, 4)
    with pytest.raises(BadInputError, match="dp_replicate_size is 2, but with strategy zero2"):
        sharding_kwargs("zero2")


def test_checkpointing_of_the_accelerate_config_becomes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ShardingPlugin("zero3").checkpointing is None
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    plugin = ShardingPlugin("zero3")
    assert plugin.checkpointing == Checkpointing(every=1, offload=False)
    assert plugin.activation_checkpointing is False, "Accelerate would apply its own, without random state"
    with pytest.raises(
        BadInputError, match=r"strategy ddp, where the backend does not touch the model; call .*checkpoint_blocks"
    ):
        ShardingPlugin("ddp")
