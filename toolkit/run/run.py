"""`finetune(recipe)`: builds the parts of a run in order, fits, exports."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import set_seed
from rich.console import Console
from torch import nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.checkpoint.consolidate import MODEL_FILES
from toolkit.checkpoint.export import ExportSettings, export, reload, sample_text, verify, write_configuration
from toolkit.checkpoint.manifest import Manifest, latest
from toolkit.checkpoint.reader import find, same_run
from toolkit.checkpoint.session import RunCheckpoints
from toolkit.cli.look import write_data_report
from toolkit.data import build, tokenizer
from toolkit.data.build import TokenisedData
from toolkit.data.cache import cache_folder
from toolkit.data.loader import TrainLoader, evaluation_batches
from toolkit.data.samples import Batch, PairSamples, TextSamples
from toolkit.data.stream import StreamLoader, describe_stream
from toolkit.errors import BadInputError
from toolkit.model.adapters import base_of, trainable_share
from toolkit.model.attention import settle_attention
from toolkit.model.load import auto_class, load
from toolkit.objectives.build import build_objective
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.classification import SequenceClassification
from toolkit.objectives.objective import Objective
from toolkit.objectives.preference import Preference
from toolkit.objectives.reference import identity_of, with_reference
from toolkit.optim.build import build_optimizer, build_schedule
from toolkit.pages.card import write_card
from toolkit.pages.data_console import show_report
from toolkit.pages.data_page import DATA_PAGE
from toolkit.pages.run_page import RunSummary, write_report
from toolkit.places import GIB
from toolkit.planning.check import Planned, plan_run
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import OFFLOAD_DETAILS, steps_of_run
from toolkit.run.leaks import check_leaks
from toolkit.sharding.apply import PRECISIONS, Checkpointing, prepare_blocks
from toolkit.sharding.compiling import Compilation
from toolkit.sharding.offload import OffloadSettings
from toolkit.sharding.plugin import (
    ShardingPlugin,
    accumulation_plugin,
    reset_accelerate,
    resolve_offload,
    resolve_strategy,
    sharding_kwargs,
)
from toolkit.sharding.strategy import MeshShape
from toolkit.sharding.units import UnitPlan, plan_units
from toolkit.sharding.unused import has_branches
from toolkit.training.metrics import Metrics, flops_per_token, peak_flops
from toolkit.training.profile import FOLDER as PROFILE_FOLDER
from toolkit.training.profile import StepProfile
from toolkit.training.stop import StopRequests
from toolkit.training.trainer import Trainer

FINISHED = "report.html"
"""Written last: a run's folder that holds it is done."""

RUN_FILES = (
    "recipe.yaml",
    "metrics.jsonl",
    "data_report.json",
    DATA_PAGE,
    MODEL_FILES,
    FINISHED,
    PROFILE_FOLDER,
    "export",
    "checkpoints",
)
"""What a run leaves in its output folder."""


@dataclass(frozen=True)
class FinetuneResult:
    """What came of a run, on every rank.

    Attributes:
        output_dir: the run's folder.
        export_dir: loadable by `from_pretrained`; None where the recipe switched it off.
        metrics: the records of metrics.jsonl.
        initial_eval_loss: held-out loss before the first step; None without held-out data.
        final_eval_loss: held-out loss after the last step.
        sample: continuation of the recipe's prompt; on rank 0 alone.
        logits_difference: between model and export, as a share of the largest logit.
        seconds: duration of the run.
    """

    output_dir: Path
    export_dir: Path | None
    metrics: list[dict[str, Any]]
    initial_eval_loss: float | None
    final_eval_loss: float | None
    sample: str | None
    logits_difference: float | None
    seconds: float


