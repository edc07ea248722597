"""Converts a sharded checkpoint to a folder that `from_pretrained` loads, in one process, one file at a time."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from toolkit.checkpoint.export import (
    EXPORT_TYPES,
    ExportSettings,
    ExportSource,
    compare_logits,
    dtype_of_export,
    logits_of_random_tokens,
    names_fact,
    write_export,
)
from toolkit.checkpoint.manifest import (
    MODEL_FILES,
    Manifest,
    P,
    Place,
    best_of,
    check_files,
    list_checkpoints,
    look_at,
    place_named,
    place_of,
    step_folder,
)
from toolkit.checkpoint.resume import fetch
from toolkit.checkpoint.state import MODEL, first_failure
from toolkit.checkpoint.store import StorePath
from toolkit.errors import BadInputError, first_line
from toolkit.model.adapters.adapters import add_adapter, base_of, has_adapter, quantise
from toolkit.model.beside_weights.base_files import GENERATION, BaseFiles
from toolkit.model.load import auto_class, take_generation_settings
from toolkit.model.structure.model_parts import LANGUAGE
from toolkit.model.weights.file_names import FileNames
from toolkit.optim.ema import AVERAGE
from toolkit.paths import GIB, fingerprint_of, folder_on_this_machine, parse_json, read_foreign, told_of_checkpoint
from toolkit.recipe.schema import LARGEST_SHARD_GIB, AdapterSection, ExportSection

BASE_DIGESTS = "base_files.json"
"""The file with the SHA-256 of the base's files next to its weights, as they were when training began."""

STORED_NAMES = "stored_names.json"
"""The file with names and fingerprint of the tensors in the base's files, nulls if it had none, and with its dtype."""


def export_checkpoint(
    run: Path, folder: Path, manifest: Manifest, to: Path, settings: ExportSettings, verify: bool
) -> tuple[float | None, tuple[str, ...]]:
    """Writes the export, whole or not at all.

    Holds one file of the export in host memory at a time, and to verify, the model twice.

    Args:
        run: the output folder of the run.
        folder: the folder of the checkpoint.
        manifest: the manifest of the checkpoint.
        to: the new folder.
        settings: how the export is written.
        verify: whether to reload the export and compare its logits.

    Returns:
        The largest difference of logits between checkpoint and export, as a share of the largest logit; None without
        `verify`, and for an adapter. And the notes of `Exported`.

    Raises:
        BadInputError: if the checkpoint is damaged, or the folder exists.
        ExportError: if the export cannot be written, or has other logits.
    """
    if to.exists():
        raise BadInputError(f"--to: {str(to)!r} exists; name a new folder")
    problem = check_files(folder, manifest, manifest.files)
    if problem is not None:
        raise _not_whole(run, folder, problem)
    config, tokenizer = _load_configuration(run / MODEL_FILES)
    model = _empty_model(config, manifest)
    is_adapter = has_adapter(model)
    stored, base = _base_as_it_was(run, manifest)
    take_generation_settings(base_of(model), str(run / MODEL_FILES))
    source = ExportSource(
        model,
        tokenizer,
        BaseFiles.read(run / MODEL_FILES),
        read_whole(folder, manifest, settings.max_shard_bytes, settings.average),
        {name for name, _ in model.named_parameters()},
        None if is_adapter else FileNames(model, stored, base),
        (manifest.base, manifest.named.get("model.name_or_path"), _told_of_base(run, BASE_DIGESTS).get(GENERATION)),
    )

    def check(export: Path) -> tuple[float | None, tuple[str, ...]]:
        if is_adapter:
            return None, ()
        notes = _notes_on_names(export, stored, base)
        if not verify:
            return None, notes
        return compare_logits(export, _logits(folder, manifest, config, settings), settings.dtype), notes

    found: tuple[float | None, tuple[str, ...]] = write_export(source, to, settings, "export it again", check)
    return found


