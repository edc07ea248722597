"""Runs the plain side: an ordinary torch loop on one process, in float32, without any of the sharding code."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from toolkit.data import build
from toolkit.data.build import TokenisedData
from toolkit.data.images.images import PREFIX
from toolkit.data.samples.image_samples import ImageSamples, image_samples_of
from toolkit.data.samples.samples import Batch, batch_of
from toolkit.data.tokens import tokenizer
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of, has_adapter
from toolkit.model.load import LoadedModel, load
from toolkit.model.quantised.quantised import matrix_of_4_bits, plain_layer, quantised_layers
from toolkit.model.routers import find_routers
from toolkit.model.structure.model_parts import VISION, asked_parts, freeze_untrained, parts_of, writer_class
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
from toolkit.verify.plain_losses import IGNORED, KINDS, OF_IMAGES, PLAIN_LOSSES, PlainLoss
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


# ---- Builds the plain side's model: transformers' model in float32, with bitsandbytes' values and peft's adapters ----
# The run's model decides which layers are quantised and adapted, as the report's facts say. It does not decide their
# values: bitsandbytes quantises whole matrices, which become ordinary linear layers, and peft adds its own layers.


def plain_model(recipe: Recipe, loaded: LoadedModel) -> nn.Module:
    """Returns the recipe's model before its first step, all in float32. Does not use the toolkit's loading of slices.

    Args:
        recipe: names the model and its adapters.
        loaded: the toolkit's model, without weights.
    """
    built = loaded.model
    torch.manual_seed(recipe.training.seed)
    model = _load_whole(recipe, built)
    freeze_untrained(model, loaded.trained)
    quantised = [path.replace(".base_layer", "") for path, _ in quantised_layers(base_of(built))]
    if recipe.adapter.quantize != "none":
        for path in quantised:
            _quantise(model.get_submodule(path), recipe)
    elif quantised:
        _dequantise_stored(model)
    model = model.float()
    return _add_adapters(model, recipe, built) if has_adapter(built) else model


def _load_whole(recipe: Recipe, built: Any) -> PreTrainedModel:
    section, config = recipe.model, base_of(built).config
    settings: dict[str, Any] = {"dtype": getattr(torch, section.dtype), "trust_remote_code": section.trust_remote_code}
    if section.attention != "auto":
        settings["attn_implementation"] = section.attention
    auto: Any = AutoModelForSeq2SeqLM if recipe.objective.spec.encoder_decoder else writer_class(config)
    if section.name_or_path is None:
        return auto.from_config(config, **settings)
    if recipe.adapter.quantize != "none" or not any(quantised_layers(built)):
        settings["config"] = config
    # Otherwise transformers reads from the files that they are quantised; `built` has removed that from its config.
    return auto.from_pretrained(section.name_or_path, revision=section.revision, use_safetensors=True, **settings)


@torch.no_grad()
def _quantise(layer: nn.Module, recipe: Recipe) -> None:
    """Quantises the weights of a linear layer to 4 or 8 bits and back."""
    from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit

    weight: Any = layer.weight
    if recipe.adapter.quantize == "int8":
        packed, largest, _ = int8_vectorwise_quant(weight.half())
        weight.data = packed.float() * (largest / 127)[:, None]
        return
    double = recipe.adapter.double_quantization
    packed, state = quantize_4bit(weight.data, blocksize=64, compress_statistics=double, quant_type="nf4")
    weight.data = matrix_of_4_bits(packed, state, torch.float32)


@torch.no_grad()
def _dequantise_stored(model: nn.Module) -> None:
    """Replaces the bitsandbytes layers that transformers has loaded by ordinary linear layers."""
    from bitsandbytes.nn import Linear4bit

    for path, layer in list(model.named_modules()):
        if isinstance(layer, Linear4bit):
            model.set_submodule(path, plain_layer(layer, torch.float32))
    # transformers refuses to change the dtype of a quantised model, which this one no longer is.
    model.is_quantized = False  # type: ignore[assignment]
    vars(model).pop("quantization_method", None)


def _add_adapters(model: PreTrainedModel, recipe: Recipe, built: Any) -> nn.Module:
    """Returns peft's model, with the initial values of docs/adapters.md or the values of an adapter's folder."""
    import peft

    if recipe.adapter.start_from is not None:
        started: nn.Module = peft.PeftModel.from_pretrained(
            model, Path(recipe.adapter.start_from).expanduser(), is_trainable=True
        )
        return started.float()
    section, built_config = recipe.adapter, built.peft_config["default"]
    config = peft.LoraConfig(
        task_type=recipe.objective.spec.peft_task,
        r=section.r,
        lora_alpha=2 * section.r if section.alpha is None else section.alpha,
        target_modules=built_config.target_modules,
        target_parameters=built_config.target_parameters,
        modules_to_save=section.modules_to_save,
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
    )
    adapted: nn.Module = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if ".lora_A." in name:
            uniform = torch.rand(parameter.shape, generator=_generator(recipe, name)) * 2 - 1
            parameter.data = uniform / math.sqrt(parameter[0].numel())
        elif ".lora_embedding_B." in name:
            parameter.data = torch.randn(parameter.shape, generator=_generator(recipe, name))
    return adapted


def _generator(recipe: Recipe, name: str) -> torch.Generator:
    """Returns a generator seeded by the run's seed and the parameter's name."""
    digest = hashlib.sha256(f"{recipe.training.seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)


# ---- Runs the plain side's rows with images one by one, through transformers' own processor and model ----

ROWS = "rows"
"""The key of a batch that holds its rows, each with the inputs of the model."""


@dataclass(frozen=True)
class ImageRows(ImageSamples):
    """Samples whose batches also hold each row separately. A batch without images has one more row with an image."""

    def batch(self, numbers: Sequence[int], seen: Sequence[Sequence[Sequence[Any]]] | None = None) -> Batch:
        """Returns a text batch of these samples with the separate rows under `ROWS`; its tensors have shape (1, T)."""
        rows: Any = [row for number in numbers for row in self._rows_of_sample(number)]
        if not any(self.has_image(number) for number in numbers):
            image, ids = self.images.smallest
            rows.append(self._inputs_of(torch.tensor(ids), [False] * len(ids), [image]))
        of_text = batch_of([self.tokens(number) for number in numbers], self.max_length, self.packed, self.pad_id)
        return {**of_text, ROWS: rows}

    def _rows_of_sample(self, number: int) -> list[dict[str, Any]]:
        pieces = zip(self.tokens(number), self.seen(number), strict=True)
        return [
            self._inputs_of(torch.tensor(ids.tolist()), targets.tolist(), shown) for (ids, targets), shown in pieces
        ]

    def _inputs_of(self, ids: torch.Tensor, targets: list[bool], images: list[Any]) -> dict[str, Any]:
        made = self.images.tensors([images]) if images else {}
        labels = torch.where(torch.tensor(targets), ids, IGNORED)
        kinds = torch.isin(ids, torch.tensor(sorted(self.images.token_ids))).long()[None]
        more = {name.removeprefix(PREFIX): tensor for name, tensor in made.items()}
        return {"input_ids": ids[None], "labels": labels[None], KINDS: kinds, OF_IMAGES: more}


def row_by_row(data: TokenisedData) -> TokenisedData:
    """Returns the data with each row separate in its batches, if rows have images."""
    samples = image_samples_of(data.train)
    if samples is None:
        return data
    return replace(data, train=ImageRows(**{each.name: getattr(samples, each.name) for each in fields(samples)}))


class PlainImages:
    """A plain loss of each row by itself. Weights that only images reach have a gradient in every micro-batch.

    Args:
        of_rows: the loss.
    """

    def __init__(self, of_rows: PlainLoss) -> None:
        self._of_rows = of_rows

    def num_targets(self, batch: Batch) -> int:
        return self._of_rows.num_targets(batch)

    def forward(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self._of_rows.forward(model, batch)

    def summed(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the scalar sum of the losses over all target tokens."""
        rows: Any = batch[ROWS]
        return torch.stack([self._of_rows.summed(model, row) for row in rows]).sum()


