"""Runs one rank of the sharded side. `toolkit.verify.ranks` starts it."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import send_to_device
from safetensors.torch import save_file

from toolkit.checkpoint.export import whole_tensors
from toolkit.data.samples.samples import Batch
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
from toolkit.run.stages.accelerator import (
    build_accelerator,
    build_plugins,
    quiet_libraries,
    release,
    settled,
)
from toolkit.run.stages.stages import OpenedRun, PreparedRun
from toolkit.sharding.blocks import checkpointing
from toolkit.sharding.fsdp2.shards import local_tensor, state_once
from toolkit.sharding.offload import engine_of
from toolkit.sharding.plugin import ShardingPlugin
from toolkit.sharding.tensor.cut import cut_of
from toolkit.supervise.parent_death import ended_with_launcher
from toolkit.terminal import Terminal
from toolkit.training.loop_state import Windows
from toolkit.verify.plain import is_nonzero, set_dropout
from toolkit.verify.results import REHEARSED_DROPOUT
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
    set_dropout(model, 0.0)
    result, batch = _run_steps(run, steps, folder)
    result["facts"] = facts_of(run)
    # On every rank, because gathering is collective. Only rank 0 gets the tensors.
    tensors = as_peft_has_them(model, dequantised(model, whole_tensors(state_once(model))))
    weights = {name: t.float().cpu().contiguous() for name, t in tensors if t is not None}
    if accelerator.is_main_process:
        save_file(weights, folder / "weights.safetensors")
    checkpointed = plugin.checkpointing is not None
    # Offload removes gradients as they arrive. Blocks are checkpointed in the same way with and without it.
    offloaded = plugin.offload is not None
    result["replay"] = _check_replay(accelerator, run, batch) if checkpointed and not offloaded else None
    release(accelerator, plugin)
    return result


def _run_steps(run: PreparedRun, steps: int, folder: Path) -> tuple[dict[str, Any], Batch]:
    """Runs the trainer's steps; returns their results, and this rank's first micro-batch of the last one.

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
    result = {
        "losses": [step.loss for step in found],
        "grad_norms": [step.grad_norm for step in found],
        "trainable": sorted(named),
        "with_gradient": sorted(name for name, moment in moments.items() if is_nonzero(moment)),
        "numel": {name: named[name].numel() for name in held},
        "moments": {name: (part.numel(), float(part.square().sum())) for name, part in held.items()},
        "loads": [layers for layers, _ in loads if layers],
        "balance": [loss for layers, loss in loads if layers],
        "precision": accelerator.mixed_precision,
        "device": accelerator.device.type,
        "differ": None if given is None else given.differ,
    }
    return result, window[0]


def _check_replay(accelerator: Accelerator, run: PreparedRun, batch: Batch) -> dict[str, float]:
    """Compares gradients of a micro-batch with and without checkpointing, from one random state.

    Returns:
        `blocks`: the number of forwards under checkpointing. `difference`: the difference of the gradients, as a share
        of the largest. `effect`: the difference that another random state makes, 0 if the model has no dropout.
    """
    set_dropout(run.inner, REHEARSED_DROPOUT)
    checkpointed = _gradients(accelerator, run, batch, seed=0)
    with _without_checkpointing() as calls:
        direct = _gradients(accelerator, run, batch, seed=0)
        blocks = len(calls)
        other = _gradients(accelerator, run, batch, seed=1)
    return {
        "blocks": blocks,
        "difference": _largest_difference(checkpointed, direct),
        "effect": _largest_difference(other, direct),
    }


@contextlib.contextmanager
def _without_checkpointing() -> Iterator[list[str]]:
    """Runs checkpointed blocks without checkpointing. Yields a list that gets an item for each of their forwards."""
    calls: list[str] = []

    def direct(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(forward.__qualname__)
        del kwargs["use_reentrant"], kwargs["preserve_rng_state"]
        return forward(*args, **kwargs)

    stock = vars(checkpointing)["checkpoint"]
    vars(checkpointing)["checkpoint"] = direct  # the function that checkpointed blocks call
    try:
        yield calls
    finally:
        vars(checkpointing)["checkpoint"] = stock


def _gradients(accelerator: Accelerator, run: PreparedRun, batch: Batch, seed: int) -> list[torch.Tensor]:
    """Returns this rank's parts of the gradients of one micro-batch."""
    cut = cut_of(run.inner)
    copies = 1 if cut is None else cut.ranks.size  # ranks that have the same rows draw the same masks
    torch.manual_seed(1000 * seed + accelerator.process_index // copies)
    moved = send_to_device(run.objective.on_host(batch), accelerator.device)
    accelerator.backward(run.objective.loss_sum(run.model, moved))
    found = [local_tensor(p.grad).clone() for p in run.model.parameters() if p.grad is not None]
    run.model.zero_grad(set_to_none=True)
    return found


def _largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Returns the largest difference as a share of the largest element. Infinite if tensors are missing."""
    if len(found) != len(expected):
        return math.inf
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if b.numel()]
    largest = max((b.abs().max().item() for _, b in pairs), default=0.0)
    return max(((a - b).abs().max().item() for a, b in pairs), default=0.0) / max(largest, 1e-30)
