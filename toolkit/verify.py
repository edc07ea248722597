"""`toolkit verify`: the user's model and data for a few steps, plainly and sharded, and compared.

The plain side is an ordinary torch loop on one process, in float32, without any of the sharding code.
The sharded side is what `finetune` runs, built by the same functions, on ranks started as
`accelerate launch` would, on the CPU over gloo where there are too few GPUs. Dropout is switched off
on both sides, since ranks draw different masks. `python -m toolkit.verify FOLDER` is one rank.

Tolerances. Without mixed precision: losses 1e-6 and gradient norms 1e-5 relative, as the parity tests
hold over 20 steps; weights 1e-5 absolute, see `weight_tolerance`. Under bf16 the sharded run computes
in 16 bits and the plain one does not: losses 2e-2, norms 1e-1, weights twice what AdamW can move one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import torch
import torch.nn.functional as F
import transformers
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from toolkit import models, run
from toolkit.data import build, tokenizer
from toolkit.data.loader import Batch, TrainLoader
from toolkit.errors import BadInputError, ToolkitError, first_line
from toolkit.export import whole_tensors
from toolkit.metrics import Metrics
from toolkit.objectives import CausalLM
from toolkit.optim import build_schedule, learning_rate_factor
from toolkit.recipe import ModelSection, Recipe, require_folder, steps_of_run
from toolkit.sharding import apply
from toolkit.sharding.apply import local_tensor
from toolkit.sharding.plugin import resolve_strategy, sharding_kwargs
from toolkit.sharding.strategy import DEFAULT_STRATEGY, mesh_shape, parse_strategy
from toolkit.trainer import Trainer

OK, FAILED, NOT_USED = "ok", "FAILED", "not used"

DEFAULT_STEPS = 5
DEFAULT_TIME_LIMIT_SECONDS = 1800.0

FLOAT32_LOSS, FLOAT32_NORM, FLOAT32_WEIGHTS = 1e-6, 1e-5, 1e-5
MIXED_LOSS, MIXED_NORM = 2e-2, 1e-1
PACKING_TOLERANCE = 1e-4
"""Of logits, as a share of the largest; a leak is orders of magnitude more, rounding less."""
REPLAY_TOLERANCE = {"cpu": 0.0, "cuda": 1e-3}
"""Of gradients, as a share of the largest; on GPUs attention's backward adds up in any order."""

REHEARSED_DROPOUT = 0.1
PACKING_SAMPLES = 256
"""Samples among which the best packed one is looked for."""

TWO_RANKS: dict[str, Any] = {
    "distributed_type": "FSDP",
    "num_processes": 2,
    "fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": DEFAULT_STRATEGY},
}
"""The Accelerate config where the user names none and `accelerate config` has made none."""


@dataclass(frozen=True)
class Row:
    """One check. `found` and `tolerance` are numbers where the check has a measure, None elsewhere."""

    check: str
    found: float | None
    tolerance: float | None
    verdict: str
    note: str = ""


@dataclass(frozen=True)
class Report:
    """What `verify` found: facts about both runs, and a row per check."""

    facts: dict[str, str]
    rows: list[Row]

    @property
    def verdict(self) -> str:
        return FAILED if any(row.verdict == FAILED for row in self.rows) else OK

    def to_json(self) -> str:
        return json.dumps(_finite({"verdict": self.verdict, **asdict(self)}), indent=2)


@dataclass(frozen=True)
class Outcome:
    """One way of running the steps.

    Attributes:
        losses: mean over the step's target tokens, per optimizer step.
        grad_norms: before clipping.
        weights: of every parameter after the last step, whole, by name.
        without_gradient: trainable parameters whose gradient was missing or zero in every step.
    """

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]
    without_gradient: list[str]


@dataclass(frozen=True)
class PlainRun:
    """The plain loop's outcome and what the comparison needs beside it.

    Attributes:
        steady: elements of each parameter whose gradient stayed well above rounding, see `_Steadiness`.
        reach: the farthest that AdamW can have moved a weight: the sum of the learning rates.
        packing: the row about documents that share a sample.
    """

    outcome: Outcome
    steady: dict[str, torch.Tensor]
    reach: float
    packing: Row


@dataclass(frozen=True)
class ShardedRun:
    """The ranks' outcome. `replay`: see `_replay`; None without activation checkpointing."""

    outcome: Outcome
    facts: dict[str, str]
    precision: str
    device: str
    replay: dict[str, float] | None


