"""What `toolkit verify` compares, and that it tells a wrong run from a right one."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.cases import cases
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from toolkit.cli.app import app
from toolkit.errors import BadInputError
from toolkit.recipe.recipe import Recipe
from toolkit.verify import FAILED, OK, Outcome, PlainRun, Report, Row, ShardedRun, compare, launch, plain, ranks
from toolkit.verify.compare import weight_tolerance

TABLES = cases(__file__)

WEIGHTS = {"a.weight": torch.ones(4, 3), "b.bias": torch.zeros(5)}
STEADY = {"a.weight": torch.ones(4, 3, dtype=torch.bool), "b.bias": torch.tensor([True, True, False, True, True])}


def runs(precision: str = "no", **changes: Any) -> tuple[PlainRun, ShardedRun]:
    """Two equal runs of two steps; `changes` are made to the sharded one's outcome."""
    plain = Outcome([5.0, 4.0], [1.0, 2.0], WEIGHTS, [], {"a.weight": 1.0, "b.bias": 1e-3})
    same = dataclasses.replace(plain, weights={name: weight.clone() for name, weight in WEIGHTS.items()})
    sharded = ShardedRun(dataclasses.replace(same, **changes), {}, precision)
    return PlainRun(plain, set(WEIGHTS), STEADY, 1e-3), sharded


def verdicts(plain: PlainRun, sharded: ShardedRun, dtype: str = "float32") -> dict[str, str]:
    return {row.check: row.verdict for row in compare(plain, sharded, dtype)}


def failed(plain: PlainRun, sharded: ShardedRun) -> set[str]:
    return {check for check, verdict in verdicts(plain, sharded).items() if verdict == FAILED}


def changed(name: str, position: tuple[int, ...], by: float) -> dict[str, torch.Tensor]:
    weights = {key: weight.clone() for key, weight in WEIGHTS.items()}
    weights[name][position] += by
    return weights


def test_equal_runs_pass() -> None:
    assert verdicts(*runs()) == {
        "loss": OK,
        "gradient norm": OK,
        "weights": OK,
        "gradients": OK,
    }


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"losses": [5.0, 4.0 * (1 + 2e-6)]}, "loss"),
    ({"losses": [5.0, math.nan]}, "loss"),
    ({"losses": [math.nan, 4.0]}, "loss"),
    ({"losses": [5.0]}, "loss"),
    ({"grad_norms": [1.0, 2.0 * (1 - 2e-5)]}, "gradient norm"),
    ({"weights": changed("a.weight", (3, 2), 2e-5)}, "weights"),
    ({"weights": changed("a.weight", (0, 0), math.nan)}, "weights"),
    ({"weights": changed("b.bias", (2,), 3e-3)}, "weights"),
    ({"weights": changed("b.bias", (2,), math.nan)}, "weights"),
    ({"weights": {"a.weight": WEIGHTS["a.weight"]}}, "weights"),
    ({"weights": {**WEIGHTS, "b.bias": torch.zeros(4)}}, "weights"),
    ({"without_gradient": ["b.bias"]}, "gradients"),
    ({"sizes": {"a.weight": 1.0, "b.bias": 1.001e-3}}, "gradients"),
    ({"sizes": {"a.weight": 1.0}}, "gradients"),
    ({"sizes": {"a.weight": math.nan, "b.bias": 1e-3}}, "gradients"),
]


def test_a_wrong_run_is_told() -> None:
    for changes, check in WRONG:
        assert failed(*runs(**changes)) == {check}, changes


def test_a_frozen_weight_that_differs_is_told() -> None:
    def of_adapters(weights: dict[str, torch.Tensor]) -> tuple[PlainRun, ShardedRun]:
        plain, sharded = runs(weights=weights)
        return dataclasses.replace(plain, trained={"b.bias"}), sharded

    assert verdicts(*of_adapters(WEIGHTS))["frozen weights"] == OK
    assert failed(*of_adapters(changed("a.weight", (3, 2), 3e-6))) == {"frozen weights"}
    assert failed(*of_adapters({"b.bias": WEIGHTS["b.bias"]})) == {"weights", "frozen weights"}


