"""The table: what a setup needs against formulas written out here, what is recommended, and bad input."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from toolkit.cli.app import app
from toolkit.cli.shared import plan_console as show
from toolkit.errors import BadInputError
from toolkit.paths import GIB, shipped_folder
from toolkit.planning import check, table
from toolkit.planning.hardware import Hardware, hardware_of, presets
from toolkit.planning.launch import launch_of
from toolkit.planning.memory.probe import Prober
from toolkit.planning.planner import Planner, PlanRow, verdict_of
from toolkit.planning.table import Plan, plan, recommend
from toolkit.planning.workload.workload import workload_of
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.accelerate_config import read_accelerate_config
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.offload import executors
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

LAYERS, HIDDEN, INNER, VOCABULARY, LENGTH = 6, 64, 160, 2048, 128
P = (
    LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * 32 + 3 * HIDDEN * INNER + 2 * HIDDEN)
    + 2 * VOCABULARY * HIDDEN
    + HIDDEN
)
"""Parameters: attention with half as wide keys and values, gated layers, two norms; embeddings, head, final norm."""

SLACK = 40_000
"""What 57 tensors, rounded up to 512 bytes each, and the batch may add."""


def values(**changes: Any) -> dict[str, Any]:
    config = {"model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    training = {"output_dir": "out", "max_steps": 1, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
    return {
        "model": {"config": {**config, **heads}, "train_tokenizer_vocab_size": VOCABULARY},
        "data": {"train": "text.txt", "max_length": LENGTH},
        "optimizer": {"learning_rate": 1e-3},
        "training": {**training, **changes.pop("training", {})},
        "checkpoint": {"every_minutes": "never"},  # a save takes host memory
        **changes,
    }


def recipe(**changes: Any) -> Recipe:
    return Recipe.from_mapping(values(**changes))


ALONE = {"training": {"micro_batch_size": 1, "gradient_accumulation_steps": 1}}
"""One sample a step, so that a table has one size of micro-batches."""


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(recipe(), hardware_of("h100_sxm"), 8)


def row_of(found: Plan, strategy: str, *, offload: bool = False, shard: int | None = None, size: int = 2) -> PlanRow:
    """The row of a strategy without checkpointing."""
    return next(
        row
        for row in found.rows
        if (row.setup.strategy.name, row.setup.offload, row.setup.micro_batch_size) == (strategy, offload, size)
        and row.setup.checkpointing is None
        and shard in (None, row.setup.mesh.shard)
    )


def test_parameters_are_counted(found: Plan) -> None:
    assert found.num_parameters == found.num_trained == P


@pytest.mark.parametrize(
    ("strategy", "shard"), [("zero1", 8), ("zero2", 8), ("zero3", 8), ("hybrid", 2), ("hybrid", 4)]
)
def test_states_are_12_bytes_over_the_shard_group(found: Plan, strategy: str, shard: int) -> None:
    """float32 weights and two moments; tensors are rounded up to 512 bytes, and each has a count of steps."""
    row = row_of(found, strategy, shard=shard)
    assert 4 * P / shard <= row.peak.parameters <= 4 * P / shard + SLACK
    assert 8 * P / shard <= row.peak.optimizer <= 8 * P / shard + 3 * SLACK


def test_ddp_holds_everything_on_every_rank(found: Plan) -> None:
    peak = row_of(found, "ddp").peak
    assert peak.gathered == peak.communication == 0
    # Accumulation sums gradients beside the buckets.
    assert peak.parameters + peak.optimizer + peak.gradients == pytest.approx((4 + 8 + 4 + 4) * P, rel=0.05)


def test_offload_moves_16_bytes_a_parameter_to_the_host_of_a_node(found: Plan) -> None:
    """Master, two moments and a landing place in float32, for all ranks; two staging buffers of the largest unit."""
    row = row_of(found, "zero3", offload=True)
    staging = 8 * 2 * 2 * (VOCABULARY * HIDDEN + HIDDEN) / 8
    assert row.host_bytes == pytest.approx(16 * P + staging, rel=0.01)
    assert row.peak.optimizer == 0
    assert 2 * P / 8 <= row.peak.parameters <= 2 * P / 8 + SLACK


def test_every_combination_is_there_with_equal_samples_a_step(found: Plan) -> None:
    names = {row.setup.name for row in found.rows}
    sharded = {"zero1", "zero2", "zero3"}
    assert names >= {"ddp", "hybrid 2x4", "hybrid 4x2", *sharded, *(f"{name}+offload" for name in sharded)}
    assert {row.setup.micro_batch_size * row.setup.accumulation for row in found.rows} == {4}
    assert {row.setup.micro_batch_size for row in found.rows} == {1, 2, 4}
    assert {row.setup.checkpoints for row in found.rows} == {"none", "all"}
    assert {row.tokens for row in found.rows} == {4 * 8 * LENGTH}


def test_checkpoints_save_memory_and_send_as_much(found: Plan) -> None:
    plain = row_of(found, "zero3", size=4)
    again = next(row for row in found.rows if row.setup == replace(plain.setup, checkpointing=_all(found)))
    assert again.peak.total < plain.peak.total
    assert again.traffic == plain.traffic
    assert found.rows.index(plain) < found.rows.index(again), "of rows that send as much the simpler one comes first"


def _all(found: Plan) -> Any:
    return next(row.setup.checkpointing for row in found.rows if row.setup.checkpoints == "all")


def test_what_fits_and_sends_least_is_recommended(found: Plan) -> None:
    assert found.recommended is not None
    assert found.recommended.traffic.sent <= 1.01 * min(row.traffic.sent for row in found.rows if row.verdict == "fits")
    assert not found.recommended.setup.offload
    assert found.levers == ()


def test_offload_is_for_memory_and_groups_on_one_node_are_not_for_a_recipe(found: Plan) -> None:
    """Whatever they send: the same row without offload is worth more if it fits as well."""
    rows = [replace(row, verdict="fits") for row in found.rows if row.setup.checkpointing is None]
    plain = next(row for row in rows if row.setup.name == "zero3" and row.setup.micro_batch_size == 2)
    less = replace(plain.traffic, all_gather=0)

    def recommended(*others: PlanRow, ranks_per_node: int = 8, asked: PlanRow = plain) -> str:
        hardware = replace(found.hardware, devices_per_node=ranks_per_node)
        row, _ = recommend([plain, *others], hardware, asked.setup)
        assert row is not None
        return row.setup.name

    offloaded = replace(plain, setup=replace(plain.setup, offload=True), traffic=less)
    larger = replace(offloaded, setup=replace(offloaded.setup, micro_batch_size=64))
    assert recommended(offloaded) == "zero3"
    assert recommended(larger) == "zero3+offload", "without it so large a micro-batch does not fit"
    assert recommended(larger, replace(larger, setup=replace(larger.setup, offload=False), verdict="tight")) == (
        "zero3+offload"
    )
    groups = next(replace(row, traffic=less) for row in rows if row.setup.name == "hybrid 2x4")
    assert recommended(groups) == "zero3"
    assert recommended(groups, asked=groups) == recommended(groups, ranks_per_node=4) == "hybrid 2x4"
    far = replace(groups, between_nodes=plain.between_nodes + 1)
    assert recommended(far, ranks_per_node=4) == "zero3", "links between nodes come first"
    other = next(row for row in rows if row.setup.name == "zero1" and row.setup.micro_batch_size == 2)
    as_much = replace(other, traffic=plain.traffic, peak=replace(other.peak, activations=0, gathered=0))
    assert as_much.peak.total < plain.peak.total
    assert recommended(as_much) == "zero3", "of rows that send as much the recipe as it stands"
    assert recommended(as_much, asked=offloaded) == "zero1"
    fewer = replace(plain, setup=replace(plain.setup, micro_batch_size=4, accumulation=1))
    assert recommended(as_much, fewer, asked=offloaded) == "zero3", "fewer micro-batches"


def limited(gib: float) -> Hardware:
    """An H100 with so much memory beside what CUDA takes."""
    return hardware_of("h100_sxm", device_memory_gib=2 + gib)


def test_verdicts(found: Plan) -> None:
    peak = found.asked.peak.total
    for room, verdict in ((1.26, "fits"), (1.24, "tight"), (1.06, "tight"), (1.04, "no")):
        assert verdict_of(peak, 0, limited(room * peak / GIB))[0] == verdict


def test_by_block_needs_a_workspace_of_cublas_for_each_micro_batch(found: Plan) -> None:
    peak, setup = found.asked.peak.total, replace(found.asked.setup, accumulation=16, by_block=True)
    hardware = limited(peak / GIB)
    need = verdict_of(peak, 0, hardware, replace(setup, by_block=False))[1]
    assert verdict_of(peak, 0, hardware, setup)[1] - need == 16 * 32 * 2**20
    cpu = hardware_of("cpu")
    assert verdict_of(peak, 0, cpu, setup) == verdict_of(peak, 0, cpu)


@pytest.mark.slow
def test_what_helps_where_nothing_fits() -> None:
    nothing = plan(recipe(), limited(0.001), 8)
    assert nothing.recommended is None
    assert "nothing fits" in nothing.reason
    changes = [lever.change for lever in nothing.levers]
    assert "sharding.activation_checkpointing=1" in changes
    assert any(change.startswith("training.micro_batch_size=1 ") for change in changes)
    assert f"data.max_length={LENGTH // 2}" in changes
    assert all(lever.row.need < nothing.asked.need for lever in nothing.levers)


def test_host_memory_is_a_limit_too() -> None:
    small = replace(hardware_of("h100_sxm"), host_memory_bytes=8 * P)
    row = row_of(plan(recipe(**ALONE), small, 8), "zero3", offload=True, size=1)
    assert row.verdict == "no"
    assert "host memory" in row.problem


def test_thousands_of_ranks(found: Plan) -> None:
    many = plan(recipe(**ALONE), hardware_of("h100_sxm"), 4096)
    assert {row.setup.mesh.shard for row in many.rows if row.setup.strategy.replicated} >= {8, 64, 2048}
    assert row_of(many, "zero3", size=1).peak.parameters < row_of(found, "zero3").peak.parameters


def test_lora_holds_no_state_of_the_base() -> None:
    model = {"adapter": {"kind": "lora", "r": 4}, "export": {"merge": True}, **ALONE}
    adapted = plan(recipe(**model), hardware_of("h100_sxm"), 8)
    assert adapted.num_trained < 0.2 * adapted.num_parameters
    row = row_of(adapted, "zero3", size=1)
    assert row.peak.optimizer < 8 * P / 8 / 2


@pytest.mark.parametrize(
    "changes", [{"objective": {"kind": "preference"}}, {"objective": {"kind": "sequence_classification"}}]
)
def test_other_objectives(changes: dict[str, Any]) -> None:
    assert plan(recipe(**changes, **ALONE), hardware_of("a100_80"), 1).asked.verdict == "fits"


def test_the_recipes_own_settings_are_the_row_as_it_stands() -> None:
    sharding = {"strategy": "zero2", "activation_checkpointing": 2, "offload": "optimizer", "device_state_gib": 0.0015}
    sharding["offload_executor"] = "cpu_fused"
    asked = plan(recipe(sharding=sharding, **ALONE), hardware_of("l40s"), 2).asked
    assert (asked.setup.name, asked.setup.checkpoints) == ("zero2+offload", "every 2")
    # Master, moments and gradient of the embeddings and one block; a second block has no room.
    block = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * 32 + 3 * HIDDEN * INNER + 2 * HIDDEN
    held = 16 * (VOCABULARY * HIDDEN + block) / 2
    assert held <= 0.0015 * GIB < held + 16 * block / 2
    assert held <= asked.peak.optimizer <= held + SLACK


def test_the_command_is_one_that_the_recipe_takes(found: Plan) -> None:
    row = next(row for row in found.rows if row.setup.strategy.replicated and row.setup.checkpointing is not None)
    launch = launch_of(found, row, "quickstart", ["training.max_steps=7", "training.micro_batch_size=3"])
    words = shlex.split(launch.command)
    config = Path(words[words.index("--config_file") + 1])
    assert (Path(__file__).parents[3] / config).is_file()
    overrides = words[words.index("recipes/finetune.py") + 2 :]
    loaded = Recipe.load("quickstart", overrides)
    assert loaded.training.max_steps == 7
    assert loaded.training.micro_batch_size == row.setup.micro_batch_size
    assert loaded.sharding.activation_checkpointing == 1
    assert "--parallelism_config_dp_shard_size" in words


@pytest.mark.slow
def test_a_recipe_that_gathers_in_nodes_has_a_row_with_it_and_one_without() -> None:
    asked = recipe(sharding={"strategy": "zero3", "reshard_after_forward": 8}, **ALONE)
    found = plan(asked, hardware_of("h100_sxm"), 16, with_levers=False)
    rows = {row.setup.name: row for row in found.rows if row.setup.checkpointing is None}
    whole, in_nodes = rows["zero3"], rows["zero3 backward in 8"]
    assert found.asked.setup == in_nodes.setup
    # Backward gathers the blocks and the embeddings, in 2 bytes, among 8 ranks instead of 16.
    sent = whole.traffic.all_gather - in_nodes.traffic.all_gather
    assert sent == pytest.approx(2 * (P - VOCABULARY * HIDDEN - HIDDEN) * (15 / 16 - 7 / 8), rel=0.01)
    assert in_nodes.between_nodes < whole.between_nodes
    for row, told in ((whole, "null"), (in_nodes, "8")):
        assert f"sharding.reshard_after_forward={told}" in shlex.split(launch_of(found, row, "mine.yaml", []).command)
    console = Console(record=True, width=220, file=open("/dev/null", "w"))  # noqa: SIM115
    show.explain(console, found, in_nodes)
    assert "in backward, inside groups of 8 ranks" in console.export_text()
    with pytest.raises(BadInputError, match="3 is not a group inside of the 8 ranks of a node"):
        plan(recipe(sharding={"reshard_after_forward": 3}), hardware_of("h100_sxm"), 16)


def test_outside_a_checkout_the_command_is_toolkit_train(
    found: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [row for row in found.rows if row.setup.strategy.name == "zero2" and not row.setup.offload]
    words = shlex.split(launch_of(found, rows[0], "my recipe.yaml", []).command)
    assert words[:3] == ["toolkit", "train", "my recipe.yaml"]
    assert words[-4:] == ["--config", "zero2", "--gpus", str(rows[0].setup.ranks)]


def test_settings_with_spaces_are_quoted(found: Plan) -> None:
    assert found.recommended is not None
    launch = launch_of(found, found.recommended, "quickstart", ["logging.project_name=To be"])
    assert "logging.project_name=To be" in shlex.split(launch.command)


def test_what_is_printed(found: Plan) -> None:
    console = Console(record=True, width=220, file=open("/dev/null", "w"))  # noqa: SIM115
    show.show(console, found, None, every_row=True)
    assert found.recommended is not None
    row = row_of(found, "zero3")
    groups = replace(row.setup.mesh, shard=row.setup.mesh.shard // 2, tensor=2)
    for each in (found.recommended, replace(row, setup=replace(row.setup, mesh=groups))):
        show.explain(console, found, each)
    text = console.export_text()
    assert f"; {found.ranks} ranks share one copy" in text.rpartition("tensor 2")[2]
    assert "activations\n" in text
    assert f"{P:,} parameters" in text
    assert "whole tensors that collectives carry" in text


def test_each_row_has_its_figures(found: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    show.show(Console(quiet=True), found, None, every_row=True)
    header, *table = capsys.readouterr().out.splitlines()
    assert header.split() == ["strategy", "checkpoints", "micro-batch", "peak", "peak", "in", "host", "sent"]
    for line, row in zip(table, found.rows, strict=True):
        cells = [cell.strip() for cell in line.split("  ") if cell]
        figures = [show.gib(each) for each in (row.peak.total, row.host_bytes, row.traffic.sent) if each]
        assert cells[4:] == [figures[0], row.peak.moment, *figures[1:]], line
        assert cells[1] == row.setup.name, line


# The command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plan") / "recipe.yaml"
    path.write_text(json.dumps(values(**ALONE)))
    return str(path)


@pytest.mark.slow
def test_json(file: str) -> None:
    result = run(file, "--gpus", "2", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout[result.stdout.index("{") :])
    assert printed["parameters"] == P
    best = printed["recommended"]
    assert best["peak"]["total"] == sum(size for name, size in best["peak"].items() if name not in ("total", "moment"))


def test_nothing_fits_is_exit_code_1(file: str) -> None:
    assert run(file, "--device-memory-gib", "0.01").exit_code == 1


def test_bad_input(file: str) -> None:
    for line, said in {
        "--gpus 0": "--gpus: 0",
        "--gpus 12": "not a multiple of the 8 devices per node",
        "--hardware a100": "unknown 'a100' (did you mean 'a100_40'?)",
        "--device-memory-gib 0": "device_memory_gib: 0",
        "--gpus-per-node -1": "gpus_per_node: -1",
        "model.config.model_type=nonsense": "nonsense",
        "model.config.hidden_size=63": "model",
        "sharding.strategy=hybrid --gpus 8": "set the ranks of a group (parallelism_config_dp_shard_size",
        "--config nowhere.yaml": "nowhere.yaml",
    }.items():
        result = run(file, *line.split())
        assert isinstance(result.exception, BadInputError), result.output
        assert said in str(result.exception)


def test_rows_beyond_the_models_positions_are_refused_as_a_run_would() -> None:
    longer = recipe(data={"train": "text.txt", "max_length": 10**6})
    with pytest.raises(BadInputError, match=r"data\.max_length: 1000000 is more than the model's \d+ positions"):
        plan(longer, presets()["h100_sxm"], 2)


def test_what_the_accelerate_config_makes_impossible_is_refused() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
        ({}, {"strategy": "ddp", "offload": True}, "h100_sxm", "optimizer is not possible with sharding.strategy ddp"),
        ({"device_state_gib": 1.0}, {"strategy": "zero3"}, "h100_sxm", "device_state_gib has no effect without off"),
        ({}, {"mixed_precision": "fp16"}, "cpu", "mixed_precision fp16 is not possible with ranks on the CPU"),
    ]
    for sharding, configured, hardware, told in cases:
        with pytest.raises(BadInputError, match=told):
            plan(recipe(sharding=sharding), hardware_of(hardware), 2, **configured)


def test_a_setting_of_offload_waits_for_an_accelerate_config() -> None:
    own = recipe(sharding={"device_state_gib": 1.0}, **ALONE)
    assert not plan(own, hardware_of("h100_sxm"), 1, with_levers=False).asked.setup.offload


def test_an_accelerate_config_says_how_the_recipe_stands() -> None:
    folder = Path(__file__).parents[3] / "accelerate_configs"
    config = read_accelerate_config(folder / "zero3_offload.yaml")
    assert (config.strategy, config.mixed_precision, config.num_processes) == ("zero3+offload", "bf16", 8)
    hybrid = read_accelerate_config(folder / "hybrid.yaml")
    assert hybrid.strategy == "hybrid"
    assert hybrid.size("dp_shard") is not None


# Before a run


def planned(room: int, monkeypatch: pytest.MonkeyPatch, checkpointings: Any = (None,)) -> check.Planned:
    monkeypatch.setattr(check, "free_host_bytes", lambda: room)
    own = recipe()
    workload, mesh = workload_of(own, "no"), MeshShape(1, 2)
    return check.plan_run(own, workload, STRATEGIES["zero3"], mesh, False, checkpointings, torch.device("cpu"))


def test_on_cpu_ranks_offload_is_no_saving() -> None:
    """Host and device are one memory: masters, moments and landing places stay in it, and two staging buffers."""
    planner = Planner(recipe(), workload_of(recipe(), "bf16"), hardware_of("cpu"))
    kept, offloaded = (planner.row(replace(_asked(), offload=offload)) for offload in (False, True))
    assert offloaded.host_bytes == 0
    assert offloaded.peak.optimizer == pytest.approx(16 * P / 2, rel=0.1)
    assert offloaded.peak.parameters + offloaded.peak.optimizer > kept.peak.parameters + kept.peak.optimizer
    assert offloaded.need > 1.05 * offloaded.peak.total


def test_averaged_weights_are_part_of_a_plan() -> None:
    """4 bytes a parameter, sharded over two ranks: on the device in every moment, and twice in a save of the state."""

    def planned(**training: Any) -> tuple[int, int]:
        own = recipe(training=training, checkpoint={"every_steps": 1})
        planner = Planner(own, workload_of(own, "bf16"), hardware_of("h100_sxm"))
        return planner.peak(_asked()).total, planner.state.of_rank(_asked())

    peak, saved = planned()
    peak_with, saved_with = planned(ema=0.9)
    assert peak_with - peak == pytest.approx(4 * P / 2, rel=0.1)
    assert saved_with - saved == pytest.approx(2 * 4 * P / 2, rel=0.01)


def test_a_save_is_counted_on_the_host_as_long_as_it_may_last() -> None:
    """Beside the state's copy of 12 bytes a parameter, the file that is written; a file's worth here is all of it."""

    def host_bytes(asynchronous: bool, **saves: Any) -> int:
        own = recipe(checkpoint={"asynchronous": asynchronous, **saves})
        planner = Planner(own, workload_of(own, "bf16"), hardware_of("h100_sxm"))
        return planner.state.of_rank(_asked())

    for saves in ({"every_steps": 1}, {"every_minutes": 5.0}, {}):  # without a word there is one each half hour
        assert host_bytes(True, **saves) == pytest.approx(24 * P / 2, rel=0.01)
        assert host_bytes(False, **saves) == pytest.approx(12 * P / 2, rel=0.01)
    assert host_bytes(True, every_minutes="never") == 0


def test_a_cpu_rank_pauses_for_a_save_and_holds_no_copy() -> None:
    """Between two steps it holds weights, moments and the file that is written: here 12 bytes a parameter once more."""

    def peaks(**saves: Any) -> tuple[int, dict[str, int]]:
        own = recipe(checkpoint=saves)
        planner = Planner(own, workload_of(own, "no"), hardware_of("cpu"))
        return planner.peak(_asked()).total, {moment.moment: moment.total for moment in planner.moments(_asked())}

    never, paused, copied = (
        peaks(**saves)
        for saves in ({"every_minutes": "never"}, {"every_steps": 1}, {"every_steps": 1, "asynchronous": True})
    )
    assert "save" not in never[1]
    assert "save" not in copied[1]
    assert paused[1].pop("save") == pytest.approx(24 * P / 2, rel=0.02)
    assert paused[1] == never[1], "steps hold what they hold without saves"
    assert copied[0] - never[0] == pytest.approx(24 * P / 2, rel=0.02)


def test_state_that_streams_through_the_device_takes_buffers_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the longest unit where that is shorter; `auto` never streams."""
    longest = VOCABULARY * HIDDEN + HIDDEN

    def peak(executor: str | None) -> Any:
        own = recipe(sharding={"offload_executor": executor, "offload": "optimizer"})
        return Planner(own, workload_of(own, "bf16"), hardware_of("h100_sxm")).peak(replace(_asked(), offload=True))

    streamed, stepped = peak("device_stream"), peak("cpu_torch")
    assert streamed.total - stepped.total == streamed.optimizer == pytest.approx(32 * longest / 2, rel=0.01)
    assert peak(None) == peak("auto") == stepped
    monkeypatch.setattr(executors, "STREAM_CHUNK", 128)
    assert peak("device_stream").optimizer == 32 * 128