@dataclass(frozen=True)
class Launch:
    """An Accelerate config, for one machine.

    Attributes:
        origin: where it was read, for messages.
        on_cpu: whether its ranks are rehearsed on the CPU.
    """

    values: dict[str, Any]
    origin: str
    num_processes: int
    on_cpu: bool


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
    launch = read_launch(accelerate_config, recipe)
    run._quiet()
    with TemporaryDirectory(prefix="toolkit-verify-") as name, _undisturbed():
        folder = Path(name)
        recipe = _harmless(recipe, folder)
        recipe, weights = _with_layers(recipe, layers, folder)
        tell("plain: one process, float32")
        plain = _run_plain(recipe, launch, steps)
        tell(f"sharded: {launch.num_processes} {'CPU' if launch.on_cpu else 'GPU'} ranks")
        sharded = _run_ranks(recipe, launch, len(plain.outcome.losses), folder, time_limit_seconds)
    facts = {"config": launch.origin, **sharded.facts, "weights": weights}
    if launch.on_cpu and not launch.values.get("use_cpu"):
        facts["ranks"] += "; this machine has too few GPUs"
    num_steps = len(plain.outcome.losses)
    facts["compared"] = f"{num_steps} optimizer steps" + ("; the run has no more" if num_steps < steps else "")
    return Report(facts, compare(plain, sharded, recipe.model.dtype))


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


# The Accelerate config


def read_launch(path: Path | None, recipe: Recipe) -> Launch:
    """The config's values, checked as far as they decide about the ranks.

    Raises BadInputError where the file is none, holds no mapping, or cannot launch this recipe.
    """
    if path is None and Path(default_config_file).is_file():
        path = Path(default_config_file)
    origin = str(path) if path is not None else "none; two ranks under zero3"
    values = _read_config(path) if path is not None else dict(TWO_RANKS)
    num_processes = _num_processes(values, origin)
    _check_strategy(values, origin, num_processes, recipe)
    on_cpu = bool(values.get("use_cpu")) or torch.cuda.device_count() < num_processes
    return Launch(values, origin, num_processes, on_cpu)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise BadInputError(f"--accelerate-config: there is no file {str(path)!r}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInputError(f"--accelerate-config: {path} is not readable as YAML: {first_line(error)}") from error
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise BadInputError(f"--accelerate-config: {path} holds no mapping but {found}; `accelerate config` makes one")
    return values


def _num_processes(values: dict[str, Any], origin: str) -> int:
    found = values.get("num_processes")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise BadInputError(f"--accelerate-config: {origin}: num_processes is {found!r}; needs a number of at least 1")
    return found


def _check_strategy(values: dict[str, Any], origin: str, num_processes: int, recipe: Recipe) -> None:
    """Raises BadInputError where the strategy is unknown or does not fit the number of processes."""
    sections = {key: values.get(key) or {} for key in ("fsdp_config", "parallelism_config")}
    for key, section in sections.items():
        if not isinstance(section, dict):
            raise BadInputError(f"--accelerate-config: {origin}: {key} is no mapping")
    word = sections["fsdp_config"].get("fsdp_sharding_strategy") or recipe.sharding.strategy or DEFAULT_STRATEGY
    sizes = [
        sections["parallelism_config"].get(f"parallelism_config_dp_{axis}_size") for axis in ("replicate", "shard")
    ]
    try:
        strategy = parse_strategy(str(word), "fsdp_config.fsdp_sharding_strategy")
        mesh_shape(strategy, num_processes, replicate=sizes[0], shard=sizes[1])
    except BadInputError as error:
        raise BadInputError(f"--accelerate-config: {origin}: {error}") from error


# A model with fewer blocks


def _with_layers(recipe: Recipe, layers: int | None, folder: Path) -> tuple[Recipe, str]:
    """The recipe with its model shrunk to its first blocks, and where the weights come from."""
    section = recipe.model
    if layers is None:
        return recipe, f"of {section.name_or_path}" if section.name_or_path else "random, as the recipe says"
    if section.config is not None:
        fields = dict(section.config)
        _shrink(fields, _configuration_of(fields), layers)
        return _with_model(recipe, {"config": fields}), f"random, as the recipe says; the first {layers} blocks"
    source, shrunk = _source_folder(section), folder / "model-cut"
    _copy_model(source, shrunk, layers, section)
    name = section.name_or_path
    origin = f"of {name}; the first {layers} blocks"
    if not _has_its_weights(shrunk, section):
        _write_random_weights(shrunk, section, recipe.training.seed)
        origin = f"random: {name} holds no weights that fit its first {layers} blocks"
    return _with_model(recipe, {"name_or_path": str(shrunk), "revision": None}), origin


def _with_model(recipe: Recipe, update: dict[str, Any]) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=update)})