def test_loads_of_experts_are_compared() -> None:
    even, uneven = [[[0.5, 0.5]], [[0.5, 0.5]]], [[[0.5, 0.5]], [[0.75, 0.25]]]
    plain, sharded = runs(loads=even, balance=[2.0, 2.0])
    plain = dataclasses.replace(plain, outcome=dataclasses.replace(plain.outcome, loads=even, balance=[2.0, 2.0]))
    assert not failed(plain, sharded)
    other = dataclasses.replace(sharded.outcome, loads=uneven, balance=[2.0, 2.1])
    assert failed(plain, dataclasses.replace(sharded, outcome=other)) == {"expert load", "balance loss"}
    assert "expert load" in failed(plain, runs()[1]), "a run that counts nothing"


def test_a_has_no_gradient_in_the_first_step_while_b_is_zero() -> None:
    without = ["x.lora_A.default.weight"]
    plain, sharded = runs(losses=[5.0], grad_norms=[1.0], without_gradient=without)
    one = dataclasses.replace(plain.outcome, losses=[5.0], grad_norms=[1.0], without_gradient=without)
    assert not failed(dataclasses.replace(plain, outcome=one), sharded)
    assert failed(*runs(without_gradient=without)) == {"gradients"}


def test_rounding_passes() -> None:
    changes = {"losses": [5.0, 4.0 * (1 + 5e-7)], "grad_norms": [1.0, 2.0 * (1 + 5e-6)]}
    assert not failed(*runs(**changes, weights=changed("a.weight", (1, 1), 5e-6)))
    assert not failed(*runs(weights=changed("b.bias", (2,), 1e-3))), "a gradient near rounding: AdamW may turn it round"


def test_bf16_is_held_to_wider_tolerances() -> None:
    wide = {"losses": [5.0, 4.04], "grad_norms": [1.0, 2.1], "weights": changed("a.weight", (1, 1), 1e-3)}
    assert failed(*runs(**wide)) == {"loss", "gradient norm", "weights"}
    assert not failed(*runs("bf16", **wide))
    assert failed(*runs("bf16", losses=[5.0, 4.4], weights=changed("a.weight", (1, 1), 3e-3))) == {"loss", "weights"}


def test_the_weights_tolerance_follows_the_learning_rate() -> None:
    tight, loose = weight_tolerance(1e-3, 0.0, 5, mixed=False, dtype="float32")
    assert (tight, loose) == (1e-5, 2e-3)
    assert weight_tolerance(1e-6, 0.0, 5, mixed=False, dtype="float32")[0] == pytest.approx(1e-7)
    assert weight_tolerance(1e-6, 1.0, 5, mixed=False, dtype="float32")[0] > 5e-7, "float32's own rounding"


def test_missing_gradients_are_named_and_compared_with_the_plain_loop() -> None:
    plain, sharded = runs(without_gradient=["b.bias"])
    row = next(row for row in compare(plain, sharded, "float32") if row.check == "gradients")
    assert "b.bias" in row.note
    assert "nor in the plain loop" not in row.note
    plain = dataclasses.replace(plain, outcome=dataclasses.replace(plain.outcome, without_gradient=["b.bias"]))
    row = next(row for row in compare(plain, sharded, "float32") if row.check == "gradients")
    assert "nor in the plain loop" in row.note
    assert row.verdict == FAILED
    # A tower may leave out its last layer, as LLaVA's does; not if the plain loop's does not.
    tower = dataclasses.replace(plain, towers=frozenset({"b.bias"}))
    row = next(row for row in compare(tower, sharded, "float32") if row.check == "gradients")
    assert row.verdict == OK
    assert row.note.endswith("; the model leaves out b.bias, in the plain loop, too")
    used = dataclasses.replace(tower, outcome=dataclasses.replace(tower.outcome, without_gradient=[]))
    row = next(row for row in compare(used, sharded, "float32") if row.check == "gradients")
    assert row.verdict == FAILED