@dataclass
class Parts:
    """What `build_parts` hands to the rest of the run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: CausalLM | SequenceClassification | Preference
    tokenizer: PreTrainedTokenizerBase
    data: TokenisedData
    windows: TrainLoader | StreamLoader
    num_steps: int
    facts: dict[str, str]
    planned: Planned
    compilation: Compilation | None


def finetune(recipe: Recipe) -> FinetuneResult:
    """Runs a recipe on this process, or on all processes that the launcher started.

    Raises:
        ToolkitError: on every rank; with exit code 2 for bad input, before anything is left behind.
    """
    quiet_libraries()
    grow_segments()
    started = time.perf_counter()
    plugins = build_plugins(recipe)
    output_dir = Path(recipe.training.output_dir).expanduser().resolve()
    accelerator = build_accelerator(recipe, plugins, output_dir)
    try:
        found = ranks.on_first_rank(lambda: find(output_dir, recipe.checkpoint.resume, recipe.model_dump(mode="json")))
        with _claimed(output_dir, recipe, found):
            parts = build_parts(accelerator, recipe, plugins["fsdp_plugin"])
        return _fit_and_export(accelerator, recipe, plugins["fsdp_plugin"], parts, output_dir, found, started)
    finally:
        release(accelerator, plugins["fsdp_plugin"])


def build_plugins(recipe: Recipe) -> dict[str, Any]:
    """The sharding that the recipe and the Accelerate config ask for, as arguments of `Accelerator`."""
    section = recipe.sharding
    sharded = resolve_strategy(section.strategy).sharded
    return sharding_kwargs(
        section.strategy,
        unit_classes=section.unit_classes,
        checkpointing=checkpointing_of(recipe) if sharded else None,
        offload=_offload_of(recipe),
        compilation=_compilation_of(recipe) if sharded else None,
        prefetch=section.prefetch,
    )


def _compilation_of(recipe: Recipe) -> Compilation | None:
    """How blocks are compiled. Raises BadInputError where the Accelerate config asks for it, too."""
    configured = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if recipe.training.compile and configured.lower() != "no":
        raise BadInputError(
            f"training.compile is set, and so is the Accelerate config's dynamo_backend ({configured}): the blocks "
            "would be compiled twice; remove one of them"
        )
    return Compilation() if recipe.training.compile else None


def _offload_of(recipe: Recipe) -> str | OffloadSettings | None:
    """How optimizer state is offloaded. Raises BadInputError for details of an offload that nobody asked for."""
    section = recipe.sharding
    details = {key: getattr(section, key) for key in OFFLOAD_DETAILS if getattr(section, key) is not None}
    if resolve_offload(section.strategy, section.offload) is None:
        for key in details:
            raise BadInputError(
                f"sharding.{key} has no effect without offload; set sharding.offload=optimizer, or the strategy "
                "zero3+offload in the Accelerate config"
            )
        return section.offload
    return OffloadSettings(
        executor=section.offload_executor or "auto",
        device_state_gib=section.device_state_gib if section.device_state_gib is not None else 0.0,
        threads=section.offload_threads,
        during_backward=recipe.training.max_grad_norm is None,
    )


AUTO_CHECKPOINTING = (4, 3, 2, 1)
"""What `sharding.activation_checkpointing: auto` tries after none, in turn: every n-th block."""


def checkpointing_of(recipe: Recipe) -> Checkpointing | None:
    """What the recipe asks for; None for none, and for `auto` before there is a plan."""
    every = recipe.sharding.activation_checkpointing
    return None if every in (None, "auto") else Checkpointing(int(every), recipe.sharding.offload_checkpoints)


def _checkpointings(recipe: Recipe, plugin: ShardingPlugin) -> list[Checkpointing | None]:
    """Those among which the plan chooses: the one asked for, or what `auto` stands for."""
    section = recipe.sharding
    if section.activation_checkpointing != "auto":
        return [plugin.checkpointing if plugin.strategy.sharded else checkpointing_of(recipe)]
    return [None, *(Checkpointing(n, section.offload_checkpoints) for n in AUTO_CHECKPOINTING)]


def quiet_libraries() -> None:
    """The run's own progress is shown, not that of the libraries below."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing. is deprecated.*")  # by peft
    warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process.*")