def test_a_gpu_run_whose_host_is_too_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "free_host_bytes", lambda: 1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check._require_host_memory(500)
    with pytest.raises(BadInputError, match=r"checkpoint.asynchronous=false"):
        check._require_host_memory(501)


def test_a_run_that_cannot_fit_is_stopped_with_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(2**34, monkeypatch)
    planner = Planner(recipe(), workload_of(recipe(), "no"), hardware_of("cpu"))
    assert found.peak.total == max(m.total for m in planner.moments(_asked())) > 10**6
    assert found.peak_bytes is not None
    assert found.peak_bytes - int(1.25 * found.peak.total) == found.process > 10**8, "Python and its libraries"
    assert "loss" in found.describe() or "head" in found.describe()
    with pytest.raises(BadInputError, match=r"cannot fit.*It would with: .*activation_checkpointing"):
        planned(found.peak.total - 1, monkeypatch)
    with pytest.raises(BadInputError, match="No single change"):
        planned(1000, monkeypatch)


@pytest.mark.slow
def test_checkpointing_by_the_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few blocks as the memory needs, with the headroom of a row that fits."""
    tried = (None, Checkpointing(2), Checkpointing(1))
    peaks = [planned(2**34, monkeypatch, [one]).peak.total for one in tried]
    none, half, all_of_them = (peak or 0 for peak in peaks)
    assert none > half > all_of_them
    for room, chosen in (
        (1.26 * none, 0),
        (1.24 * none, 1),
        (1.26 * half, 1),
        (1.24 * half, 2),
        (1.01 * all_of_them, 2),
    ):
        assert planned(int(room), monkeypatch, tried).checkpointing == tried[chosen]


def test_a_model_that_cannot_be_probed_is_trained_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def looks_at_values(*_: object) -> None:
        raise RuntimeError("values are needed")

    monkeypatch.setattr(Prober, "probe", looks_at_values)
    found = planned(2**34, monkeypatch)
    assert found.peak_bytes is None
    assert "not planned" in found.describe()
    assert "RuntimeError" in found.describe()


def _asked() -> Any:
    from toolkit.planning.setup import asked_setup

    return asked_setup(recipe(), 2, hardware_of("cpu"), "zero3", False, None)


@pytest.mark.slow
def test_long_rows_have_a_column_of_the_ranks_that_share_them() -> None:
    long, steps = 8192, {"training": {"micro_batch_size": 1, "gradient_accumulation_steps": 2}}
    data, sharding = {"train": "text.txt", "max_length": long, "packing": False}, {"activation_checkpointing": 1}
    asked = values(**steps, sharding=sharding) | {"data": data}
    asked["model"]["config"]["max_position_embeddings"] = long
    asked = Recipe.from_mapping(asked)
    found = plan(asked, hardware_of("h100_sxm"), 8, with_levers=False)
    shared = {row.traffic.sequence: row for row in found.rows if row.traffic.sequence > 1 and not row.setup.offload}
    assert sorted(shared) == [2, 4], "4 heads, and 8 ranks"
    for parts, row in shared.items():
        assert row.setup.accumulation == 2 * parts, "a step has as many samples"
        assert row.tokens == found.asked.tokens
        assert row.peak.activations == pytest.approx(found.asked.peak.activations / parts, rel=0.1)
        # Of bfloat16 queries and outputs of 4 heads, keys and values of 2, or of as many as ranks, 16 wide each: there
        # and back, and there once more for the checkpoint; all but a rank's own part, in 2 x n micro-batches.
        sent = 3 * LAYERS * (2 * 4 + 2 * parts) * 16 * (long // parts) * 2 * (parts - 1) // parts
        assert row.traffic.exchanged == 2 * parts * sent
    command = launch_of(found, shared[4], "r", []).command
    assert "sharding.sequence=4" in command
    assert "training.gradient_accumulation_steps=8" in command
    short = plan(recipe(**steps, sharding=sharding), hardware_of("h100_sxm"), 8, with_levers=False)
    assert {row.traffic.sequence for row in short.rows} == {1}


def in_groups(found: Plan) -> dict[tuple[int, int, bool], PlanRow]:
    """The rows of zero3 whose ranks share rows or cut matrices, one row at a time: by sequence, tensor and offload."""
    rows = [row for row in found.rows if row.setup.checkpointing == Checkpointing(1)]
    keys = [(row.traffic.sequence, row.setup.mesh.tensor, row.setup.offload) for row in rows]
    return {key: row for key, row in zip(keys, rows, strict=True) if row.setup.strategy.name == "zero3"}


@pytest.mark.slow
def test_tensor_groups_are_tried_where_a_gathered_unit_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or nothing fits. They are planned as the recipe that asks for them is, and a step keeps its samples."""
    sharding, steps = {"strategy": "zero3", "activation_checkpointing": 1}, {"micro_batch_size": 1}
    asked, hardware = recipe(sharding=sharding, training=steps), hardware_of("h100_sxm")
    head = 2 * VOCABULARY * HIDDEN / hardware.memory_bytes
    for share, sizes in ((1.1 * head, {1}), (0.9 * head, {1, 2, 4})):
        monkeypatch.setattr(table, "LARGE_UNIT", share)
        found = plan(asked, hardware, 8, with_levers=False)
        assert {tensor for _, tensor, _ in in_groups(found)} == sizes, "4 heads, 8 ranks"
    found = plan(asked, limited(0.001), 8, with_levers=False)
    rows = in_groups(found)
    for size in (2, 4):
        row = rows[1, size, False]
        cut = recipe(sharding={**sharding, "tensor": size}, training={**steps, "gradient_accumulation_steps": 2 * size})
        alone = plan(cut, limited(0.001), 8, with_levers=False).asked
        assert replace(row.setup, sequence=None) == alone.setup
        assert (row.peak, row.traffic) == (alone.peak, alone.traffic)
        assert row.tokens == found.asked.tokens
        assert f"sharding.tensor={size}" in shlex.split(launch_of(found, row, "r", []).command)