def _configuration_of(fields: dict[str, Any]) -> PretrainedConfig:
    try:
        return AutoConfig.for_model(**fields)
    except (ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"model.config: no model can be made of {fields!r}: {first_line(error)}") from error


def _shrink(fields: dict[str, Any], config: PretrainedConfig, layers: int) -> None:
    """Cuts the fields of a configuration, in place, to its first blocks; lists of an item per block as well.

    Raises BadInputError where the model has fewer blocks, or does not tell how many.
    """
    text = config.get_text_config()
    found = getattr(text, "num_hidden_layers", None)
    if not isinstance(found, int):
        raise BadInputError(f"--layers: {type(config).__name__} has no num_hidden_layers; leave --layers out")
    if layers > found:
        raise BadInputError(f"--layers: found {layers}, but the model has {found} blocks; lower it")
    if text is not config and isinstance(fields.get("text_config"), dict):
        fields["text_config"] = fields = dict(fields["text_config"])
    for key, value in fields.items():
        if isinstance(value, list) and len(value) == found:
            fields[key] = value[:layers]
    fields.pop("num_hidden_layers", None)
    fields[text.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = layers


def _source_folder(section: ModelSection) -> Path:
    assert section.name_or_path is not None
    require_folder(section.name_or_path, "model.name_or_path")
    folder = Path(section.name_or_path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
    return Path(snapshot_download(section.name_or_path, revision=section.revision, allow_patterns=patterns))


def _copy_model(source: Path, target: Path, layers: int, section: ModelSection) -> None:
    """A folder like `source` with a shrunk configuration. Weights are linked, and never written through."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            (target / file.name).symlink_to(file.resolve())
        elif file.is_file() and file.suffix not in (".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"):
            shutil.copyfile(file, target / file.name)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=section.trust_remote_code)
        fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError) as error:
        raise BadInputError(f"model.name_or_path: no configuration in {str(source)!r}: {first_line(error)}") from error
    _shrink(fields, config, layers)
    (target / "config.json").write_text(json.dumps(fields), encoding="utf-8")


def _has_its_weights(folder: Path, section: ModelSection) -> bool:
    """Whether every parameter of the shrunk model is stored, in its shape."""
    try:
        _, found = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=section.trust_remote_code, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError):
        return False
    return not found["missing_keys"] and not found["mismatched_keys"]


def _write_random_weights(folder: Path, section: ModelSection, seed: int) -> None:
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        file.unlink()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, trust_remote_code=section.trust_remote_code).save_pretrained(folder)


# The plain loop


def _run_plain(recipe: Recipe, launch: Launch, steps: int) -> PlainRun:
    training = recipe.training
    tokens = tokenizer.load(recipe.model, recipe.data, training.seed)
    samples = build.build(recipe.data, tokens, training.seed).train
    device = torch.device("cpu" if launch.on_cpu else "cuda")
    model = _plain_model(recipe, tokens).to(device).train()
    set_dropout(model, 0.0)
    packing = _packing_row(model, samples)
    num_micro_batches = launch.num_processes * training.gradient_accumulation_steps
    samples_per_step = training.micro_batch_size * num_micro_batches
    num_steps = steps_of_run(training, len(samples), samples_per_step)
    windows = TrainLoader(
        samples,
        num_positions=run._num_positions(recipe, len(samples), num_steps * samples_per_step),
        micro_batch_size=training.micro_batch_size,
        gradient_accumulation_steps=num_micro_batches,
        rank=0,
        world_size=1,
        seed=training.seed,
        shuffle=recipe.data.shuffle,
    )
    factor = learning_rate_factor(recipe.schedule, num_steps)
    rates = [recipe.optimizer.learning_rate * factor(step) for step in range(min(steps, num_steps))]
    plain = plain_loop(model, recipe, windows, rates, packing)
    del model
    torch.cuda.empty_cache()
    return plain


def _plain_model(recipe: Recipe, tokens: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model as transformers itself makes it, in float32: not by the toolkit's reading of slices."""
    section = recipe.model
    built = models.load(section, tokens, recipe.training.seed)
    run._require_room(built, tokens, recipe)
    CausalLM(built)  # refuses what it cannot train
    settings: dict[str, Any] = {"dtype": built.dtype, "trust_remote_code": section.trust_remote_code}
    if section.attention != "auto":
        settings["attn_implementation"] = section.attention
    torch.manual_seed(recipe.training.seed)
    if section.name_or_path is None:
        model = AutoModelForCausalLM.from_config(built.config, **settings)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            section.name_or_path, config=built.config, revision=section.revision, **settings
        )
    return model.float()


def plain_loop(
    model: nn.Module, recipe: Recipe, windows: TrainLoader, rates: Sequence[float], packing: Row
) -> PlainRun:
    """AdamW as anybody would write it: one step per window, at the learning rates given."""
    section, limit = recipe.optimizer, recipe.training.max_grad_norm
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(section.beta1, section.beta2), eps=section.eps, foreach=False)
    steadiness = _Steadiness(named, section.beta2)
    losses, norms, with_gradient = [], [], set()
    for rate, window in zip(rates, windows, strict=False):
        losses.append(_accumulate(model, window))
        norms.append(_global_norm(named))
        with_gradient |= {name for name, p in named.items() if _is_felt(p.grad)}
        for p in named.values():
            if p.grad is not None and limit is not None and norms[-1] > limit:
                p.grad.mul_(limit / (norms[-1] + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = rate
        if math.isfinite(norms[-1]):
            optimizer.step()
            steadiness.look(optimizer)
        optimizer.zero_grad()
    weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    without = sorted(named.keys() - with_gradient)
    return PlainRun(Outcome(losses, norms, weights, without), steadiness.found(), sum(rates), packing)


def _accumulate(model: nn.Module, window: list[Batch]) -> float:
    """Backward over the whole global batch; the mean loss over its target tokens."""
    device = next(model.parameters()).device
    num_targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
    mean = 0.0
    for batch in window:
        ids, labels, positions = (batch[key].to(device) for key in ("input_ids", "labels", "position_ids"))
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits  # (B, T, V)
        loss_sum = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        torch.autograd.backward(loss_sum / max(1, num_targets))
        mean += loss_sum.item() / max(1, num_targets)
    return mean


def _global_norm(named: Mapping[str, nn.Parameter]) -> float:
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in named.values() if p.grad is not None))


