"""From a sharded checkpoint to a folder that `from_pretrained` loads: on one process, a file at a time."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from toolkit.checkpoint.export import (
    TOLERANCE,
    ExportSettings,
    carry_over,
    let_others_read,
    relative_difference,
    reload,
    require_close,
    write_configuration,
    write_weights,
)
from toolkit.checkpoint.fetch import fetch
from toolkit.checkpoint.manifest import (
    COMPLETE,
    MANIFEST,
    Manifest,
    check_files,
    latest,
    look_at,
    read_checkpoint,
    step_folder,
)
from toolkit.checkpoint.state import MODEL
from toolkit.checkpoint.store import StorePath
from toolkit.errors import BadInputError, first_line
from toolkit.model.adapters import add_adapter, has_adapter, quantise, write_adapter
from toolkit.model.file_names import FileNames
from toolkit.model.load import PROCESSORS, auto_class, take_generation_settings
from toolkit.optim.ema import AVERAGE
from toolkit.paths import GIB, is_store
from toolkit.recipe.schema import AdapterSection, ExportSection

EXPORT_TYPES = ("float32", "bfloat16", "float16")

MODEL_FILES = "model"
"""Folder of a run with the model's configuration and tokenizer."""

STORED_NAMES = "stored_names.json"
"""Of the tensors in the base's files; null: it had none."""


def export_checkpoint(
    run: Path, folder: Path, manifest: Manifest, to: Path, settings: ExportSettings, verify: bool
) -> float | None:
    """Writes `to`, whole or not at all.

    Host memory: one of its files at a time; to verify, the model twice.

    Returns:
        The largest difference of logits between checkpoint and export, as a share of the largest logit;
        None if it was not looked for, or where the export is an adapter.

    Raises:
        BadInputError: a checkpoint that is not what was written, or a folder that exists.
        ExportError: if the export gives other logits.
    """
    if to.exists():
        raise BadInputError(f"--to: {str(to)!r} exists; name a new folder")
    problem = check_files(folder, manifest, manifest.files)
    if problem is not None:
        raise BadInputError(f"{str(folder)!r}: {problem}")
    config, tokenizer = _configuration(run / MODEL_FILES)
    model = _empty_model(config, manifest)
    # Written beside its place and renamed: what is cut off is never taken for a model. Under a name of its own, as two
    # exports to one place would write into each other's files.
    unfinished = to.with_name(f".{to.name}.{uuid.uuid4().hex}.unfinished")
    unfinished.mkdir(parents=True)
    try:
        tensors = read_whole(folder, manifest, settings.max_shard_bytes, settings.average)
        if has_adapter(model):
            write_adapter(model, tensors, unfinished, manifest.base)
            tokenizer.save_pretrained(unfinished)
            carry_over(run / MODEL_FILES, unfinished, [PROCESSORS])
            difference = None
        else:
            names = FileNames(model, _stored_names(run / MODEL_FILES / STORED_NAMES))
            write_weights(tensors, {name for name, _ in model.named_parameters()}, unfinished, settings, names)
            take_generation_settings(model, str(run / MODEL_FILES))
            write_configuration(model, tokenizer, unfinished, settings.dtype)
            carry_over(run / MODEL_FILES, unfinished)
            difference = _difference(folder, manifest, config, unfinished, settings) if verify else None
        if difference is not None:
            require_close(difference, TOLERANCE[settings.dtype])
        let_others_read(unfinished)
        _put(unfinished, to)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return difference


def _configuration(folder: Path) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """The run's configuration and tokenizer; a run's folder may come from anywhere, and none of its code is run."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return config, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInputError(
            f"{str(folder)!r} holds no configuration and tokenizer that transformers knows without running code of the "
            f"folder: {first_line(error)}; a run exports a model with code of its own itself (export.enabled)"
        ) from error


def _stored_names(path: Path) -> frozenset[str] | None:
    """None, as of a base without files, where the run is of a version that did not write them."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return frozenset(map(str, found)) if isinstance(found, list) else None


def _put(unfinished: Path, to: Path) -> None:
    """Moves an export to its place, unless another has got there first."""
    try:
        os.rename(unfinished, to)
    except OSError as error:
        raise BadInputError(f"--to: {str(to)!r} was made meanwhile; name a new folder") from error


@dataclass(frozen=True)
class Exported:
    """An export of a checkpoint: its folder, the step, and the difference of logits, if it was looked for.

    Attributes:
        is_adapter: without its base, and then its logits are not compared.
    """

    folder: Path
    step: int
    logits_difference: float | None
    is_adapter: bool