def _load_configuration(folder: Path) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Loads the run's configuration and tokenizer. The folder may come from anywhere, so none of its code is run."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return config, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInputError(
            f"{str(folder)!r} holds no configuration and tokenizer that transformers knows without running code of the "
            f"folder: {first_line(error)}; a run exports a model with code of its own itself (export.enabled)"
        ) from error


def _told_of_base(run: Path, file: str) -> dict[str, Any]:
    """Reads what a run wrote of its base. Older versions wrote less, and the list of names alone."""
    try:
        found = parse_json(read_foreign(run / MODEL_FILES / file))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {"names": found}


def _base_as_it_was(run: Path, manifest: Manifest) -> tuple[frozenset[str] | None, Path | None]:
    """Returns the names of the base's tensors, and its folder if that has the weights that training began with."""
    told = _told_of_base(run, STORED_NAMES)
    names, origin = told.get("names"), told.get("fingerprint")
    stored = frozenset(map(str, names)) if isinstance(names, list) else None
    base = _base_on_this_machine(manifest)
    with suppress(OSError, ValueError):
        if base is not None and origin in (None, fingerprint_of(base)):
            return stored, base
    return stored, None


def _notes_on_names(export: Path, stored: frozenset[str] | None, base: Path | None) -> tuple[str, ...]:
    """Says which tensors of the base an export lacks, such as those that no run reads and only the base has."""
    if (told := names_fact(export, stored)) is None:
        return ()
    whence = "" if base is not None else ", whose files are not here as they were when training began"
    return (f"the export {told}{whence}; test it with the server that will load it",)


def _base_on_this_machine(manifest: Manifest) -> Path | None:
    """Returns the folder of the base, for its tensors that no run reads. None if it had no files, or has none here."""
    _, name, revision = _trained_as(manifest)
    if name is None:
        return None
    with suppress(OSError, ValueError):
        found = folder_on_this_machine(name, revision)
        return found if (found / "config.json").is_file() else None
    return None


@dataclass(frozen=True)
class Exported:
    """An export of a checkpoint.

    Attributes:
        folder: the folder of the export.
        step: the step of the checkpoint.
        logits_difference: the difference of logits, or None if they were not compared.
        is_adapter: whether it is an adapter without its base, whose logits are not compared.
        dtype: torch's name of the dtype of the weights.
        unfinished: the step of a later checkpoint that was not finished, or None. It may be being written.
        notes: how its files differ from the base's, or why that was not compared, a sentence each.
    """

    folder: Path
    step: int
    logits_difference: float | None
    is_adapter: bool
    dtype: str
    unfinished: int | None = None
    notes: tuple[str, ...] = ()


def export_run(
    run: str | Path,
    to: str | Path,
    checkpoint: int | str | None = None,
    dtype: str | None = None,
    verify: bool = True,
    max_shard_gib: float = ExportSection().max_shard_gib,
    average: bool = True,
) -> Exported:
    """Converts a run's checkpoint to a folder that `from_pretrained` loads, in one process.

    If the run is in a store, first copies the checkpoint to a folder next to `to`, and deletes that folder afterwards.

    Args:
        run: the output folder, or the run's URL in a store (s3://bucket/runs/first).
        to: the new folder.
        checkpoint: the step; `best` by `training.best_by`; None or `last` for the last one that was finished.
        dtype: the dtype of the weights: float32, bfloat16 or float16. None takes that of the run's own export.
        verify: whether to reload the folder and compare its logits.
        max_shard_gib: the size of the largest file of weights (GiB).
        average: whether to export averaged weights (`training.ema`) if the checkpoint has them.

    Raises:
        BadInputError: if there is no such checkpoint, it is damaged, the folder exists, or a value is not allowed.
        ExportError: if the export has other logits.
    """
    to = Path(to)
    if not 0 < max_shard_gib <= LARGEST_SHARD_GIB:
        allowed = f"a number greater than 0 and up to {LARGEST_SHARD_GIB:g}"
        raise BadInputError(f"--max-shard-gib: found {max_shard_gib:g}; allowed: {allowed}")
    if dtype not in (None, *EXPORT_TYPES):
        raise BadInputError(f"dtype: unknown {dtype!r}; allowed: {', '.join(EXPORT_TYPES)}")
    place: Any = place_of(run)
    step, manifest, unfinished = _choose(place, checkpoint)
    with _on_this_machine(place, step, manifest, to) as found:
        is_adapter = _trained_as(manifest)[0].kind != "none"
        export, of_base = manifest.recipe.get("export"), _told_of_base(found, STORED_NAMES).get("dtype")
        asked = dtype or (export.get("dtype") if isinstance(export, dict) else None)
        written = dtype_of_export(asked, of_base, is_adapter)
        settings = ExportSettings(written, int(max_shard_gib * GIB), average=average)
        difference, notes = export_checkpoint(found, step_folder(found, step), manifest, to, settings, verify)
    return Exported(to, step, difference, is_adapter, str(written).removeprefix("torch."), unfinished, notes)