def _is_felt(gradient: torch.Tensor | None) -> bool:
    """Whether this rank's part of a gradient is there and not all zero."""
    return gradient is not None and bool(local_tensor(gradient).any())


class _Steadiness:
    """Tells the elements whose gradient stayed well above rounding in every step.

    AdamW divides by the gradient's own size. Where that is next to nothing (a key's bias, whose gradient
    is zero but for rounding; an element that happens to change sign), rounding alone decides the
    direction of a whole step, on one process as on many. Such elements are held to a wider tolerance.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], beta2: float) -> None:
        self._named = named
        self._beta2 = beta2
        self._step = 0
        self._steady = {name: torch.ones_like(p, dtype=torch.bool) for name, p in named.items()}

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """After a step: elements whose running gradient is small beside their tensor's or the model's."""
        self._step += 1
        correction = 1 - self._beta2**self._step
        known = {name: optimizer.state[p]["exp_avg_sq"] for name, p in self._named.items() if p in optimizer.state}
        num_elements = sum(squares.numel() for squares in known.values())
        everywhere = sum(squares.sum().item() for squares in known.values()) / max(1, num_elements)
        for name, squares in known.items():
            floor = max(1e-6 * squares.mean().item(), 1e-8 * everywhere) / correction
            self._steady[name] &= (squares / correction >= floor) | (squares == 0)

    def found(self) -> dict[str, torch.Tensor]:
        return {name: steady.cpu() for name, steady in self._steady.items()}


def set_dropout(model: nn.Module, probability: float) -> None:
    """Sets every dropout of a model: modules, numbers that its layers keep, and its configuration."""
    config: Any = getattr(model, "config", None)
    configs = [] if config is None else [config, config.get_text_config()]
    for owner in [*model.modules(), *configs]:
        for name, value in list(vars(owner).items()):
            named_so = (name == "p" and isinstance(owner, nn.modules.dropout._DropoutNd)) or _names_dropout(name)
            switched_on_safely = probability == 0.0 or not re.search("layer|path|jitter", name)
            if named_so and switched_on_safely and isinstance(value, int | float) and not isinstance(value, bool):
                setattr(owner, name, probability)


def _names_dropout(name: str) -> bool:
    """`attention_dropout`, `resid_pdrop`, `layerdrop`, `router_jitter_noise`: what makes training random."""
    return re.search("drop|jitter", name) is not None


# Packing


def _packing_row(model: nn.Module, samples: datasets.Dataset) -> Row:
    """Documents that share a sample must not see each other: their logits are those of each alone."""
    found = two_documents(samples)
    if found is None:
        return Row("packing", None, None, NOT_USED, "the samples have no position_ids, or hold too few tokens")
    first, second, origin = found
    apart = torch.cat([_logits(model, [first]), _logits(model, [second])])  # (T, V)
    together = _logits(model, [first, second])
    difference = _relative_difference(together, apart)
    note = f"logits of two documents of {len(first)} and {len(second)} tokens, {origin}, together and alone"
    return _measured("packing", difference, PACKING_TOLERANCE, note)


def two_documents(samples: datasets.Dataset) -> tuple[list[int], list[int], str] | None:
    """Token ids of two documents that share a sample, as long as there are, and where they are from."""
    if "position_ids" not in samples.column_names:
        return None
    rows = samples[: min(PACKING_SAMPLES, len(samples))]
    pairs = [pair for row in zip(rows["input_ids"], rows["position_ids"], strict=True) for pair in _neighbours(*row)]
    if pairs:
        first, second = max(pairs, key=lambda pair: min(map(len, pair)))
        return first, second, "which share a sample"
    half = len(rows["input_ids"][0]) // 2
    first, second = rows["input_ids"][0][:half], rows["input_ids"][-1][-half:]
    return (first, second, "joined from two samples") if half else None


def _neighbours(ids: list[int], positions: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    starts = [i for i in range(len(ids)) if i == 0 or positions[i] != positions[i - 1] + 1]
    for start, middle, end in zip(starts, starts[1:], [*starts[2:], len(ids)], strict=False):
        yield ids[start:middle], ids[middle:end]


@torch.no_grad()
def _logits(model: nn.Module, documents: list[list[int]]) -> torch.Tensor:
    """(T, V) of one row of documents, whose positions restart."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(itertools.chain(*documents))], device=device)
    positions = torch.tensor([[i for document in documents for i in range(len(document))]], device=device)
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float()  # type: ignore[no-any-return]


