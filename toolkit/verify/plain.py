"""Runs the plain side: an ordinary torch loop on one process, in float32, without any of the sharding code."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from toolkit.data import build
from toolkit.data.build import TokenisedData
from toolkit.data.samples.image_samples import image_samples_of
from toolkit.data.samples.samples import Batch
from toolkit.data.tokens import tokenizer
from toolkit.errors import BadInputError
from toolkit.model.load import load
from toolkit.model.routers import find_routers
from toolkit.model.structure.model_parts import VISION, asked_parts, parts_of
from toolkit.objectives.build import build_objective
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.teacher import load_teacher
from toolkit.optim.build import matrices
from toolkit.optim.schedule import learning_rate_factor
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import steps_of_run
from toolkit.run.checks.image_check import check_images
from toolkit.run.checks.packing_check import LeakError, check_leaks
from toolkit.run.parts.rollouts import Rollouts
from toolkit.run.stages.rows import build_windows, fitting, may_pad, require_room, without_packing
from toolkit.sharding.fsdp2.shards import local_tensor
from toolkit.verify.launch import Launch
from toolkit.verify.plain_images import PlainImages, row_by_row
from toolkit.verify.plain_losses import PLAIN_LOSSES, PlainLoss
from toolkit.verify.plain_model import plain_model
from toolkit.verify.plain_routers import PlainRouters
from toolkit.verify.results import Outcome, PlainRun
from toolkit.verify.rollouts import PlainSampler


def run_plain(recipe: Recipe, launch: Launch, steps: int) -> PlainRun:
    """Trains the recipe's model in the plain loop, on the global batches of the sharded run.

    Args:
        recipe: the recipe to verify.
        launch: decides the number of ranks, and so the global batch, and the device.
        steps: the largest number of optimizer steps.
    """
    training, kind = recipe.training, recipe.objective.kind
    tokens = tokenizer.load(recipe.model, recipe.data, kind)
    data = build.build(recipe.data, tokens, training.seed, recipe.objective)
    parts = asked_parts(recipe.model, recipe.adapter, data.train.has_images)
    loaded = load(recipe.model, tokens, training.seed, adapter=recipe.adapter, objective=kind, parts=parts)
    built = loaded.model
    require_room(built, tokens, recipe, data)
    data, padded = fitting(recipe, tokens, data, built)
    teacher = load_teacher(recipe, tokens, "no", data.train.has_images)
    taught_by = None if teacher is None else teacher.model
    build_objective(recipe.objective, built, data.report.packing, None, taught_by)  # refuses what it cannot train
    device = torch.device("cpu" if launch.on_cpu else "cuda")
    model = plain_model(recipe, loaded).to(device).train()
    remove_dropout(model)
    leak = _packing_leak(recipe, model, data, device)
    if leak is not None:
        padded, data = leak, without_packing(recipe, tokens)
    # Of ranks that share their rows, or have the same.
    groups = launch.num_processes // (recipe.sharding.sequence * launch.tensor)
    num_micro_batches = groups * training.gradient_accumulation_steps
    samples_per_step = training.micro_batch_size * num_micro_batches
    num_steps = steps_of_run(training, len(data.train), samples_per_step)
    windows: Iterable[list[Batch]]
    windows = loader = build_windows(recipe, row_by_row(data), num_steps, num_micro_batches, rank=0, world_size=1)
    factor = learning_rate_factor(recipe.schedule, num_steps)
    rates = [recipe.optimizer.learning_rate * factor(step) for step in range(min(steps, num_steps))]
    routers = PlainRouters(model, recipe, groups) if find_routers(model) else None
    sampler = None
    if recipe.objective.spec.samples_itself:
        if routers is not None:
            raise BadInputError(
                "objective.kind: grpo of a mixture of experts cannot be verified; verify causal_lm on it"
            )
        sampler = PlainSampler(recipe, model, tokens)
        windows = Rollouts(recipe, data, loader, tokens, sampler, device)
    loss = PLAIN_LOSSES[kind](recipe, device)
    loss = PlainImages(loss) if data.train.has_images else loss
    plain = plain_loop(model, recipe, loss, windows, rates, routers)
    del model
    torch.cuda.empty_cache()
    return replace(plain, padded=padded, drawn=None if sampler is None else sampler.drawn)


def _packing_leak(recipe: Recipe, model: nn.Module, data: TokenisedData, device: torch.device) -> str | None:
    """Returns why rows must not share a sample if the recipe leaves that open. Else the ranks refuse a leak."""
    if not may_pad(recipe, data):
        return None
    objective, size = CausalLM(model, packed=True), recipe.training.micro_batch_size
    try:
        if (with_images := image_samples_of(data.train)) is not None:
            check_images(model, CausalLM(model, with_images.packed), with_images, device, in_16_bits=False)
        else:
            check_leaks(model, objective, data.train, size, device, in_16_bits=False)
    except LeakError as error:
        return error.why
    return None


def plain_loop(
    model: nn.Module,
    recipe: Recipe,
    loss: PlainLoss,
    windows: Iterable[list[Batch]],
    rates: Sequence[float],
    routers: PlainRouters | None = None,
) -> PlainRun:
    """Trains with AdamW, one optimizer step for each list of micro-batches.

    Args:
        model: the plain model, in float32.
        recipe: its optimizer settings and gradient clipping are used.
        loss: the plain loss of the objective.
        windows: the micro-batches of each optimizer step.
        rates: the learning rate of each step.
        routers: the plain router losses of a mixture of experts, or None.
    """
    section, limit = recipe.optimizer, recipe.training.max_grad_norm
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decaying = matrices(model)
    groups = [
        {"params": [p for p in named.values() if id(p) in decaying], "weight_decay": section.weight_decay},
        {"params": [p for p in named.values() if id(p) not in decaying], "weight_decay": 0.0},
    ]
    # Not fused, unlike the sharded side: so the two take different paths inside torch.
    optimizer = torch.optim.AdamW(groups, betas=(section.beta1, section.beta2), eps=section.eps, foreach=False)
    steadiness = _Steadiness(named, section.beta2)
    losses, norms, with_gradient = [], [], set()
    for rate, window in zip(rates, windows, strict=False):
        losses.append(_accumulate(model, loss, window, routers))
        norms.append(_global_norm(named))
        with_gradient |= {name for name, p in named.items() if is_nonzero(p.grad)}
        for p in named.values():
            if p.grad is not None and limit is not None and norms[-1] > limit:
                # 1e-6 as in torch.nn.utils.clip_grad_norm_.
                p.grad.mul_(limit / (norms[-1] + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = rate
        if math.isfinite(norms[-1]):
            optimizer.step()
            steadiness.look(optimizer)
        optimizer.zero_grad()
    weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    without = sorted(named.keys() - with_gradient)
    moments = {name: optimizer.state[p]["exp_avg"] for name, p in named.items() if p in optimizer.state}
    sizes = {name: float(moment.double().norm()) for name, moment in moments.items()}
    outcome = Outcome(losses, norms, weights, without, sizes)
    if routers is not None:
        outcome = replace(outcome, loads=routers.loads, balance=routers.balance)
    towers = frozenset(name for name, part in parts_of(model).items() if part == VISION and name in named)
    return PlainRun(outcome, set(named), steadiness.found(), sum(rates), towers=towers)


def _accumulate(model: nn.Module, plain_loss: PlainLoss, window: list[Batch], routers: PlainRouters | None) -> float:
    """Runs backward over the whole global batch. Returns the mean loss over its target tokens."""
    num_targets = sum(map(plain_loss.num_targets, window))
    mean = 0.0
    if routers is not None:
        routers.begin(window, functools.partial(plain_loss.forward, model))
    for number, batch in enumerate(window):
        with contextlib.nullcontext() if routers is None else routers.watching() as seen:
            loss = plain_loss.summed(model, batch) / max(1, num_targets)
        mean += loss.item()
        if routers is not None and seen is not None:
            loss = loss + routers.loss(number, batch, seen)
        torch.autograd.backward(loss)
    return mean


def _global_norm(named: Mapping[str, nn.Parameter]) -> float:
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in named.values() if p.grad is not None))


def is_nonzero(gradient: torch.Tensor | None) -> bool:
    """Returns whether this rank's part of a gradient (any shape) exists and is not all zero."""
    return gradient is not None and bool(local_tensor(gradient).any())