def test_a_part_on_any_rank_is_a_gradient() -> None:
    result = {"losses": [], "grad_norms": [], "trainable": ["a", "b"], "facts": {}, "precision": "no"}
    result |= {"loads": [], "balance": [], "numel": {"a": 4, "b": 2}, "differ": None}
    results = [
        {**result, "with_gradient": ["a"], "moments": {"a": (3, 5.0), "b": (2, 9.0)}},
        {**result, "with_gradient": ["b"], "moments": {"a": (1, 4.0), "b": (2, 9.0)}},
    ]
    merged = ranks._merge_results(results, {})
    assert merged.outcome.without_gradient == []
    assert merged.outcome.sizes == {"a": 3.0, "b": 3.0}, "a is in parts, b is whole on both ranks"
    assert ranks._merge_results(results[:1], {}).outcome.without_gradient == ["b"]


def test_the_report_as_json() -> None:
    report = Report({"ranks": "2 on cpu"}, [Row("loss", math.nan, 1e-6, FAILED, "x")])
    assert report.verdict == FAILED
    told = json.loads(report.to_json())
    assert told["verdict"] == FAILED
    assert told["rows"][0] == {"check": "loss", "found": "nan", "tolerance": 1e-6, "verdict": FAILED, "note": "x"}


# Packing


def gpt2(**fields: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
    config.update(fields)
    return GPT2LMHeadModel(config)


# Preparing


def test_every_dropout_is_off() -> None:
    model = gpt2().train()
    ids = torch.arange(1, 20)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits)
    plain.remove_dropout(model)
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert model.config.attn_pdrop == 0.0


@pytest.fixture
def recipe() -> Recipe:
    return Recipe.load("quickstart")


UNUSABLE = TABLES["UNUSABLE"]


def test_a_config_that_cannot_be_used(tmp_path: Path, recipe: Recipe) -> None:
    path = tmp_path / "config.yaml"
    for text, message in UNUSABLE:
        if text is not None:
            path.write_text(text)
        with pytest.raises(BadInputError, match="--config") as found:
            launch.read_launch(path, recipe)
        assert message in str(found.value)


def test_the_ranks_get_what_the_launcher_would_give(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Accelerate's own, partly private, reading of the config: this tells when that moves."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    config = {
        "distributed_type": "FSDP",
        "num_machines": 2,
        "num_processes": 4,
        "mixed_precision": "bf16",
        "main_process_ip": "10.0.0.1",
        "machine_rank": 1,
        "fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": "hybrid", "fsdp_activation_checkpointing": True},
        "parallelism_config": {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    config_launch = launch.read_launch(tmp_path / "config.yaml", recipe)
    environment = launch.ranks_environment(dataclasses.replace(config_launch, on_cpu=True), tmp_path)
    expected = {
        "FSDP_SHARDING_STRATEGY": "hybrid",
        "FSDP_ACTIVATION_CHECKPOINTING": "true",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_CPU": "true",
        "PATH": None,
    }
    assert {key: environment.get(key) for key in expected} == expected


def test_the_number_of_cpu_ranks_that_is_given(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces the config's ranks; without --config no file is read, and the recipe names the strategy."""
    path = tmp_path / "config.yaml"
    path.write_text("num_processes: 8\nfsdp_config:\n  fsdp_version: 2\n  fsdp_sharding_strategy: zero2\n")
    monkeypatch.setattr(launch, "default_config_file", str(path))
    sharding = recipe.sharding.model_copy(update={"strategy": "zero1"})
    named = recipe.model_copy(update={"sharding": sharding})
    for config, given, cpu, number, strategy in (
        (path, recipe, 3, 3, "zero2"),
        (None, recipe, 3, 3, "zero3"),
        (None, named, 3, 3, "zero1"),
        (None, recipe, None, 8, "zero2"),
    ):
        found = launch.read_launch(config, given, cpu)
        assert (found.num_processes, found.values["num_processes"]) == (number, number)
        assert found.values["fsdp_config"]["fsdp_sharding_strategy"] == strategy
        assert found.on_cpu
        assert found.values.get("use_cpu", False) == (cpu is not None)
    path.write_text("num_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: hybrid\n")
    with pytest.raises(BadInputError, match="hybrid needs equal groups"):
        launch.read_launch(path, recipe, 2)
    seen: list[Any] = []
    monkeypatch.setattr("toolkit.verify.verify", lambda *_, cpu, **__: seen.append(cpu) or Report({}, []))
    assert CliRunner().invoke(app, ["verify", "quickstart", "--cpu", "2"]).exit_code == 0
    assert seen == [2]