def _relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


# Starting the ranks


def _run_ranks(recipe: Recipe, launch: Launch, steps: int, folder: Path, seconds: float) -> ShardedRun:
    """Runs the sharded side and reads what the ranks have left in `folder`."""
    (folder / "job.json").write_text(json.dumps({"recipe": recipe.to_yaml(), "steps": steps}), encoding="utf-8")
    processes = []
    try:
        for environment in rank_environments(launch, folder):
            processes.append(_start_rank(environment, folder))
        _await_ranks(processes, folder, seconds)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
    results = [_outcome_of(folder, rank)["result"] for rank in range(len(processes))]
    return _merged(results, load_file(folder / "weights.safetensors"))


def rank_environments(launch: Launch, folder: Path) -> list[dict[str, str]]:
    """What `accelerate launch` would give each rank, were there one machine with so many processes."""
    config = folder / "accelerate.yaml"
    one_machine = {"num_machines": 1, "machine_rank": 0, "main_process_port": 0, "rdzv_backend": "static"}
    values = {key: value for key, value in launch.values.items() if key != "main_process_ip"} | one_machine
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    common = _launcher_environment(config, launch)
    common["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), common.get("PYTHONPATH")]))
    if launch.on_cpu:
        common |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    world = {"WORLD_SIZE": str(launch.num_processes), "LOCAL_WORLD_SIZE": str(launch.num_processes)}
    return [{**common, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(launch.num_processes)]


def _launcher_environment(config: Path, launch: Launch) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // launch.num_processes)
    arguments = ["--config_file", str(config), "--num_cpu_threads_per_process", str(threads), "verify"]
    try:
        settings, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
        if settings.use_deepspeed or settings.use_megatron_lm or settings.tpu:
            raise ValueError("its distributed_type is not one that the sharding backend runs under; use FSDP")
        environment: dict[str, str] = prepare_multi_gpu_env(settings)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadInputError(f"--accelerate-config: {launch.origin}: {first_line(error)}") from error
    return {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(settings.main_process_port)}


def _start_rank(environment: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / f"rank-{environment['RANK']}.log").open("wb") as log:
        return subprocess.Popen(  # noqa: S603 (this interpreter, this module)
            [sys.executable, "-P", "-m", "toolkit.verify", str(folder)],
            env=environment,
            stdin=subprocess.PIPE,  # its end tells the rank that this process is gone
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _await_ranks(processes: Sequence[subprocess.Popen[bytes]], folder: Path, seconds: float) -> None:
    """Returns when all ranks are done; raises as soon as one is not well, or the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):
            raise _failure(codes, folder)
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise _lateness(codes, folder, seconds)
        time.sleep(0.05)


def _lateness(codes: Sequence[int | None], folder: Path, seconds: float) -> ToolkitError:
    late = [rank for rank, code in enumerate(codes) if code is None]
    return ToolkitError(
        f"verify: rank {', '.join(map(str, late))}: not done in {seconds:.0f} s, and ended; raise --time-limit, or "
        f"shrink the model with --layers{_last_words(folder, late[0])}"
    )


def _failure(codes: Sequence[int | None], folder: Path) -> ToolkitError:
    """The error of the rank that failed first: one that died without a word, or the first that told."""
    failed = [rank for rank, code in enumerate(codes) if code]
    silent = [rank for rank in failed if not _outcome_path(folder, rank).exists()]
    if silent:
        rank, code = silent[0], codes[silent[0]]
        assert code is not None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"died with exit code {code}"
        return ToolkitError(f"verify: rank {rank} {how}{_last_words(folder, rank)}")
    rank = min(failed, key=lambda rank: _outcome_path(folder, rank).stat().st_mtime_ns)
    outcome = _outcome_of(folder, rank)
    if "error" not in outcome:
        return ToolkitError(f"verify: rank {rank} ended with exit code {codes[rank]}{_last_words(folder, rank)}")
    if outcome["bad_input"]:
        return BadInputError(outcome["error"])
    return ToolkitError(f"verify: rank {rank} failed: {outcome['error']}")


def _last_words(folder: Path, rank: int) -> str:
    lines = (folder / f"rank-{rank}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return "\nits last words:\n" + "\n".join(lines) if lines else "; it said nothing"


def _outcome_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _outcome_of(folder: Path, rank: int) -> dict[str, Any]:
    return json.loads(_outcome_path(folder, rank).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def _merged(results: list[dict[str, Any]], weights: dict[str, torch.Tensor]) -> ShardedRun:
    """One outcome of all ranks: a parameter has a gradient if its part on any rank has."""
    first = results[0]
    with_gradient = {name for result in results for name in result["with_gradient"]}
    without = [name for name in first["trainable"] if name not in with_gradient]
    replays = [result["replay"] for result in results if result["replay"] is not None]
    replay = {key: max(one[key] for one in replays) for key in replays[0]} if replays else None
    outcome = Outcome(first["losses"], first["grad_norms"], weights, without)
    return ShardedRun(outcome, first["facts"], first["precision"], first["device"], replay)


# One rank


def rank_main(folder: Path) -> int:
    """Runs this process's part of the sharded side, and leaves `rank-N.json` in `folder`."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    outcome: dict[str, Any]
    try:
        recipe = Recipe.from_mapping(yaml.safe_load(job["recipe"]))
        outcome = {"result": _run_sharded(recipe, job["steps"], folder)}
    except ToolkitError as error:
        outcome = {"error": str(error), "bad_input": isinstance(error, BadInputError)}
    except Exception:
        outcome = {"error": traceback.format_exc(), "bad_input": False}
    path = _outcome_path(folder, int(os.environ["RANK"]))
    path.with_suffix(".unfinished").write_text(json.dumps(outcome), encoding="utf-8")
    path.with_suffix(".unfinished").replace(path)
    return 0 if "result" in outcome else 1


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone, however that went."""
    while os.read(0, 1):  # the file itself: a thread inside Python's own stdin spoils the exit
        pass
    os._exit(1)


def _run_sharded(recipe: Recipe, steps: int, folder: Path) -> dict[str, Any]:
    """`finetune`'s own parts, for a few steps; rank 0 leaves the weights in `folder`."""
    run._quiet()
    sharded = resolve_strategy(recipe.sharding.strategy).sharded
    plugins = sharding_kwargs(
        recipe.sharding.strategy,
        unit_classes=recipe.sharding.unit_classes,
        checkpointing=run._checkpointing(recipe) if sharded else None,
    )
    accelerator = run._accelerator(recipe, plugins, folder / "run")
    if accelerator.mixed_precision == "fp16":
        raise BadInputError("mixed_precision fp16: its gradient scaler skips steps, which no plain loop does; use bf16")
    parts = run._build(accelerator, recipe, plugins["fsdp_plugin"])
    model = accelerator.unwrap_model(parts.model)
    set_dropout(model, 0.0)
    result = _train(accelerator, recipe, parts, steps, folder)
    weights = {name: t.float().cpu().contiguous() for name, t in whole_tensors(model) if t is not None}
    if accelerator.is_main_process:
        save_file(weights, folder / "weights.safetensors")
    checkpointed = recipe.sharding.activation_checkpointing or plugins["fsdp_plugin"].checkpointing
    result["replay"] = _replay(accelerator, parts) if checkpointed else None
    run._release(accelerator)
    return result


def _train(accelerator: Accelerator, recipe: Recipe, parts: run._Parts, steps: int, folder: Path) -> dict[str, Any]:
    """The trainer's own steps, each gradient looked at before the optimizer takes it."""
    model = accelerator.unwrap_model(parts.model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = run._inner_optimizer(parts.optimizer)
    with_gradient: set[str] = set()

    def look(*_: Any) -> None:
        with_gradient.update(name for name, p in named.items() if _is_felt(p.grad))

    optimizer.register_step_pre_hook(look)
    schedule = build_schedule(optimizer, recipe.schedule, parts.num_steps)
    metrics = Metrics(accelerator, folder / "metrics.jsonl", recipe.logging, steps)
    trainer = Trainer(
        accelerator, parts.model, parts.optimizer, schedule, parts.objective, recipe.training, metrics, parts.windows
    )
    parts.model.train()
    found = []
    for window in itertools.islice(parts.windows, steps):
        found.append(trainer.train_step(window))
        schedule.step()
    return {
        "losses": [step.loss for step in found],
        "grad_norms": [step.grad_norm for step in found],
        "trainable": sorted(named),
        "with_gradient": sorted(with_gradient),
        "facts": parts.facts,
        "precision": accelerator.mixed_precision,
        "device": accelerator.device.type,
    }


def _replay(accelerator: Accelerator, parts: run._Parts) -> dict[str, float]:
    """Gradients of this rank's first micro-batch, blocks checkpointed and not, from one random state.

    Returns:
        `blocks`: forwards under checkpointing; `difference`: of the gradients, as a share of the
        largest; `effect`: what another random state changes, 0 where the model has no dropout.
    """
    set_dropout(accelerator.unwrap_model(parts.model), REHEARSED_DROPOUT)
    batch = next(iter(parts.windows))[0]
    checkpointed = _gradients(accelerator, parts, batch, seed=0)
    with _direct_blocks() as calls:
        direct = _gradients(accelerator, parts, batch, seed=0)
        blocks = len(calls)
        other = _gradients(accelerator, parts, batch, seed=1)
    return {
        "blocks": blocks,
        "difference": _largest_difference(checkpointed, direct),
        "effect": _largest_difference(other, direct),
    }


@contextlib.contextmanager
def _direct_blocks() -> Iterator[list[str]]:
    """Checkpointed blocks run as if they were not; yields a list that gets an item for each of their forwards."""
    calls: list[str] = []

    def direct(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(forward.__qualname__)
        del kwargs["use_reentrant"], kwargs["preserve_rng_state"]
        return forward(*args, **kwargs)

    stock = vars(apply)["checkpoint"]
    vars(apply)["checkpoint"] = direct  # what `checkpoint_blocks` has the blocks call
    try:
        yield calls
    finally:
        vars(apply)["checkpoint"] = stock


def _gradients(accelerator: Accelerator, parts: run._Parts, batch: Batch, seed: int) -> list[torch.Tensor]:
    """This rank's parts of the gradients of one micro-batch."""
    torch.manual_seed(1000 * seed + accelerator.process_index)
    batch = {key: value.to(accelerator.device) for key, value in batch.items()}
    accelerator.backward(parts.objective.loss_sum(parts.model, batch))
    found = [local_tensor(p.grad).clone() for p in parts.model.parameters() if p.grad is not None]
    parts.model.zero_grad(set_to_none=True)
    return found


def _largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Over all tensors, as a share of the largest element; infinite where tensors are missing."""
    if len(found) != len(expected):
        return math.inf
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if b.numel()]
    largest = max((b.abs().max().item() for _, b in pairs), default=0.0)
    return max(((a - b).abs().max().item() for a, b in pairs), default=0.0) / max(largest, 1e-30)


# Comparing


def compare(plain: PlainRun, sharded: ShardedRun, dtype: str) -> list[Row]:
    """A row per check.

    Args:
        dtype: in which the recipe holds the weights.
    """
    mixed = sharded.precision != "no" or dtype != "float32"
    expected, found = plain.outcome, sharded.outcome
    return [
        _series_row("loss", found.losses, expected.losses, MIXED_LOSS if mixed else FLOAT32_LOSS),
        _series_row("gradient norm", found.grad_norms, expected.grad_norms, MIXED_NORM if mixed else FLOAT32_NORM),
        _weights_row(plain, found.weights, mixed, dtype),
        _gradients_row(found, expected),
        _replay_row(sharded.replay, sharded.device),
        plain.packing,
    ]


def _measured(check: str, found: float, tolerance: float, note: str) -> Row:
    """A NaN is a failure."""
    return Row(check, found, tolerance, OK if found <= tolerance else FAILED, note)


def _series_row(check: str, found: list[float], expected: list[float], tolerance: float) -> Row:
    """The largest relative difference of a step."""
    if len(found) != len(expected):
        return Row(check, None, tolerance, FAILED, f"{len(found)} sharded steps, {len(expected)} plain ones")
    differences = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(found, expected, strict=True)]
    worst = max(range(len(found)), key=lambda i: math.inf if math.isnan(differences[i]) else differences[i])
    note = f"relative; at step {worst + 1} {found[worst]:.7g} sharded, {expected[worst]:.7g} plain"
    return _measured(check, differences[worst], tolerance, note)


def weight_tolerance(reach: float, largest: float, steps: int, *, mixed: bool, dtype: str) -> tuple[float, float]:
    """Absolute tolerances of final weights: of elements with a steady gradient, and of the others.

    Without mixed precision 1e-5, but at most a tenth of the reach: AdamW moves a weight by about the learning
    rate whatever its gradient's size, so that early in a warm-up 1e-5 would pass anything. With it, and
    for the others, twice the reach. The rounding of each step comes on top.

    Args:
        reach: the sum of the learning rates.
        largest: weight, absolute.
        dtype: in which the weights are held.
    """
    rounding = steps * largest * torch.finfo(getattr(torch, dtype)).eps
    steady = 2 * reach if mixed else min(FLOAT32_WEIGHTS, reach / 10)
    return steady + rounding, 2 * reach + rounding


def _weights_row(plain: PlainRun, found: dict[str, torch.Tensor], mixed: bool, dtype: str) -> Row:
    expected = plain.outcome.weights
    unlike = [name for name in expected if name not in found or found[name].shape != expected[name].shape]
    if unlike:
        return Row(
            "weights", None, None, FAILED, f"missing in the sharded model, or of another shape: {_listed(unlike)}"
        )
    largest = max(weight.abs().max().item() for weight in expected.values())
    tolerance, loose = weight_tolerance(plain.reach, largest, len(plain.outcome.losses), mixed=mixed, dtype=dtype)
    steady, others, num_others = _weight_differences(plain, found)
    where = max(steady, key=lambda name: steady[name])
    row = _measured("weights", steady[where], tolerance, f"absolute; in {where}")
    note = row.note
    if num_others and not mixed:
        note += f"; {num_others:,} whose gradient is near rounding within {loose:.1e}"
    astray = [name for name, difference in others.items() if difference > loose]
    if astray:
        note += f"; farther than that: {_listed(astray)}"
    return Row("weights", row.found, tolerance, FAILED if astray else row.verdict, note)


def _weight_differences(
    plain: PlainRun, found: dict[str, torch.Tensor]
) -> tuple[dict[str, float], dict[str, float], int]:
    """Largest difference by parameter: of the steady elements, of the others; and how many those are.

    NaN counts as infinite.
    """
    steady_ones, others, num_others = {}, {}, 0
    for name, weight in plain.outcome.weights.items():
        difference = (found[name].to(weight) - weight).abs()
        difference = difference.where(~difference.isnan(), math.inf)
        steady = plain.steady.get(name, torch.ones_like(weight, dtype=torch.bool))
        steady_ones[name] = difference.where(steady, 0.0).max().item()
        others[name] = difference.where(~steady, 0.0).max().item()
        num_others += int((~steady).sum())
    return steady_ones, others, num_others


def _gradients_row(found: Outcome, expected: Outcome) -> Row:
    if not found.without_gradient:
        return Row("gradients", None, None, OK, "every trainable parameter got one")
    note = f"no gradient in any step: {_listed(found.without_gradient)}"
    if set(found.without_gradient) <= set(expected.without_gradient):
        note += "; nor in the plain loop: the model does not use them"
    return Row("gradients", None, None, FAILED, note)


def _replay_row(replay: dict[str, float] | None, device: str) -> Row:
    check = "dropout replay"
    if replay is None:
        return Row(check, None, None, NOT_USED, "no activation checkpointing")
    if not replay["blocks"]:
        return Row(check, None, None, FAILED, "no block ran under checkpointing, though the settings ask for it")
    if not replay["effect"]:
        return Row(check, None, None, NOT_USED, "the model has no dropout to replay")
    note = f"gradients with {replay['blocks']:.0f} blocks checkpointed and with none, dropout {REHEARSED_DROPOUT}"
    return _measured(check, replay["difference"], REPLAY_TOLERANCE[device], note)


def _listed(names: Sequence[str], shown: int = 10) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _finite(value: Any) -> Any:
    """JSON knows no infinity and no NaN: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(rank_main(Path(sys.argv[1])))