def export_run(
    run: str | Path,
    to: str | Path,
    checkpoint: int | None = None,
    dtype: str = "float32",
    verify: bool = True,
    max_shard_gib: float = ExportSection().max_shard_gib,
    average: bool = True,
) -> Exported:
    """Converts a run's checkpoint to a folder that `from_pretrained` loads, in one process.

    Of a run in a store the checkpoint is copied first, to a folder beside `to` that is deleted afterwards.

    Args:
        run: its folder, or its place in a store (s3://bucket/runs/first).
        to: new folder.
        checkpoint: its step; None: the last.
        dtype: of the weights: float32, bfloat16 or float16.
        verify: reload the folder and compare its logits.
        max_shard_gib: largest file of weights (GiB).
        average: export the averaged weights (`training.ema`) where the checkpoint has them; otherwise the last ones.

    Raises:
        BadInputError: no such checkpoint, one that is damaged, files of no size, or a folder that exists.
        ExportError: if the export gives other logits.
    """
    to = Path(to)
    if not max_shard_gib > 0:
        raise BadInputError(f"--max-shard-gib: found {max_shard_gib:g}; allowed: a number greater than 0")
    if is_store(str(run)):
        return _export_stored(StorePath(str(run)), to, checkpoint, dtype, verify, max_shard_gib, average)
    run = Path(run)
    if dtype not in EXPORT_TYPES:
        raise BadInputError(f"dtype: unknown {dtype!r}; allowed: {', '.join(EXPORT_TYPES)}")
    folder = _last(run) if checkpoint is None else step_folder(run, checkpoint)
    manifest = read_checkpoint(folder)
    settings = ExportSettings(getattr(torch, dtype), int(max_shard_gib * GIB), average=average)
    difference = export_checkpoint(run, folder, manifest, to, settings, verify)
    return Exported(to, manifest.step, difference, manifest.recipe["adapter"]["kind"] != "none")


def _export_stored(
    store: StorePath, to: Path, step: int | None, dtype: str, verify: bool, max_shard_gib: float, average: bool
) -> Exported:
    """The export of a checkpoint in a store, by way of a folder that looks like its run's."""
    last = latest(store) if step is None else look_at(step_folder(store, step))
    if last is None or last.manifest is None or last.problem is not None:
        found = "it has none" if last is None else f"{last.folder.name}: {last.problem}"
        shown = shlex.quote(str(store))
        raise BadInputError(f"{str(store)!r} has no such whole checkpoint ({found}); see toolkit checkpoints {shown}")
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent) as folder:
        run = Path(folder)
        problem = fetch(step_folder(store, last.step), last.manifest, step_folder(run, last.step))
        if problem is not None:
            raise BadInputError(f"{str(last.folder)!r}: {problem}")
        (run / MODEL_FILES).mkdir()
        for path in (store / MODEL_FILES).iterdir():
            path.get(run / MODEL_FILES / path.name)
        for name in (MANIFEST, COMPLETE):
            (step_folder(store, last.step) / name).get(step_folder(run, last.step) / name)
        return export_run(run, to, last.step, dtype, verify, max_shard_gib, average)


def _last(run: Path) -> Path:
    """The folder of the last whole checkpoint."""
    last = latest(run)
    if last is None:
        if not run.is_dir():
            raise BadInputError(f"there is no folder {str(run)!r}; name that of a run")
        raise BadInputError(f"{str(run)!r} has no whole checkpoint; see toolkit checkpoints {shlex.quote(str(run))}")
    return step_folder(run, last.step)


def _empty_model(config: PretrainedConfig, manifest: Manifest) -> PreTrainedModel:
    """The run's model without weights, with adapters where it has them."""
    with init_empty_weights():
        model: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=False)
    model.tie_weights()
    recipe = manifest.recipe
    if recipe["adapter"]["kind"] == "none":
        return model
    section = AdapterSection.model_validate({**recipe["adapter"]})
    quantise(model, section)
    return add_adapter(model, section, recipe["model"]["name_or_path"], recipe["model"]["revision"])


def read_whole(folder: Path, manifest: Manifest, max_bytes: int, average: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors, whole, under their names in the model, some `max_bytes` in memory at a time.

    Args:
        average: averages in place of the weights, where the checkpoint has them.
    """
    group: dict[str, torch.Tensor] = {}
    for name in [name.removeprefix(MODEL) for name in manifest.tensors if name.startswith(MODEL)]:
        stored = AVERAGE + name if average and AVERAGE + name in manifest.tensors else MODEL + name
        dtype, shape = manifest.tensors[stored]
        group[stored] = torch.empty(shape, dtype=getattr(torch, dtype))
        if sum(tensor.nbytes for tensor in group.values()) >= max_bytes:
            yield from _loaded(folder, group)
            group = {}
    yield from _loaded(folder, group)


def _loaded(folder: Path, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    if tensors:
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, tensor in tensors.items():
        yield name.removeprefix(MODEL).removeprefix(AVERAGE), tensor


@torch.no_grad()
def _difference(folder: Path, manifest: Manifest, config: object, export: Path, settings: ExportSettings) -> float:
    """Of the logits between the checkpoint's own tensors and the reloaded export, on arbitrary tokens."""
    model: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=False)
    state = dict(read_whole(folder, manifest, 2**62, settings.average))
    # Not strict: tied weights are in a checkpoint once.
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    # In the exported type, so that its rounding is no difference.
    model = model.to(settings.dtype).eval()
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    tokens = torch.randint(0, vocabulary, (1, 32), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, **({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {})}
    expected = model(**inputs).logits.float()
    found = reload(export, torch.device("cpu"), settings.dtype)(**inputs).logits.float()
    return relative_difference(found, expected)