def grow_segments() -> None:
    """Lets CUDA's allocator grow its segments, which keeps memory from going to pieces, unless told otherwise."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if torch.cuda.is_available() and not started and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def build_accelerator(recipe: Recipe, plugins: dict[str, Any], output_dir: Path) -> Accelerator:
    for tracker in recipe.logging.trackers:
        if tracker not in [str(available) for available in get_available_trackers()]:
            raise BadInputError(
                f"logging.trackers: {tracker} is not installed; pip install {tracker}, or remove it from the recipe"
            )
    accelerator = Accelerator(
        mixed_precision=_mixed_precision(recipe),
        gradient_accumulation_plugin=accumulation_plugin(recipe.training.gradient_accumulation_steps),
        log_with=list(recipe.logging.trackers) or None,
        project_dir=str(output_dir),
        **plugins,
    )
    precision, device = accelerator.mixed_precision, accelerator.device.type
    if precision not in PRECISIONS or (precision == "fp16" and device == "cpu"):
        raise BadInputError(f"mixed_precision {precision} is not possible on {device}; use bf16 or no")
    return accelerator


def _mixed_precision(recipe: Recipe) -> str | None:
    """The recipe's precision; None leaves it to the Accelerate config. Raises where they contradict."""
    asked = recipe.training.mixed_precision
    configured = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    # The launcher exports "no" where its config says nothing, so "no" contradicts nobody.
    if asked is not None and configured not in ("no", asked):
        raise BadInputError(
            f"training.mixed_precision is {asked}, but the Accelerate config's mixed_precision is {configured}; "
            "remove one of them or make them agree"
        )
    return asked


@contextmanager
def _claimed(output_dir: Path, recipe: Recipe, resumed: tuple[Path, Manifest] | None) -> Iterator[None]:
    """Makes the output folder and writes the resolved recipe; takes both back if what follows fails.

    Beside what this recipe's run has left before, the recipe stays: by it the next start knows that run again.
    Raises BadInputError where the folder already holds a run that this one does not go on.
    """
    goes_on = resumed is not None and resumed[0].is_relative_to(output_dir)

    def claim() -> bool:
        if output_dir.exists() and not output_dir.is_dir():
            raise BadInputError(f"training.output_dir: {str(output_dir)!r} is a file; name a folder")
        _require_unfinished(output_dir, recipe, goes_on)
        made = not output_dir.exists()
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            # Whole or not at all: a run that was killed just then is known again by its recipe.
            partial = output_dir / "recipe.yaml.partial"
            partial.write_text(recipe.to_yaml(), encoding="utf-8")
            partial.replace(output_dir / "recipe.yaml")
        except OSError as error:
            raise BadInputError(
                f"training.output_dir: {str(output_dir)!r} cannot be written: {error.strerror}; name another folder"
            ) from error
        return made

    made = ranks.on_first_rank(claim)
    try:
        yield
    except BaseException:
        if ranks.rank() == 0 and not goes_on and _run_files(output_dir) == ["recipe.yaml"]:
            (output_dir / "recipe.yaml").unlink(missing_ok=True)
            if made and not any(output_dir.iterdir()):
                output_dir.rmdir()
        raise


def _run_files(output_dir: Path) -> list[str]:
    """What a run has left in the folder."""
    return [name for name in RUN_FILES if (output_dir / name).exists()]


def _require_unfinished(output_dir: Path, recipe: Recipe, goes_on: bool) -> None:
    """Raises BadInputError where the output folder holds another run, or one that is done.

    What a run of the same recipe has left that was ended before its first checkpoint is cleared away.
    """
    found = _run_files(output_dir)
    finished = (output_dir / FINISHED).exists()
    if goes_on and (not finished or recipe.checkpoint.resume != "auto"):
        return
    again = recipe.checkpoint.resume == "auto" and same_run(output_dir / "recipe.yaml", recipe.model_dump(mode="json"))
    if not finished and again and latest(output_dir) is None:
        for name in ("metrics.jsonl", "data_report.json", DATA_PAGE):
            (output_dir / name).unlink(missing_ok=True)
        shutil.rmtree(output_dir / PROFILE_FOLDER, ignore_errors=True)
        return
    if found:
        raise BadInputError(
            f"training.output_dir: {str(output_dir)!r} already holds a {'finished ' if finished else ''}run "
            f"({', '.join(found)}); choose another folder, for example training.output_dir=outputs/second, or delete "
            "this one"
        )


