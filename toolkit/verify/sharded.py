"""Runs one rank of the sharded side. `toolkit.verify.ranks` starts it."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import save_file

from toolkit.checkpoint.export import whole_tensors
from toolkit.errors import BadInputError
from toolkit.model.adapters.expert_adapters import as_peft_has_them, peft_name
from toolkit.model.quantised.quantised import dequantised
from toolkit.paths import atomic_write
from toolkit.recipe.recipe import Recipe
from toolkit.run.fit import trainer_of
from toolkit.run.parts.order import parts_of
from toolkit.run.parts.rollouts import Rollouts, RunSampler
from toolkit.run.prepare import prepare_run
from toolkit.run.shown.run_summary import facts_of
from toolkit.run.stages.accelerator import build_accelerator, build_plugins, quiet_libraries, release, settled
from toolkit.run.stages.stages import OpenedRun, PreparedRun
from toolkit.sharding.fsdp2.shards import local_tensor, state_once
from toolkit.sharding.offload import engine_of
from toolkit.sharding.plugin import ShardingPlugin
from toolkit.supervise.parent_death import ended_with_launcher
from toolkit.terminal import Terminal
from toolkit.training.loop_state import Windows
from toolkit.verify.plain import is_nonzero, remove_dropout
from toolkit.verify.rollouts import GivenSamples


def rank_main(job: Path) -> None:
    """Runs this rank, and writes its result, `rank-N.json`, beside its job."""
    given = json.loads(job.read_text(encoding="utf-8"))
    recipe = Recipe.from_mapping(yaml.safe_load(given["recipe"]))
    with ended_with_launcher():
        result = _run_sharded(recipe, given["steps"], job.parent)
    atomic_write(job.parent / f"rank-{os.environ['RANK']}.json", json.dumps(result))


def _run_sharded(recipe: Recipe, steps: int, folder: Path) -> dict[str, Any]:
    """Runs a few steps with the same parts as `finetune`. Rank 0 writes the weights to `folder`."""
    quiet_libraries()
    recipe = settled(recipe)
    plugins = build_plugins(recipe)
    accelerator = build_accelerator(recipe, plugins, folder / "run")
    if accelerator.mixed_precision == "fp16":
        raise BadInputError("mixed_precision fp16: its gradient scaler skips steps, which no plain loop does; use bf16")
    plugin: ShardingPlugin = plugins["fsdp_plugin"]
    opened = OpenedRun(recipe, accelerator, plugin, folder / "run", Terminal(quiet=not accelerator.is_main_process))
    run = prepare_run(opened, parts_of(opened))
    if run.sharded.padded is not None:
        # The recipe leaves packing open, and the plain side has packed the rows.
        raise BadInputError(f"data.packing: {run.sharded.padded}; set data.packing=false")
    model = run.inner
    # The plain side draws no masks that these ranks could share.
    remove_dropout(model)
    result = _run_steps(run, steps, folder)
    result["facts"] = facts_of(run)
    # On every rank, because gathering is collective. Only rank 0 gets the tensors.
    tensors = as_peft_has_them(model, dequantised(model, whole_tensors(state_once(model))))
    weights = {name: t.float().cpu().contiguous() for name, t in tensors if t is not None}
    if accelerator.is_main_process:
        save_file(weights, folder / "weights.safetensors")
    release(accelerator, plugin)
    return result


def _run_steps(run: PreparedRun, steps: int, folder: Path) -> dict[str, Any]:
    """Runs the trainer's steps; returns their results.

    A parameter counts as having had a gradient if its first moment is not zero.
    """
    opened, recipe, accelerator, model = run.opened, run.opened.recipe, run.opened.accelerator, run.inner
    named = {peft_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = run.sharded.torch_optimizer
    windows: Windows = run.windows
    given = None
    if recipe.objective.spec.samples_itself:
        given = GivenSamples(folder, RunSampler(run, lambda: None))
        windows = Rollouts(recipe, run.data, run.windows, run.tokenizer, given, opened.device)
    trainer = trainer_of(run, windows)
    run.model.train()
    found, loads = [], []
    for window in itertools.islice(windows, steps):
        found.append(trainer.train_step(window))
        loads.append(run.balance.loads())
        trainer.schedule.step()
    engine = engine_of(model)
    if engine is not None:
        engine.flush()  # the last step may still be under way
    moments = {name: optimizer.state[p].get("exp_avg") for name, p in named.items()}
    held = {name: local_tensor(moment).double() for name, moment in moments.items() if moment is not None}
    return {
        "losses": [step.loss for step in found],
        "grad_norms": [step.grad_norm for step in found],
        "trainable": sorted(named),
        "with_gradient": sorted(name for name, moment in moments.items() if is_nonzero(moment)),
        "numel": {name: named[name].numel() for name in held},
        "moments": {name: (part.numel(), float(part.square().sum())) for name, part in held.items()},
        "loads": [layers for layers, _ in loads if layers],
        "balance": [loss for layers, loss in loads if layers],
        "precision": accelerator.mixed_precision,
        "differ": None if given is None else given.differ,
    }