@pytest.mark.slow
def test_a_recipe_in_tensor_groups_is_compared_with_others_and_with_none() -> None:
    """Rows that ranks share are of whole matrices: a run takes only one of the two."""
    long, config = 8192, values()["model"]["config"] | {"max_position_embeddings": 8192}
    changes = {"model": {"config": config, "train_tokenizer_vocab_size": VOCABULARY}, **ALONE}
    changes |= {"data": {"train": "text.txt", "max_length": long, "packing": False}}
    sharding = {"strategy": "zero3", "activation_checkpointing": 1}
    training = {"micro_batch_size": 1, "gradient_accumulation_steps": 4}
    asked = recipe(**changes | {"training": training}, sharding={**sharding, "tensor": 4})
    found = plan(asked, hardware_of("h100_sxm"), 8, with_levers=False)
    rows = in_groups(found)
    assert {key[:2] for key in rows} == {(1, 1), (1, 2), (1, 4), (2, 1), (4, 1)}
    uncut = recipe(**changes, sharding=sharding)
    for row in in_groups(plan(uncut, hardware_of("h100_sxm"), 8, with_levers=False)).values():
        same = rows[row.traffic.sequence, 1, row.setup.offload]
        assert (same.peak, same.traffic) == (row.peak, row.traffic)
        words = shlex.split(launch_of(found, same, "r", []).command)
        assert "sharding.tensor=1" in words
    assert "sharding.tensor=2" in shlex.split(launch_of(found, rows[1, 2, False], "r", []).command)


def test_paths_in_the_printed_command_are_quoted(found: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a b;c"
    for name in ("accelerate_configs", "recipes"):
        shutil.copytree(shipped_folder(name), place / name)
    monkeypatch.setattr("toolkit.planning.launch.shipped_folder", lambda name: place / name)
    monkeypatch.chdir(tmp_path)  # a checkout, as it seems
    words = shlex.split(launch_of(found, row_of(found, "zero3"), "quickstart", []).command)
    assert [word for word in words if "a b;c" in word] == [
        "a b;c/accelerate_configs/zero3.yaml",
        "a b;c/recipes/finetune.py",
    ]
