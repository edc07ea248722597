"""The summary that a run prints before its first step."""

from __future__ import annotations

from typing import Any

from toolkit.errors import counted
from toolkit.model.adapters.adapters import base_of, has_adapter, trainable_share
from toolkit.model.part_sizes import adapter_fact
from toolkit.model.structure.model_parts import untrained_fact
from toolkit.optim.schedule import schedule_fact, without_peak
from toolkit.pages.data_console import show_report
from toolkit.run.stages.stages import OpenedRun, PackingCheck, PreparedRun
from toolkit.sharding.blocks.chunks import num_mlps_in_chunks


def facts_of(opened: OpenedRun, run: PreparedRun) -> dict[str, str]:
    """Describes the run without its parts: name -> sentence, in the order in which they are shown."""
    recipe, plugin, accelerator = opened.recipe, opened.plugin, opened.accelerator
    inner, checked, precision = run.inner, run.checked, accelerator.mixed_precision
    length = f"{recipe.data.max_length}"
    if recipe.objective.spec.encoder_decoder:
        length += f" and {recipe.data.max_target_length or length}"
    facts = {
        "model": _model_fact(inner),
        "strategy": f"{plugin.strategy.name} ({plugin.strategy.summary})",
        "ranks": f"{accelerator.num_processes} on {accelerator.device.type}",
        "precision": "float32" if precision == "no" else precision,
        "attention": run.on_meta.attention,
        "steps": f"{run.num_steps} of {counted(run.windows.samples_per_step, 'sample')} of {length} tokens",
        "rate": schedule_fact(recipe.schedule, recipe.optimizer.learning_rate, run.num_steps),
        "memory": run.planned.describe(),
    }
    if (fact := untrained_fact(base_of(inner), run.on_meta.loaded.trained)) is not None:
        facts["parts"] = fact
    if has_adapter(inner):
        facts["adapters"] = adapter_fact(inner, run.on_meta.loaded.trained)
    if run.ends is not None:
        facts["stop"] = run.ends
    if fact := run.fit.describe():
        facts["weights"] = fact
    if recipe.notes:
        facts["recipe"] = "; ".join(recipe.notes)
    if recipe.sharding.activation_checkpointing == "auto":
        every = None if run.planned.checkpointing is None else run.planned.checkpointing.every
        facts["checkpoints"] = f"auto: {_every_nth_block(every)}"
    facts |= _long_row_facts(recipe.sharding.sequence, run)
    if recipe.sharding.tensor > 1:
        by = f"a difference of {checked.parts_differ:.0e}" if checked.parts_differ is not None else "no row"
        facts["matrices"] = (
            f"cut by {recipe.sharding.tensor} ranks; checked: logits and gradients as of whole matrices ({by})"
        )
    if (fact := run.accumulation.describe()) is not None:
        facts["accumulate"] = fact
    if checked.head_loss is not None:
        facts["loss"] = checked.head_loss
    if checked.packing is not None:
        facts["packing"] = _packing_fact(checked.packing)
    if checked.padded is not None:
        facts["packing"] = f"none, each row is padded: {checked.padded}"
    if checked.alone is not None:
        facts["padding"] = f"none, the rows of a micro-batch run one after another: {checked.alone}"
    if plugin.engine is not None:
        facts["offload"] = plugin.engine.describe()
    if run.sharded.compilation is not None:
        facts["compute"] = run.sharded.compilation.describe()
    return facts


def _every_nth_block(every: int | None) -> str:
    return (
        "none"
        if every is None
        else {1: "every block", 2: "every 2nd block", 3: "every 3rd block"}.get(every, f"every {every}th block")
    )


def _long_row_facts(num_ranks: int, run: PreparedRun) -> dict[str, str]:
    """Describes rows that `num_ranks` ranks share, or that run in chunks."""
    checked, facts = "", {}
    if run.checked.parts_differ is not None:
        checked = f"; checked: logits and gradients as of whole rows (difference {run.checked.parts_differ:.0e})"
    if num_ranks > 1:
        facts["rows"] = f"each shared by {num_ranks} ranks{checked}"
    checkpointing = run.planned.checkpointing
    if checkpointing is not None and checkpointing.chunk_tokens is not None:
        size = f"{checkpointing.chunk_tokens:,} tokens at a time"
        facts["chunks"] = f"norms and {num_mlps_in_chunks(run.inner)} MLPs run for {size}{checked}"
    return facts


def _model_fact(inner: Any) -> str:
    num_trained, num_parameters = trainable_share(inner)
    fact = f"{inner.config.architectures[0]}, {num_parameters:,} parameters"
    if num_trained == num_parameters:
        return fact
    return f"{fact}, {num_trained:,} trained ({num_trained / num_parameters:.2%})"


def _packing_fact(check: PackingCheck) -> str:
    fill = f"{check.fill_rate:.1%} of the tokens are used"
    if check.differences is None:
        return f"{fill}; no sample holds two rows"
    replaced, alone = check.differences
    return f"{fill}; checked: packed rows do not attend to each other (change {replaced:.0e}, alone {alone:.0e})"


def print_run_summary(opened: OpenedRun, run: PreparedRun, facts: dict[str, str]) -> None:
    """Prints the facts, warnings, the data and the units."""
    recipe, plugin, console = opened.recipe, opened.plugin, opened.console
    for name, fact in facts.items():
        # Not markup: names of models, files and folders may hold brackets.
        console.print(f"{name:>10}: {fact}", markup=False)
    if (warning := without_peak(recipe.schedule, recipe.optimizer.learning_rate, run.num_steps)) is not None:
        console.warn(warning)
    show_report(console, run.data.report.to_dict())
    if plugin.unit_plan is not None:
        console.print(plugin.unit_plan.table(), markup=False)
