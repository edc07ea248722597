"""The command that is recommended runs its row: read back, recipe and launch are that row again."""

from __future__ import annotations

import itertools
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from support.cases import cases

from toolkit.planning.hardware import hardware_of
from toolkit.planning.launch import launch_of
from toolkit.planning.setup import Setup, asked_setup
from toolkit.planning.table import Plan, plan, precision_of
from toolkit.recipe.combinations import refusals
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.accelerate_config import read_accelerate_config
from toolkit.sharding.plan.strategy import asks_for_offload, parse_strategy

ROOT = Path(__file__).parents[3]


def read_back(found: Plan, command: str) -> tuple[Setup, str]:
    """The setup and the precision that a command runs."""
    words = shlex.split(command)
    flags = {word: following for word, following in itertools.pairwise(words) if word.startswith("--")}
    installed = words[0] == "toolkit"
    config = f"accelerate_configs/{flags['--config']}.yaml" if installed else flags["--config_file"]
    said = read_accelerate_config(ROOT / config)
    word = flags.get("--strategy" if installed else "--fsdp_sharding_strategy")
    strategy = parse_strategy(said.strategy if word is None else word, "").name
    offload = asks_for_offload(said.strategy if word is None else word)
    precision = flags.get("--mixed_precision", said.mixed_precision)
    recipe = Recipe.load("quickstart", [word for word in words if "=" in word])
    assert recipe.sharding.strategy in (None, strategy), "a run refuses it"
    assert recipe.training.mixed_precision is None or precision in ("no", recipe.training.mixed_precision)
    assert not (offload and recipe.sharding.offload == "none"), "a run refuses it"
    offloaded = "optimizer" if offload or recipe.sharding.offload == "optimizer" else "none"
    settings = recipe.changed(sharding={"strategy": strategy, "offload": offloaded})
    assert refusals(settings) == [], "a run refuses it"
    ranks = int(flags.get("--num_processes") or flags.get("--gpus") or flags["--cpu"])
    shard = None
    if not installed:
        there = [str(ROOT / config) if word == config else word for word in words[2:]]
        settings, _, _ = _validate_launch_command(launch_command_parser().parse_args(there))
        assert settings.num_machines == 1, "it would wait for another"
        shard = prepare_multi_gpu_env(settings).get("PARALLELISM_CONFIG_DP_SHARD_SIZE")
    setup = asked_setup(recipe, ranks, found.hardware, strategy, offload, None if shard is None else int(shard))
    return setup, precision_of(recipe.training, precision, found.hardware)


TABLES = cases(__file__)
CASES = TABLES["CASES"]


@pytest.mark.slow
@pytest.mark.parametrize(("hardware", "ranks", "overrides", "precision"), CASES)
def test_the_command_of_each_row_runs_that_row(
    hardware: str,
    ranks: int,
    overrides: list[str],
    precision: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = Recipe.load("quickstart", overrides)
    found = plan(recipe, hardware_of(hardware), ranks, with_levers=False, mixed_precision=precision)
    commands = [(row.setup, launch_of(found, row, "quickstart", overrides).command) for row in found.rows]
    monkeypatch.chdir(tmp_path)  # no checkout: `toolkit train`, where it can
    commands += [(row.setup, launch_of(found, row, "quickstart", overrides).command) for row in found.rows]
    for expected, command in commands:
        setup, computes_in = read_back(found, command)
        if ranks == 1 and recipe.sharding.strategy is None:  # which strategy it is makes no difference
            setup = replace(setup, strategy=expected.strategy)
        assert setup == expected, command
        assert computes_in == found.mixed_precision, command
