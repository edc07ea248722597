"""`toolkit verify`: the user's model and data for a few steps, plainly and sharded, and compared.

The plain side is an ordinary torch loop on one process, in float32, without any of the sharding code.
The sharded side is what `finetune` runs, built by the same functions, on ranks started as
`accelerate launch` would, on the CPU over gloo where there are too few GPUs. Dropout is switched off
on both sides, since ranks draw different masks.
Tolerances. Without mixed precision: losses 1e-6 and gradient norms 1e-5 relative, as the parity tests
hold over 20 steps; weights 1e-5 absolute, see `weight_tolerance`. Under bf16 the sharded run computes
in 16 bits and the plain one does not: losses 2e-2, norms 1e-1, weights twice what AdamW can move one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

from toolkit.errors import BadInputError, counted
from toolkit.objectives.plain_losses import PLAIN_LOSSES
from toolkit.recipe.recipe import Recipe
from toolkit.run.accelerator import quiet_libraries
from toolkit.verify.compare import compare
from toolkit.verify.launch import read_launch
from toolkit.verify.plain import run_plain
from toolkit.verify.ranks import run_ranks
from toolkit.verify.results import FAILED, NOT_USED, OK, Outcome, PlainRun, Report, Row, ShardedRun
from toolkit.verify.shrink import with_layers

__all__ = ["FAILED", "NOT_USED", "OK", "Outcome", "PlainRun", "Report", "Row", "ShardedRun", "compare", "verify"]

DEFAULT_STEPS = 5
DEFAULT_TIME_LIMIT_SECONDS = 1800.0


def verify(
    recipe: Recipe,
    accelerate_config: Path | None = None,
    *,
    steps: int = DEFAULT_STEPS,
    layers: int | None = None,
    time_limit_seconds: float = DEFAULT_TIME_LIMIT_SECONDS,
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compares the recipe's first optimizer steps, sharded, with a plain loop on one process.

    Args:
        accelerate_config: strategy, number of processes and precision; unset, what `accelerate launch`
            would read, or else two ranks under zero3.
        layers: keep only the first so many blocks of the model.
        time_limit_seconds: for all ranks together.
        tell: gets a line of progress now and then.

    Raises:
        BadInputError: where the recipe, the config or a number cannot be used.
        ToolkitError: where a rank fails, dies or does not finish; it names the rank.
    """
    _require_positive("--steps", steps)
    _require_positive("--layers", layers)
    _require_positive("--time-limit", time_limit_seconds)
    _require_comparable(recipe, layers)
    launch = read_launch(accelerate_config, recipe)
    quiet_libraries()
    with TemporaryDirectory(prefix="toolkit-verify-") as name, _undisturbed():
        folder = Path(name)
        recipe = _harmless(recipe, folder)
        recipe, weights = with_layers(recipe, layers, folder)
        tell("plain: one process, float32")
        plain = run_plain(recipe, launch, steps)
        if plain.padded is not None:
            # The ranks take the plain side's rows, whatever their rounding says.
            recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"packing": False})})
        tell(f"sharded: {counted(launch.num_processes, 'CPU rank' if launch.on_cpu else 'GPU rank')}")
        sharded = run_ranks(recipe, launch, len(plain.outcome.losses), folder, time_limit_seconds)
    facts = {"config": launch.origin, **sharded.facts, "weights": weights}
    if launch.on_cpu and not launch.values.get("use_cpu"):
        facts["ranks"] += "; this machine has too few GPUs"
    if plain.padded is not None:
        facts["packing"] = f"none, each row is padded: {plain.padded}"
    num_steps = len(plain.outcome.losses)
    facts["compared"] = f"{num_steps} optimizer steps" + ("; the run has no more" if num_steps < steps else "")
    return Report(facts, compare(plain, sharded, recipe.model.dtype))


def _require_comparable(recipe: Recipe, layers: int | None) -> None:
    """Raises BadInputError for what the plain side has no loop for."""
    wanted = {
        "objective.kind": (recipe.objective.kind, sorted(PLAIN_LOSSES)),
        "optimizer.kind": (recipe.optimizer.kind, ["adamw"]),
    }
    for key, (found, known) in wanted.items():
        if found not in known:
            raise BadInputError(f"{key}: {found} cannot be verified; the plain loop knows {', '.join(known)} only")
    for field in ("router_learning_rate", "router_weight_decay", "projector_learning_rate", "vision_learning_rate"):
        if getattr(recipe.optimizer, field) is not None:
            raise BadInputError(
                f"optimizer.{field} cannot be verified; the plain loop treats all weights alike: remove it"
            )
    if layers is not None and recipe.adapter.start_from is not None:
        raise BadInputError(
            "--layers: the adapter of adapter.start_from has weights of all blocks; leave --layers out, or remove "
            "adapter.start_from"
        )
    if recipe.data.streaming:
        raise BadInputError("data.streaming cannot be verified; set data.streaming=false")


def _require_positive(flag: str, value: float | None) -> None:
    if value is not None and value < 1:
        raise BadInputError(f"{flag}: found {value}; needs a number of at least 1")


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Leaves this process's random state and its logging as they were; transformers tells of cut blocks otherwise."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def _harmless(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe without anything that a run leaves behind."""
    training = recipe.training.model_copy(update={"output_dir": str(folder / "run")})
    logging = recipe.logging.model_copy(update={"trackers": []})
    return recipe.model_copy(update={"training": training, "logging": logging})