# ---- The router losses of a mixture of experts as plain terms of the loss; the rest is left to autograd ----
# The formulas, and the tokens over which they are taken, are those of docs/experts.md.

BIAS = "e_score_correction_bias"


@dataclass
class Seen:
    """The router outputs of a forward.

    Attributes:
        logits: the logits of each layer, (tokens, experts).
        chosen: the expert indices of each layer, (tokens, k).
    """

    logits: list[torch.Tensor]
    chosen: list[torch.Tensor]

    def choices(self, real: torch.Tensor) -> list[torch.Tensor]:
        """Counts for each layer how many of the real tokens chose each expert, (experts,).

        Args:
            real: whether a token is not padding, (tokens,).
        """
        pairs = zip(self.logits, self.chosen, strict=True)
        return [F.one_hot(chosen[real], logits.shape[-1]).sum(dim=(0, 1)).double() for logits, chosen in pairs]


class PlainRouters:
    """Adds the losses of a model's routers to those of a step, and records their loads.

    Args:
        model: the plain model.
        recipe: sets the coefficients.
        groups: the number of micro-batches that the ranks run at the same time.

    Attributes:
        loads: for each step and layer, the share of choices of each expert.
        balance: for each step, the balance loss without its coefficient.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, groups: int) -> None:
        self._base: Any = base_of(model)
        own = getattr(self._base.config.get_text_config(), "router_aux_loss_coef", None)
        section = recipe.objective
        self._coefficient = (own if section.router_aux_coef is None else section.router_aux_coef) or 0.0
        self._sigmoid = own is None and any(name.endswith(BIAS) for name, _ in self._base.named_buffers())
        self._groups = groups
        self._whole_step = recipe.sharding.accumulate == "by_block"
        self.loads: list[list[list[float]]] = []
        self.balance: list[float] = []

    @contextmanager
    def watching(self) -> Iterator[Seen]:
        """Records the router outputs of the forward inside the `with` block."""
        seen = Seen([], [])

        def ask(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, "output_router_logits": True}

        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            seen.logits += [one.flatten(0, -2) for one in output.router_logits or ()]

        def look(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            # The indices of the experts that are really computed.
            tensors = (one for one in (*args, *kwargs.values()) if torch.is_tensor(one))
            seen.chosen.append(next(one for one in tensors if one.dtype == torch.long).flatten(0, -2))

        inner = self._base.base_model
        hooks = [inner.register_forward_pre_hook(ask, with_kwargs=True), inner.register_forward_hook(note)]
        for path, module in self._base.named_modules():
            if path.rpartition(".")[2] == "experts":
                hooks.append(module.register_forward_pre_hook(look, with_kwargs=True))
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def begin(self, window: list[Batch], forward: Callable[[Batch], torch.Tensor]) -> None:
        """Runs the forwards of all micro-batches of a step, because the experts' shares are known only afterwards.

        Args:
            window: the micro-batches of the step.
            forward: runs the model on a micro-batch. Its output, of any shape, is not used.

        Raises:
            BadInputError: if the model does not show which experts it computes.
        """
        self._tokens = max(1, sum(int(_is_real(batch).sum()) for batch in window))
        self._choices, self._sums = [], []  # by micro-batch and layer
        for batch in window:
            with self.watching() as seen:
                forward(batch)
            if len(seen.logits) != len(seen.chosen):
                raise BadInputError(
                    f"model: {type(self._base).__name__} does not show the plain loop which experts it computes, so it "
                    "cannot be verified"
                )
            self._experts_of_a_token = [one.shape[-1] for one in seen.chosen]
            real = _is_real(batch).to(seen.logits[0].device)
            self._choices.append(seen.choices(real))
            self._sums.append([self._router_scores(one)[real].double().sum(dim=0) for one in seen.logits])
        totals = [torch.stack(layer).sum(dim=0) for layer in zip(*self._choices, strict=True)]
        self.loads.append([(total / total.sum().clamp_min(1)).tolist() for total in totals])
        terms = [
            len(sums) * (self._load_share(number, layer) @ sums)
            for number, layers in enumerate(self._sums)
            for layer, sums in enumerate(layers)
        ]
        self.balance.append(float(torch.stack(terms).sum()) / self._tokens / len(totals))

    def loss(self, number: int, batch: Batch, seen: Seen) -> torch.Tensor:
        """Returns the router losses of a micro-batch, a scalar: its part of the step's mean over layers and tokens.

        Args:
            number: the index of the micro-batch in its step.
            batch: the micro-batch.
            seen: the router outputs of its forward.
        """
        real = _is_real(batch).to(seen.logits[0].device)
        total = torch.zeros((), device=real.device)
        for layer, logits in enumerate(seen.logits):
            share = self._load_share(number, layer).float()
            balance = len(share) * (self._router_scores(logits) * share).sum(dim=-1)
            total = total + self._coefficient * balance[real].sum()
        return total / (self._tokens * len(seen.logits))

    def _load_share(self, number: int, layer: int) -> torch.Tensor:
        """Returns f_e, (experts,): the choices of each expert per token, as far as this micro-batch knows them."""
        # Without a coefficient nothing is minimised, and the figure of the step is reported. Otherwise
        # micro-batches that run at the same time know only themselves and earlier ones, unless they run by block.
        whole = self._whole_step or not self._coefficient
        last = len(self._choices) if whole else (number // self._groups + 1) * self._groups
        counted = torch.stack([choices[layer] for choices in self._choices[:last]]).sum(dim=0)
        return self._experts_of_a_token[layer] * counted / counted.sum().clamp_min(1)

    def _router_scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns scores (tokens, experts): softmax, or normalised sigmoids as in DeepSeek V3 and similar models."""
        if not self._sigmoid:
            return logits.float().softmax(dim=-1)
        scores = logits.float().sigmoid()
        return scores / scores.sum(dim=-1, keepdim=True)


def _is_real(batch: Batch) -> torch.Tensor:
    """Returns whether each token is not padding, (tokens,)."""
    ids = batch["input_ids"]
    lengths = batch.get("lengths", torch.full(ids.shape[:1], ids.shape[-1]))
    return (torch.arange(ids.shape[-1]) < lengths[:, None]).flatten()
