"""The summary that a run prints before its first step."""

from __future__ import annotations

from typing import Any

from toolkit.errors import counted
from toolkit.model.adapters.adapters import has_adapter, trainable_share
from toolkit.model.part_sizes import adapter_fact, describe_parts, part_sizes
from toolkit.optim.schedule import schedule_fact, without_peak
from toolkit.pages.data_console import show_report
from toolkit.run.stages.stages import PreparedRun


def facts_of(run: PreparedRun) -> dict[str, str]:
    """Describes the run, and then says what its parts do: name -> sentence, in the order in which they are shown."""
    opened, inner, trained = run.opened, run.inner, run.on_meta.loaded.trained
    recipe, plugin, precision = opened.recipe, opened.plugin, opened.accelerator.mixed_precision
    length = f"{recipe.data.max_length}"
    if recipe.objective.spec.encoder_decoder:
        length += f" and {recipe.data.max_target_length or length}"
    facts: dict[str, str | None] = {
        "model": _model_fact(inner),
        "strategy": f"{plugin.strategy.name} ({plugin.strategy.summary})",
        "ranks": f"{opened.accelerator.num_processes} on {opened.device.type}",
        "precision": "float32" if precision == "no" else precision,
        "attention": run.on_meta.attention,
        "steps": f"{run.num_steps} of {counted(run.windows.samples_per_step, 'sample')} of {length} tokens",
        "rate": schedule_fact(recipe.schedule, recipe.optimizer.learning_rate, run.num_steps),
        "memory": run.planned.describe(),
        "parts": describe_parts(part_sizes(inner)),
        "adapters": adapter_fact(inner, trained) if has_adapter(inner) else None,
        "weights": run.fit.describe(),
        "recipe": "; ".join(recipe.notes),
        "checkpoints": _chosen_checkpoints(run) if recipe.sharding.activation_checkpointing == "auto" else None,
        "offload": plugin.engine.describe() if plugin.engine is not None else None,
        "compute": None if (compiled := run.sharded.compilation) is None else compiled.describe(),
    }
    return {name: fact for name, fact in {**facts, **opened.facts}.items() if fact}


def _chosen_checkpoints(run: PreparedRun) -> str:
    every = None if run.planned.checkpointing is None else run.planned.checkpointing.every
    blocks = {None: "none", 1: "every block", 2: "every 2nd block", 3: "every 3rd block"}
    return f"auto: {blocks.get(every, f'every {every}th block')}"


def _model_fact(inner: Any) -> str:
    num_trained, num_parameters = trainable_share(inner)
    fact = f"{inner.config.architectures[0]}, {num_parameters:,} parameters"
    if num_trained == num_parameters:
        return fact
    return f"{fact}, {num_trained:,} trained ({num_trained / num_parameters:.2%})"


def print_run_summary(run: PreparedRun) -> None:
    """Prints the facts, warnings, the data and the units."""
    recipe, plugin, console = run.opened.recipe, run.opened.plugin, run.opened.console
    for name, fact in run.opened.facts.items():
        # Not markup: names of models, files and folders may hold brackets.
        console.print(f"{name:>10}: {fact}", markup=False)
    if (warning := without_peak(recipe.schedule, recipe.optimizer.learning_rate, run.num_steps)) is not None:
        console.warn(warning)
    show_report(console, run.data.report.to_dict())
    if plugin.unit_plan is not None:
        console.print(plugin.unit_plan.table(), markup=False)