def build_parts(accelerator: Accelerator, recipe: Recipe, plugin: ShardingPlugin) -> Parts:
    """Tokenizer, data, model, optimizer, in this order; the model is sharded and has its weights."""
    training = recipe.training
    tokens = tokenizer.load(recipe.model, recipe.data, recipe.objective.kind)
    data = build.build(recipe.data, tokens, training.seed, recipe.objective)
    model = load(recipe.model, tokens, training.seed, data.label_names, recipe.adapter)
    require_room(model, tokens, recipe)
    in_16_bits = accelerator.mixed_precision != "no" or recipe.model.dtype != "float32"
    attention = settle_attention(
        base_of(model),
        recipe.model.attention,
        accelerator.device,
        in_16_bits,
        packed=data.report["packing"],
        compiled=training.compile,
    )
    objective = build_objective(recipe.objective, model, data.report["packing"], data.report["train"].get("labels"))
    samples_per_step = training.micro_batch_size * accelerator.num_processes * training.gradient_accumulation_steps
    num_steps = steps_of_run(training, len(data.train), samples_per_step)
    num_trained, num_parameters = trainable_share(model)
    planned = _planned(accelerator, recipe, model, plugin, data.report["train"].get("labels"))
    compilation = plugin.compilation
    if not plugin.strategy.sharded:
        compilation = _make_whole(model, recipe, planned.checkpointing)
        accelerator.ddp_handler.find_unused_parameters = has_branches(model)
    plugin.checkpointing = planned.checkpointing
    optimizer = build_optimizer(model, recipe.optimizer, recipe.sharding.unit_classes)
    model, optimizer = accelerator.prepare(model, optimizer)
    leaks = _check_leaks(accelerator, recipe, model, objective, data, in_16_bits)
    loss = None
    if not isinstance(objective, SequenceClassification):
        loss = objective.check_head_loss(model, accelerator.device, in_16_bits)
    if isinstance(objective, Preference) and objective.needs_references:
        data = _with_references(accelerator, recipe, model, objective, data)
    windows = build_windows(
        recipe,
        data,
        num_steps,
        training.gradient_accumulation_steps,
        accelerator.process_index,
        accelerator.num_processes,
    )
    facts = {
        "model": f"{accelerator.unwrap_model(model).config.architectures[0]}, {num_parameters:,} parameters"
        + (f", {num_trained:,} trained ({num_trained / num_parameters:.2%})" if num_trained < num_parameters else ""),
        "strategy": f"{plugin.strategy.name} ({plugin.strategy.summary})",
        "ranks": f"{accelerator.num_processes} on {accelerator.device.type}",
        "precision": "float32" if accelerator.mixed_precision == "no" else accelerator.mixed_precision,
        "attention": attention,
        "steps": f"{num_steps} of {samples_per_step} samples of {recipe.data.max_length} tokens",
    }
    facts["memory"] = planned.describe()
    if recipe.sharding.activation_checkpointing == "auto":
        every = planned.checkpointing and planned.checkpointing.every
        facts["checkpoints"] = f"auto: {f'every {every}. block' if every else 'none'}"
    if loss is not None:
        facts["loss"] = loss
    if leaks is not None:
        facts["packing"] = leaks
    if plugin.engine is not None:
        facts["offload"] = plugin.engine.describe()
    if compilation is not None:
        facts["compute"] = compilation.describe()
    return Parts(model, optimizer, objective, tokens, data, windows, num_steps, facts, planned, compilation)


