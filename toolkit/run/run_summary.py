"""What a run tells about itself before its first step."""

from __future__ import annotations

from accelerate import Accelerator
from torch import nn

from toolkit.errors import counted
from toolkit.model.adapters import adapter_fact, base_of, has_adapter, trainable_share
from toolkit.model.parts import untrained_fact
from toolkit.model.quantised import quantised_fact
from toolkit.objectives.balance import experts_fact
from toolkit.objectives.teacher import teacher_fact
from toolkit.optim.schedule import schedule_fact, without_peak
from toolkit.pages.data_console import show_report
from toolkit.recipe.recipe import Recipe
from toolkit.run.parts import Leaks, Parts
from toolkit.sharding.chunks import num_mlps_in_chunks
from toolkit.sharding.plugin import ShardingPlugin
from toolkit.terminal import Terminal


def facts_of(accelerator: Accelerator, recipe: Recipe, plugin: ShardingPlugin, parts: Parts) -> dict[str, str]:
    """Name -> sentence, in the order in which they are shown."""
    precision = accelerator.mixed_precision
    length = f"{recipe.data.max_length}"
    if recipe.objective.kind == "seq2seq":
        length += f" and {recipe.data.max_target_length or length}"
    facts = {
        "model": _model_fact(accelerator, parts),
        "strategy": f"{plugin.strategy.name} ({plugin.strategy.summary})",
        "ranks": f"{accelerator.num_processes} on {accelerator.device.type}",
        "precision": "float32" if precision == "no" else precision,
        "attention": parts.attention,
        "steps": f"{parts.num_steps} of {counted(parts.windows.samples_per_step, 'sample')} of {length} tokens",
        "rate": schedule_fact(recipe.schedule, recipe.optimizer.learning_rate, parts.num_steps),
        "memory": parts.planned.describe(),
    }
    inner = accelerator.unwrap_model(parts.model)
    if (told := untrained_fact(base_of(inner))) is not None:
        facts["parts"] = told
    if has_adapter(inner):
        facts["adapters"] = adapter_fact(inner)
    if (told := quantised_fact(inner)) is not None:
        facts["quantised"] = told
    if parts.teacher is not None:
        facts["teacher"] = teacher_fact(recipe, parts.teacher)
    if told := inner.fit.describe():
        facts["weights"] = told
    if recipe.notes:
        facts["recipe"] = "; ".join(recipe.notes)
    if recipe.sharding.activation_checkpointing == "auto":
        every = None if parts.planned.checkpointing is None else parts.planned.checkpointing.every
        facts["checkpoints"] = f"auto: {_every_nth_block(every)}"
    facts |= _long_row_facts(recipe, parts, inner)
    if recipe.training.ema is not None:
        facts["average"] = f"of the weights, decay {recipe.training.ema:g} a step; it is evaluated and exported"
    if (told := parts.accumulation.describe()) is not None:
        facts["accumulate"] = told
    if parts.head_loss is not None:
        facts["loss"] = parts.head_loss
    if parts.balance.routers:
        facts["experts"] = experts_fact(inner, parts.balance, parts.accumulation.by_block is not None)
    if parts.leaks is not None:
        facts["packing"] = _packing_fact(parts.leaks)
    if parts.padded is not None:
        facts["packing"] = f"none, each row is padded: {parts.padded}"
    if plugin.engine is not None:
        facts["offload"] = plugin.engine.describe()
    if parts.compilation is not None:
        facts["compute"] = parts.compilation.describe()
    return facts


def _every_nth_block(every: int | None) -> str:
    return (
        "none"
        if every is None
        else {1: "every block", 2: "every 2nd block", 3: "every 3rd block"}.get(every, f"every {every}th block")
    )


def _long_row_facts(recipe: Recipe, parts: Parts, inner: nn.Module) -> dict[str, str]:
    checked, facts = "", {}
    if parts.parts_differ is not None:
        checked = f"; checked: logits and gradients as of whole rows (difference {parts.parts_differ:.0e})"
    if recipe.sharding.sequence > 1:
        facts["rows"] = f"each shared by {recipe.sharding.sequence} ranks{checked}"
    checkpointing = parts.planned.checkpointing
    if checkpointing is not None and checkpointing.chunk_tokens is not None:
        size = f"{checkpointing.chunk_tokens:,} tokens at a time"
        facts["chunks"] = f"norms and {num_mlps_in_chunks(inner)} MLPs run for {size}{checked}"
    return facts


def _model_fact(accelerator: Accelerator, parts: Parts) -> str:
    inner = accelerator.unwrap_model(parts.model)
    num_trained, num_parameters = trainable_share(inner)
    told = f"{inner.config.architectures[0]}, {num_parameters:,} parameters"
    if num_trained == num_parameters:
        return told
    return f"{told}, {num_trained:,} trained ({num_trained / num_parameters:.2%})"


def _packing_fact(leaks: Leaks) -> str:
    fill = f"{leaks.fill_rate:.1%} of the tokens are used"
    if leaks.differences is None:
        return f"{fill}; no sample holds two rows"
    replaced, alone = leaks.differences
    return f"{fill}; checked: rows that share a sample do not see each other (change {replaced:.0e}, alone {alone:.0e})"


def introduce(console: Terminal, facts: dict[str, str], recipe: Recipe, plugin: ShardingPlugin, parts: Parts) -> None:
    """Prints the facts, what to beware of, the data and the units."""
    for name, fact in facts.items():
        # Not markup: names of models, files and folders may hold brackets.
        console.print(f"{name:>10}: {fact}", markup=False)
    if (told := without_peak(recipe.schedule, recipe.optimizer.learning_rate, parts.num_steps)) is not None:
        console.warn(told)
    show_report(console, parts.data.report.to_dict())
    if plugin.unit_plan is not None:
        console.print(plugin.unit_plan.table(), markup=False)