@contextmanager
def _on_this_machine(run: Place, step: int, manifest: Manifest, to: Path) -> Iterator[Path]:
    """Yields the folder of a run; of one in a store a temporary one beside `to`, with this checkpoint."""
    if not isinstance(run, StorePath):
        yield run
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent) as folder:
        copied = Path(folder)
        problem = fetch(step_folder(run, step), manifest, step_folder(copied, step))
        if problem is not None:
            raise _not_whole(run, step_folder(run, step), problem)
        _get_folder(run / MODEL_FILES, copied / MODEL_FILES)
        yield copied


@contextmanager
def exported_for_now(run: str, checkpoint: str) -> Iterator[Exported]:
    """Yields an unchecked export of a checkpoint, which is deleted afterwards. Raises as `export_run`."""
    place = place_named(run)
    beside = place if isinstance(place, Path) and place.is_dir() else None
    with tempfile.TemporaryDirectory(prefix=".checkpoint.", dir=beside) as folder:
        yield export_run(str(place), Path(folder) / "export", checkpoint, verify=False)


def _get_folder(folder: StorePath, to: Path) -> None:
    """Copies a folder of a store, with those inside it."""
    to.mkdir()
    for path in folder.iterdir():
        if path.is_dir():
            _get_folder(path, to / path.name)
        else:
            path.get(to / path.name)


def _choose(run: P, step: int | str | None) -> tuple[int, Manifest, int | None]:
    """Returns the step and the manifest of the checkpoint to export, and the step of a later unfinished one.

    Raises:
        BadInputError: if there is none, or if the one of `step`, or the last, is damaged.
    """
    if step == "best":
        if (best := best_of(list_checkpoints(run))) is None:
            raise BadInputError(f"--checkpoint best: no checkpoint of {str(run)!r} was evaluated; name a step, or last")
        return best[1].step, best[1], None
    if step not in (None, "last"):
        if not str(step).isdecimal():
            raise BadInputError(f"--checkpoint: found {step!r}; allowed: best, last, or the number of a step")
        chosen, unfinished = look_at(step_folder(run, int(step))), None
        if chosen.unfinished and not chosen.folder.is_dir():
            shown = f"name another (`toolkit checkpoints {shlex.quote(str(run))}` lists them)"
            raise BadInputError(f"there is no checkpoint {str(chosen.folder)!r}; {shown}")
    else:
        if isinstance(run, Path) and not run.is_dir():
            raise BadInputError(f"there is no folder {str(run)!r}; name that of a run")
        every = list_checkpoints(run)
        finished = [one for one in every if not one.unfinished]
        if not finished:
            problem = told_of_checkpoint(run) if isinstance(run, Path) else None
            raise BadInputError(problem or _without_checkpoint(run))
        chosen, unfinished = finished[-1], every[-1].step if every[-1].unfinished else None
    if chosen.manifest is None or chosen.problem is not None:
        raise _not_whole(run, chosen.folder, str(chosen.problem))
    return chosen.step, chosen.manifest, unfinished