def _planned(
    accelerator: Accelerator,
    recipe: Recipe,
    model: nn.Module,
    plugin: ShardingPlugin,
    label_counts: dict[str, int] | None,
) -> Planned:
    """What the run will hold. Raises BadInputError on every rank where it cannot fit."""
    sizes, num_ranks = accelerator.parallelism_config, accelerator.num_processes
    sharded = plugin.strategy.sharded
    mesh = MeshShape(sizes.dp_replicate_size, sizes.dp_shard_size) if sharded else MeshShape(num_ranks, 1)
    return ranks.on_first_rank(
        lambda: plan_run(
            recipe,
            model,
            plugin.strategy,
            mesh,
            plugin.offload is not None,
            _checkpointings(recipe, plugin),
            accelerator.mixed_precision,
            label_counts,
            accelerator.device,
        )
    )


def _with_references(
    accelerator: Accelerator, recipe: Recipe, model: nn.Module, objective: Preference, data: TokenisedData
) -> TokenisedData:
    """The data with the log-probabilities of the model before its first step."""
    found: dict[str, Any] = {}
    for split, samples in (("train", data.train), ("validation", data.validation)):
        if isinstance(samples, PairSamples):
            precision, seed = accelerator.mixed_precision, recipe.training.seed
            identity = identity_of(recipe.model, precision, data.fingerprint, seed, split)
            size, cache = recipe.training.micro_batch_size, cache_folder(recipe.data)
            found[split] = with_reference(accelerator, model, objective, samples, size, cache, identity)
    return replace(data, **found)


def build_windows(
    recipe: Recipe, data: TokenisedData, num_steps: int, accumulation: int, rank: int, world_size: int
) -> TrainLoader | StreamLoader:
    """What yields a rank's micro-batches of each optimizer step, `accumulation` of them."""
    training = recipe.training
    all_steps = num_steps * training.micro_batch_size * accumulation * world_size
    split = {
        "micro_batch_size": training.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "rank": rank,
        "world_size": world_size,
    }
    if data.stream is not None:
        return StreamLoader(data.stream, num_positions=all_steps, **split)
    positions = num_positions(recipe, len(data.train), all_steps)
    return TrainLoader(data.train, num_positions=positions, seed=training.seed, shuffle=recipe.data.shuffle, **split)


def _check_leaks(
    accelerator: Accelerator,
    recipe: Recipe,
    model: nn.Module,
    objective: Objective,
    data: TokenisedData,
    in_16_bits: bool,
) -> str | None:
    """What was found about rows that share a sample; None where none do. Raises BadInputError where they leak."""
    if not isinstance(data.train, TextSamples) or not data.train.packed:
        return None
    found = check_leaks(
        model,
        accelerator.unwrap_model(model),
        objective,
        data.train,
        recipe.training.micro_batch_size,
        accelerator.device,
        in_16_bits,
    )
    fill = f"{data.report['train']['fill_rate']:.1%} of the tokens are used"
    if found is None:
        return f"{fill}; no sample holds two rows"
    return (
        f"{fill}; checked: rows that share a sample do not see each other (change {found[0]:.0e}, alone {found[1]:.0e})"
    )


def _make_whole(model: PreTrainedModel, recipe: Recipe, checkpointing: Checkpointing | None) -> Compilation | None:
    """What the sharding plugin does in `prepare`, for a model that DDP wraps as it is; how it was compiled, if so."""
    model.materialize_weights()
    compilation = _compilation_of(recipe)
    if checkpointing is not None or compilation is not None:
        prepare_blocks(model, plan_units(model, recipe.sharding.unit_classes), checkpointing, compilation)
    return compilation


def num_positions(recipe: Recipe, num_samples: int, all_steps: int) -> int:
    """Samples of the whole run: whole steps, or exactly the epochs asked for."""
    if recipe.training.num_epochs is None:
        return all_steps
    return max(1, round(recipe.training.num_epochs * num_samples))


