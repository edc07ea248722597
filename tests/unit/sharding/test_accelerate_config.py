"""Reading an Accelerate config: what it says, and what cannot be right in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cases import cases

from toolkit import Recipe
from toolkit.cli.commands.plan import _as_configured
from toolkit.cli.ranks.launch_options import launcher_options
from toolkit.errors import BadInputError
from toolkit.planning.hardware import presets
from toolkit.planning.table import plan
from toolkit.sharding.accelerate_config import AccelerateConfig, read_accelerate_config
from toolkit.verify.launch import read_launch

TABLES = cases(__file__)


def test_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "num_processes: 8\nmixed_precision: 'no'\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID\n"
        "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4\n"
    )
    config = read_accelerate_config(path)
    assert (config.num_processes, config.mixed_precision, config.strategy) == (8, "no", "HYBRID")
    assert (config.size("dp_replicate"), config.size("dp_shard"), config.origin) == (2, 4, str(path))


def test_a_plan_has_the_checkpointing_of_the_config(tmp_path: Path) -> None:
    """As a run under `accelerate launch`, which takes it where the recipe says nothing."""
    path = tmp_path / "config.yaml"
    path.write_text("fsdp_config: {fsdp_activation_checkpointing: true, fsdp_activation_checkpointing_offload: 'TRUE'}")
    for overrides, found in (([], (1, True)), (["sharding.activation_checkpointing=2"], (2, False))):
        planned = _as_configured(Recipe.load("quickstart", overrides), read_accelerate_config(path)).sharding
        assert (planned.activation_checkpointing, planned.offload_checkpoints) == found


def test_what_it_does_not_say() -> None:
    config = AccelerateConfig({"fsdp_config": None}, "here")
    found = config.num_processes, config.mixed_precision, config.strategy, config.size("dp_replicate")
    assert found == (None,) * 4


@pytest.mark.parametrize(("values", "message"), TABLES["WRONG"])
def test_what_cannot_be_right(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match="--config: here: ") as found:
        AccelerateConfig(values, "here").check()
    assert message in str(found.value)


def test_its_values_are_those_that_accelerate_reads(tmp_path: Path) -> None:
    """Accelerate reads YAML 1.1. What it reads otherwise than it is written is refused, with the line."""
    path = tmp_path / "config.yaml"
    path.write_text("num_processes: 1_0\nuse_cpu: yes\ndebug: off\ndowncast_bf16: 'no'\nmain_process_ip: 10.0.0.1\n")
    ours = read_accelerate_config(path).values
    assert ours == yaml.safe_load(path.read_text())
    assert (ours["num_processes"], ours["use_cpu"], ours["downcast_bf16"]) == (10, True, "no")
    for text, problem in (
        ("num_processes: 010", "line 2, column 16: 010 would be read as 8; write a finite number"),
        ("main_process_port: 2:30", "2:30 would be read as 150;"),
        ("num_processes: 2\nnum_processes: 4", "line 3, column 1: the key 'num_processes' appears twice"),
        ("fsdp_config:\n\ta: 1", "line 3, column 1: found character '\\t'"),
    ):
        path.write_text(f"debug: false\n{text}\n")
        with pytest.raises(BadInputError) as found:
            read_accelerate_config(path)
        assert f"--config: {path} is not readable as YAML: " in str(found.value)
        assert problem in str(found.value)


OTHER_AXES = {
    "cp": "context parallelism; remove it. In a recipe, sharding.sequence",
    "sp": "sequence parallelism of DeepSpeed; remove it. In a recipe, sharding.sequence",
}


def readers_of(path: Path) -> dict[str, Callable[[], object]]:
    """The commands that read a config."""
    recipe = Recipe.load("quickstart")
    return {
        "plan": lambda: read_accelerate_config(path),
        "verify": lambda: read_launch(path, recipe),
        "train": lambda: launcher_options(recipe, None, 2, None, str(path)),
    }


@pytest.mark.parametrize(("values", "told"), TABLES["OTHERS"])
def test_configs_for_another_backend_are_refused(values: str, told: str | None, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"num_processes: 2\n{values}\n")
    for read in readers_of(path).values():
        with nullcontext() if told is None else pytest.raises(BadInputError, match=f"--config: {path}: {told}"):
            read()


def test_axes_that_the_backend_does_not_run_are_refused_wherever_a_config_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    readers = readers_of(path)
    head = "num_processes: 2\nfsdp_config:\n  fsdp_sharding_strategy: zero3\nparallelism_config:\n"
    wrong = []
    for axis, told in OTHER_AXES.items():
        key = f"parallelism_config_{axis}_size"
        for size, wanted in ((2, f"{key} is 2, but the sharding backend has no {told}"), ("two", f"{key} is 'two'")):
            path.write_text(f"{head}  {key}: {size}\n")
            for name, read in readers.items():
                try:
                    read()
                    wrong.append(f"{name} takes {key} {size}")
                except BadInputError as error:
                    wrong += [] if f"--config: {path}: " in str(error) and wanted in str(error) else [str(error)]
        # Following the advice leads to a run: the axis is gone, and the recipe shares rows.
        path.write_text(f"{head}  {key}: 1\n")
        for read in readers.values():
            read()
    assert wrong == []
    shared = Recipe.load("quickstart", ["sharding.sequence=2"])
    assert read_launch(path, shared).num_processes == 2
    assert plan(shared, presets()["h100_sxm"], 2, strategy="zero3").recommended is not None
