"""Every YAML of the repository is loaded, and every config launched: none rots unseen."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from support.launches import launch

from toolkit.recipe.recipe import Recipe
from toolkit.sharding.plan.strategy import parse_strategy

ROOT = Path(__file__).parents[2]
FOLDERS = {"recipes", "accelerate_configs"}
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
CONFIGS = sorted((ROOT / "accelerate_configs").rglob("*.yaml"))


@pytest.mark.first
def test_there_is_no_yaml_that_no_test_reads() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.yaml", "*.yml"], cwd=ROOT, text=True, capture_output=True, check=True
    ).stdout.split()
    # Read by tests of planning, sharding and cluster, and by tests/docs.
    data = {"toolkit/planning/hardware.yaml", "toolkit/sharding/fsdp2/private_names.yaml"}
    data |= {"docs/site/mkdocs.yml", "docs/examples/harness/choices.yaml"}
    data |= {"docs/examples/kubernetes.yaml", "docs/examples/skypilot.yaml", "tests/control.yaml"}
    data |= {name for name in listed if (ROOT / name).with_suffix(".py").is_file()}  # tables of the test of their name
    assert {Path(name).parts[0] for name in set(listed) - data} <= FOLDERS


@pytest.mark.first
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_described(recipe: Path) -> None:
    """tests/traces runs each of them."""
    assert Recipe.load(recipe).description, "the line that `toolkit recipes` shows"


@pytest.mark.first
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_config(config: Path) -> None:
    text = config.read_text()
    assert text.startswith("# "), "a comment says when to choose it"
    values = yaml.safe_load(text)
    load_config_from_file(str(config))
    assert values["distributed_type"] == "FSDP"
    assert values["fsdp_config"]["fsdp_version"] == 2
    assert parse_strategy(values["fsdp_config"]["fsdp_sharding_strategy"], config.name)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_config_launches(config: Path, tmp_path: Path) -> None:
    """With the launcher's own reading of the file; the script only tells what it was given."""
    script = tmp_path / "tell.py"
    script.write_text(
        "from accelerate import Accelerator\n"
        "from toolkit import sharding_kwargs\n"
        "a = Accelerator(**sharding_kwargs())\n"
        "plugin = a.state.parallelism_config.plugin\n"
        "a.print('TOLD', plugin.text, a.num_processes, a.distributed_type, a.mixed_precision)\n"
        "a.wait_for_everyone()\n"  # rank 0 has the store that the others make their groups by
        "a.end_training()\n"
    )
    values = yaml.safe_load(config.read_text())
    strategy = values["fsdp_config"]["fsdp_sharding_strategy"]
    num_processes = 4 if strategy == "hybrid" else 2
    values |= {"num_processes": num_processes, "num_machines": 1, "main_process_port": 0, "rdzv_backend": "static"}
    for key in ("machine_rank", "main_process_ip"):
        values.pop(key, None)
    if "parallelism_config" in values:
        values["parallelism_config"] = {f"parallelism_config_dp_{axis}_size": 2 for axis in ("replicate", "shard")}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    told = launch(tmp_path / "config.yaml", script, folder=tmp_path)
    line = next(line for line in told.splitlines() if line.startswith("TOLD"))
    kind = "MULTI_CPU" if strategy == "ddp" else "FSDP"
    assert line.split()[1:] == [strategy, str(num_processes), f"DistributedType.{kind}", values["mixed_precision"]]