class _Steadiness:
    """Finds the elements whose gradient stayed well above rounding in every step.

    AdamW divides by the gradient's own size. If that is almost nothing (a key's bias, whose gradient is only rounding,
    or an element whose gradient changes sign), rounding alone decides the direction of a whole step, on one process as
    on many. Such elements get a wider tolerance.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], beta2: float) -> None:
        self._named = named
        self._beta2 = beta2
        self._step = 0
        self._steady = {name: torch.ones_like(p, dtype=torch.bool) for name, p in named.items()}

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Updates after a step. Elements with a gradient far below their tensor's or the model's become unsteady."""
        self._step += 1
        correction = 1 - self._beta2**self._step
        # The running mean of squared gradients, which AdamW divides by.
        known = {name: optimizer.state[p]["exp_avg_sq"] for name, p in self._named.items() if p in optimizer.state}
        num_elements = sum(squares.numel() for squares in known.values())
        everywhere = sum(squares.sum().item() for squares in known.values()) / max(1, num_elements)
        for name, squares in known.items():
            floor = max(1e-6 * squares.mean().item(), 1e-8 * everywhere) / correction
            self._steady[name] &= (squares / correction >= floor) | (squares == 0)

    def found(self) -> dict[str, torch.Tensor]:
        """Returns a boolean tensor in the shape of each parameter: whether an element is steady."""
        return {name: steady.cpu() for name, steady in self._steady.items()}


def remove_dropout(model: nn.Module) -> None:
    """Sets every dropout probability of a model to 0: in modules, in attributes of its layers, in its configuration."""
    config: Any = getattr(model, "config", None)
    configs = [] if config is None else [config, config.get_text_config()]
    for owner in [*model.modules(), *configs]:
        for name, value in list(vars(owner).items()):
            # `attention_dropout`, `layerdrop`, `router_jitter_noise`
            is_named_so = re.search("drop|jitter", name) or (
                name == "p" and isinstance(owner, nn.modules.dropout._DropoutNd)
            )
            if is_named_so and isinstance(value, int | float) and not isinstance(value, bool):
                setattr(owner, name, 0.0)