def require_room(model: PreTrainedModel, tokens: PreTrainedTokenizerBase, recipe: Recipe) -> None:
    """Raises BadInputError where samples do not fit the model's positions or its vocabulary."""
    config = model.config
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and recipe.data.max_length > positions:
        raise BadInputError(
            f"data.max_length: {recipe.data.max_length} is more than the model's {positions} positions "
            f"(max_position_embeddings); lower it to {positions} or less"
        )
    rows = int(model.get_input_embeddings().weight.shape[0])
    if len(tokens) > rows:
        raise BadInputError(
            f"model.tokenizer: {len(tokens)} tokens, but the model's embeddings have {rows} rows; "
            "use the tokenizer that belongs to the model"
        )


def _fit_and_export(
    accelerator: Accelerator,
    recipe: Recipe,
    plugin: ShardingPlugin,
    parts: Parts,
    output_dir: Path,
    found: tuple[Path, Manifest] | None,
    started: float,
) -> FinetuneResult:
    console = Console(stderr=True, quiet=not accelerator.is_main_process, highlight=False, soft_wrap=True)
    _introduce(console, plugin, parts)
    if accelerator.is_main_process:
        write_data_report(output_dir, recipe, parts.data.report)
        inner = base_of(accelerator.unwrap_model(parts.model))
        (output_dir / MODEL_FILES).mkdir(exist_ok=True)
        write_configuration(inner, parts.tokenizer, output_dir / MODEL_FILES, getattr(torch, recipe.model.dtype))
    accelerator.init_trackers(recipe.logging.project_name, config=_tracker_config(recipe))
    set_seed(recipe.training.seed, device_specific=True)  # dropout differs between ranks
    num_positions = parts.windows.num_positions
    if found is not None:
        parts.num_steps, num_positions = _rest_of_run(recipe, parts, found[1])
        console.print(_resumed_from(*found), markup=False)
    optimizer = inner_optimizer(parts.optimizer)
    metrics_file, unit = output_dir / "metrics.jsonl", parts.objective.unit
    with (
        StopRequests(recipe.checkpoint.time_limit_minutes) as stop,
        Metrics(accelerator, metrics_file, recipe.logging, parts.num_steps, unit, parts.planned.peak_bytes) as metrics,
    ):
        schedule = build_schedule(optimizer, recipe.schedule, parts.num_steps)
        checkpoints = RunCheckpoints(
            accelerator, output_dir, recipe, plugin.text, parts.data.fingerprint, parts.model, optimizer, metrics
        )
        profile = _profile_of(accelerator, recipe, output_dir)
        trainer = Trainer(
            accelerator,
            parts.model,
            parts.optimizer,
            schedule,
            parts.objective,
            recipe.training,
            metrics,
            parts.windows,
            evaluation=_evaluation(accelerator, recipe, parts.data),
            flops=_flops(accelerator, recipe, parts.model),
            stop_reason=lambda: stop.reason,
            checkpoints=checkpoints,
            profile=profile,
        )
        if found is not None:
            checkpoints.restore(*found, trainer, schedule, num_positions)
        try:
            trainer.fit()
        finally:
            checkpoints.wait()
        if plugin.engine is not None:
            plugin.engine.flush()  # the last step may still fail
    if profile is not None:
        console.print(_where_time_went(profile.seconds), markup=False)
    if parts.data.stream is not None:
        _tell_stream(accelerator, recipe, parts, output_dir)
    export_dir, difference, sample = _export(accelerator, recipe, parts, output_dir)
    losses = [record["loss"] for record in metrics.records if record["split"] == "eval"]
    result = FinetuneResult(
        output_dir=output_dir,
        export_dir=export_dir,
        metrics=metrics.records,
        initial_eval_loss=losses[0] if losses else None,
        final_eval_loss=losses[-1] if losses else None,
        sample=sample,
        logits_difference=difference,
        seconds=time.perf_counter() - started,
    )
    if accelerator.is_main_process:
        seconds = profile.seconds if profile is not None else None
        summary = replace(_summary(recipe, plugin, parts, result), step_seconds=seconds)
        if export_dir is not None:
            write_card(export_dir, recipe, summary.facts, result.metrics, parts.data.report, summary.versions)
        write_report(output_dir / FINISHED, summary)
    _conclude(console, recipe, result)
    accelerator.wait_for_everyone()
    return result