def _without_checkpoint(run: Place) -> str:
    export = run / "export"
    if isinstance(export, Path) and any((export / name).is_file() for name in ("config.json", "adapter_config.json")):
        mend = f"its model is in {str(export)!r}, which loads as it is, and which --format gguf and ollama take"
    else:
        mend = f"see toolkit checkpoints {shlex.quote(str(run))}"
    return f"{str(run)!r} has no complete checkpoint; {mend}"


def _not_whole(run: Place, folder: Place, problem: str) -> BadInputError:
    """Returns the error about a checkpoint that cannot be exported. It names the last complete one next to it."""
    others = [one.step for one in list_checkpoints(run) if one.problem is None and one.folder != folder]
    mend = f"export another, for example with --checkpoint {others[-1]}" if others else "the run has no other"
    return BadInputError(f"{str(folder)!r} is not a complete checkpoint: {problem}; {mend}")


def _empty_model(config: PretrainedConfig, manifest: Manifest) -> PreTrainedModel:
    """Builds the run's model without weights, with its adapters, if any."""
    section, base, revision = _trained_as(manifest)
    with init_empty_weights():
        model: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=False)
    model.tie_weights()
    if section.kind == "none":
        return model
    quantise(model, section)
    return add_adapter(model, section, base, revision, manifest.recipe["model"].get("train") or (LANGUAGE,))


def _trained_as(manifest: Manifest) -> tuple[AdapterSection, str | None, str | None]:
    """Returns what was trained, the base and its revision."""
    model, adapter = manifest.recipe["model"], manifest.recipe["adapter"]
    # The stored section has every field set; with kind none all others would be refused.
    section = AdapterSection() if adapter["kind"] == "none" else AdapterSection.model_validate({**adapter})
    return section, model["name_or_path"], model["revision"]


def read_whole(folder: Path, manifest: Manifest, max_bytes: int, average: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the model's whole tensors with their names in the model. Holds about `max_bytes` in memory at a time.

    The tensors are on the host, in the shape and dtype of the manifest.

    Args:
        folder: the folder of the checkpoint.
        manifest: the manifest of the checkpoint.
        max_bytes: the bytes of the tensors that are read at once.
        average: whether to read the averages in place of the weights, if the checkpoint has them.

    Raises:
        BadInputError: if the checkpoint cannot be read, as one that its run has just deleted.
    """
    group: dict[str, torch.Tensor] = {}
    for name in [name.removeprefix(MODEL) for name in manifest.tensors if name.startswith(MODEL)]:
        stored = AVERAGE + name if average and AVERAGE + name in manifest.tensors else MODEL + name
        dtype, shape = manifest.tensors[stored]
        group[stored] = torch.empty(shape, dtype=getattr(torch, dtype))
        if sum(tensor.nbytes for tensor in group.values()) >= max_bytes:
            yield from _read_group(folder, group)
            group = {}
    yield from _read_group(folder, group)


def _read_group(folder: Path, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        if tensors:
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        raise BadInputError(
            f"{str(folder)!r} cannot be read: {first_failure(error)}; if its run goes on, it has deleted it for a "
            "later checkpoint: start the same command again"
        ) from error
    for name, tensor in tensors.items():
        yield name.removeprefix(MODEL).removeprefix(AVERAGE), tensor


def _logits(folder: Path, manifest: Manifest, config: object, settings: ExportSettings) -> torch.Tensor:
    """Returns the checkpoint's logits of random tokens, (1, 32, vocabulary)."""
    # In the exported dtype, so that its rounding does not count as a difference.
    model: PreTrainedModel = auto_class(config).from_config(config, dtype=settings.dtype, trust_remote_code=False)
    state = dict(read_whole(folder, manifest, 2**62, settings.average))
    # Not strict: tied weights are in a checkpoint once.
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return logits_of_random_tokens(model.eval())
