"""`toolkit verify`: trains the user's model on the user's data for a few steps, plain and sharded, and compares.

The plain side is an ordinary torch loop on one process, in float32, without any of the sharding code.
The sharded side is what `finetune` runs, built by the same functions. Its ranks are started as
`accelerate launch` would start them, on the CPU over gloo if there are too few GPUs. Dropout is off on
both sides, because ranks draw different masks.

Tolerances without mixed precision: losses 1e-6 and gradient norms 1e-5 relative, as in the parity tests
over 20 steps; weights 1e-5 absolute, see `weight_tolerance`. Under bf16 the sharded run computes in 16
bits and the plain one does not: losses 2e-2, norms 1e-1, weights twice as far as AdamW can move one.
A model that samples itself learns on both sides from what the plain one draws, whose first step the ranks
draw, too. Its losses are near 0, and their differences are absolute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

from toolkit.errors import BadInputError, counted
from toolkit.recipe.recipe import Recipe
from toolkit.run.stages.accelerator import quiet_libraries
from toolkit.verify.compare import compare
from toolkit.verify.launch import read_launch
from toolkit.verify.plain import run_plain
from toolkit.verify.plain_losses import PLAIN_LOSSES
from toolkit.verify.ranks import run_ranks
from toolkit.verify.results import FAILED, NOT_USED, OK, Outcome, PlainRun, Report, Row, ShardedRun
from toolkit.verify.rollouts import write

__all__ = ["FAILED", "NOT_USED", "OK", "Outcome", "PlainRun", "Report", "Row", "ShardedRun", "compare", "verify"]

DEFAULT_STEPS = 5
DEFAULT_TIME_LIMIT_SECONDS = 1800.0


def verify(
    recipe: Recipe,
    accelerate_config: Path | None = None,
    *,
    cpu: int | None = None,
    steps: int = DEFAULT_STEPS,
    time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS,
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compares the first optimizer steps of a sharded run of the recipe with a plain loop on one process.

    Args:
        recipe: the recipe to verify.
        accelerate_config: the file with strategy, number of processes and precision. If unset, the one that
            `accelerate launch` would read, or else two ranks under the recipe's strategy or zero3.
        cpu: the number of ranks on the CPU, in place of the config's ranks. None leaves it to the config.
        steps: the number of optimizer steps to compare.
        time_limit_seconds: the time limit for all ranks together.
        tell: called with a line of progress now and then.

    Raises:
        BadInputError: if the recipe, the config or a number cannot be used.
        ToolkitError: if a rank fails, dies or does not finish. The message names the rank.
    """
    _require_positive("--steps", steps)
    _require_positive("--time-limit", time_limit_seconds)
    _require_comparable(recipe)
    launch = read_launch(accelerate_config, recipe, cpu)
    quiet_libraries()
    with TemporaryDirectory(prefix="toolkit-verify-") as temporary, _state_restored():
        folder = Path(temporary)
        # Nothing is left of it: a temporary output folder, and no trackers.
        recipe = recipe.changed(training={"output_dir": str(folder / "run")}, logging={"trackers": []})
        tell("plain: one process, float32")
        plain = run_plain(recipe, launch, steps)
        if plain.padded is not None:
            # The ranks use the plain side's rows, whatever their own check of packing would say.
            recipe = recipe.changed(data={"packing": False})
        if plain.drawn is not None:
            write(folder, plain.drawn)
        tell(f"sharded: {counted(launch.num_processes, 'CPU rank' if launch.on_cpu else 'GPU rank')}")
        sharded = run_ranks(recipe, launch, len(plain.outcome.losses), folder, time_limit_seconds)
    name = recipe.model.name_or_path
    weights = "random, as the recipe says" if name is None else f"of {name}"
    facts = {"config": launch.origin, **sharded.facts, "weights": weights}
    if launch.on_cpu and not launch.values.get("use_cpu"):
        facts["ranks"] += "; this machine has too few GPUs"
    if plain.padded is not None:
        facts["packing"] = f"none, each row is padded: {plain.padded}"
    num_steps = len(plain.outcome.losses)
    facts["compared"] = f"{num_steps} optimizer steps" + ("; the run has no more" if num_steps < steps else "")
    return Report(facts, compare(plain, sharded, recipe.model.dtype))


def _require_comparable(recipe: Recipe) -> None:
    """Raises BadInputError if the plain loop does not support a setting of the recipe."""
    wanted = {
        "objective.kind": (recipe.objective.kind, sorted(PLAIN_LOSSES)),
        "optimizer.kind": (recipe.optimizer.kind, ["adamw"]),
    }
    for key, (found, known) in wanted.items():
        if found not in known:
            raise BadInputError(f"{key}: {found} cannot be verified; the plain loop knows {', '.join(known)} only")
    if recipe.objective.own_loss is not None:
        raise BadInputError("objective.loss: a function of your own cannot be verified; remove it")
    if recipe.optimizer.learning_rates:
        raise BadInputError(
            "optimizer.learning_rates cannot be verified; the plain loop treats all weights alike: remove it"
        )
    if recipe.data.streaming:
        raise BadInputError("data.streaming cannot be verified; set data.streaming=false")


def _require_positive(flag: str, value: float) -> None:
    if not value >= 1:
        raise BadInputError(f"{flag}: found {value}; needs a number of at least 1")


@contextlib.contextmanager
def _state_restored() -> Iterator[None]:
    """Restores this process's random state and logging. Silences transformers."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