def _tell_stream(accelerator: Accelerator, recipe: Recipe, parts: Parts, output_dir: Path) -> None:
    """Writes the data report anew, with all the rows that have been read."""
    stream, samples = parts.data.stream, parts.data.train
    assert stream is not None
    assert isinstance(samples, TextSamples)
    parts.data.report.update(describe_stream(stream, samples, parts.tokenizer))
    if accelerator.is_main_process:
        write_data_report(output_dir, recipe, parts.data.report)


def _rest_of_run(recipe: Recipe, parts: Parts, manifest: Manifest) -> tuple[int, int]:
    """Steps and samples of the whole run, where the first steps may have been of another size."""
    size = parts.windows.samples_per_step
    if recipe.training.num_epochs is None:
        return parts.num_steps, manifest.samples + max(0, parts.num_steps - manifest.step) * size
    positions = parts.windows.num_positions
    return manifest.step + max(0, -(-(positions - manifest.samples) // size)), positions


def _resumed_from(folder: Path, manifest: Manifest) -> str:
    return (
        f"   resumed: after step {manifest.step}, {manifest.samples:,} samples, from {folder} "
        f"(written by {manifest.world_size} ranks, {manifest.strategy})"
    )


def _profile_of(accelerator: Accelerator, recipe: Recipe, output_dir: Path) -> StepProfile | None:
    steps = recipe.training.profile_steps
    return None if steps is None else StepProfile(accelerator, steps[0], steps[1], output_dir)


def _where_time_went(seconds: dict[str, float] | None) -> str:
    if seconds is None:
        return "   profile: none: the run took no such steps (training.profile_steps)"
    whole = sum(seconds.values())
    parts = ", ".join(f"{kind} {part / whole:.1%}" for kind, part in seconds.items())
    return f"   profile: {whole:.3f} s a step: {parts}"


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside Accelerate's."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _tracker_config(recipe: Recipe) -> dict[str, Any]:
    """The recipe as flat plain values, which is what trackers take."""
    plain = {key: value for key, (value, _) in recipe.origins().items()}
    return {key: value if isinstance(value, int | float | str | bool) else str(value) for key, value in plain.items()}


def _evaluation(accelerator: Accelerator, recipe: Recipe, data: TokenisedData) -> Any:
    held_out = data.validation
    if held_out is None:
        return None

    def batches() -> Iterator[Batch]:
        return evaluation_batches(
            held_out,
            recipe.training.micro_batch_size,
            accelerator.process_index,
            accelerator.num_processes,
            recipe.data.max_validation_samples,
        )

    return batches


def _flops(accelerator: Accelerator, recipe: Recipe, model: nn.Module) -> tuple[float, float] | None:
    peak = peak_flops(accelerator.device, accelerator.mixed_precision)
    if peak is None:
        return None
    return flops_per_token(accelerator.unwrap_model(model), recipe.data.max_length), peak


def _export(
    accelerator: Accelerator, recipe: Recipe, parts: Parts, output_dir: Path
) -> tuple[Path | None, float | None, str | None]:
    """Writes and checks the export: its folder, the difference of logits and a sample of text."""
    settings = recipe.export
    if not settings.enabled:
        return None, None, None
    folder = output_dir / "export"
    dtype = getattr(torch, settings.dtype or recipe.model.dtype)
    how = ExportSettings(dtype, int(settings.max_shard_gib * GIB), settings.merge)
    export(accelerator, parts.model, parts.tokenizer, folder, how)
    reloaded = None
    if accelerator.is_main_process and (settings.verify or recipe.logging.sample_prompt is not None):
        compute = PRECISIONS[accelerator.mixed_precision] or dtype
        reloaded = reload(folder, accelerator.device, compute, accelerator.unwrap_model(parts.model).config)
    difference = sample = None
    if settings.verify:
        batch = next(iter(evaluation_batches(parts.data.train, 1, 0, 1, 1)))
        difference = verify(accelerator, parts.model, reloaded, parts.objective.logits, batch)
    if reloaded is not None and recipe.logging.sample_prompt is not None:
        sample = sample_text(
            reloaded,
            parts.tokenizer,
            recipe.logging.sample_prompt,
            recipe.logging.sample_max_new_tokens,
            recipe.training.seed,
        )
    return folder, difference, sample


def _introduce(console: Console, plugin: ShardingPlugin, parts: Parts) -> None:
    for name, fact in parts.facts.items():
        console.print(f"{name:>10}: {fact}", markup=False)
    show_report(console, parts.data.report)
    if plugin.unit_plan is not None:
        console.print(plugin.unit_plan.table(), markup=False)


def _conclude(console: Console, recipe: Recipe, result: FinetuneResult) -> None:
    if result.initial_eval_loss is not None and result.final_eval_loss is not None:
        change = result.final_eval_loss / result.initial_eval_loss - 1
        console.print(
            f"held-out loss {result.initial_eval_loss:.4f} -> {result.final_eval_loss:.4f} ({change:+.1%}) "
            f"in {result.seconds:.0f} s"
        )
    if result.sample is not None:
        console.print("sample:", style="bold")
        console.print((recipe.logging.sample_prompt or "") + result.sample, markup=False)
    console.print(f"run: {result.output_dir}", markup=False)
    console.print(f"report: {result.output_dir / 'report.html'}", markup=False)
    if result.export_dir is not None:
        console.print(f"model: {_how_to_load(result.export_dir)}", markup=False)


def _how_to_load(export_dir: Path) -> str:
    if (export_dir / "adapter_config.json").is_file():
        return f"PeftModel.from_pretrained(base, {str(export_dir)!r})"
    auto = auto_class(AutoConfig.from_pretrained(export_dir)).__name__
    return f"{auto}.from_pretrained({str(export_dir)!r})"


def _summary(recipe: Recipe, plugin: ShardingPlugin, parts: Parts, result: FinetuneResult) -> RunSummary:
    facts = {**parts.facts, "duration": f"{result.seconds:.0f} s"}
    facts["memory"] += f"; measured {_measured_memory(result.metrics)}"
    if parts.compilation is not None:
        facts["compute"] = parts.compilation.describe()  # it may have failed in the first step
    if result.logits_difference is not None:
        facts["export checked"] = f"logits differ by {result.logits_difference:.1e} of the largest"
    packages = ("finetune-toolkit", "torch", "accelerate", "transformers", "datasets")
    machine = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    sample = None if result.sample is None else (recipe.logging.sample_prompt or "", result.sample)
    return RunSummary(
        title=recipe.description or "Fine-tuning run",
        recipe_yaml=recipe.to_yaml(),
        metrics=result.metrics,
        data_report=parts.data.report,
        units=_unit_rows(plugin.unit_plan),
        facts=facts,
        versions={**{package: version(package) for package in packages}, "machine": machine},
        sample=sample,
    )


def _measured_memory(metrics: list[dict[str, Any]]) -> str:
    """The peak of the rank that took most, of its device or, on CPU ranks, of its process."""
    train = [record for record in metrics if record["split"] == "train"]
    device = max((record["peak_device_bytes"] or 0 for record in train), default=0)
    if device:
        return f"{device / GIB:.2f} GiB"
    host = max((record["peak_host_bytes"] for record in train), default=0)
    return f"{host / GIB:.2f} GiB of host memory, with Python and its libraries"


def _unit_rows(plan: UnitPlan | None) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "class_name": units[0].class_name,
            "count": len(units),
            "num_parameters": sum(unit.num_parameters for unit in units),
            "num_bytes": sum(unit.num_bytes for unit in units),
        }
        for name, units in (plan.groups() if plan is not None else [])
    ]


def release(accelerator: Accelerator, plugin: ShardingPlugin) -> None:
    """Ends trackers, offload and the process group, so that this process can start another run."""
    plugin.close()
    accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()
    reset_accelerate()
