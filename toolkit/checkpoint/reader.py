"""Checks that a checkpoint fits a run, and loads it on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from toolkit import ranks
from toolkit.checkpoint.manifest import METRICS, Manifest, check_files
from toolkit.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    described,
    first_failure,
    put_back,
    with_optimizer_state,
)
from toolkit.errors import BadInputError
from toolkit.recipe.recipe import Recipe

MATTERS = ("model", "data", "objective", "adapter", "optimizer.kind", "training.seed", "training.ema")
"""Sections and fields of a recipe that must be the same for a checkpoint's state to have the same meaning."""

HARMLESS = (
    "model.allow_new_weights",
    "model.attention",
    "data.cache_dir",
    "data.num_proc",
    "data.max_validation_samples",
    "data.validation",
)
"""Fields of these sections that may change nevertheless."""

SETTLED = ("data.template_date",)
"""Fields that a run decides and saves if its recipe leaves them open. A resumed run reads them from the checkpoint."""


def require_same_run(saved: dict[str, Any], now: dict[str, Any], place: str) -> None:
    """Checks that two recipes agree in everything that the state depends on.

    Args:
        saved: the resolved recipe of the checkpoint.
        now: the resolved recipe of this run.
        place: the checkpoint, for the message.

    Raises:
        BadInputError: if they differ. The message lists the differences.
    """
    old, new = _flatten(saved), _flatten(now)
    differences = [
        f"  - {key}: {_format_value(old.get(key, 'unset'))} there, {_format_value(new.get(key, 'unset'))} now"
        for key in sorted(old.keys() | new.keys())
        if _must_agree(key) and old.get(key) != new.get(key) and not (key in SETTLED and new.get(key) is None)
    ]
    if differences:
        listed = "\n".join(differences)
        raise BadInputError(
            f"checkpoint.resume: {place} is of another run:\n{listed}\n"
            "undo these changes, or start anew with another training.output_dir"
        )


def _format_value(value: Any) -> str:
    """Formats a value as YAML would."""
    return value if value == "unset" else json.dumps(value, ensure_ascii=False)


def same_run(saved: Path, now: dict[str, Any], in_all: bool = False) -> bool:
    """Returns whether the resolved recipe in a file is that of the same run; with `in_all` no field may differ."""
    try:
        # Load it, do not only parse it: the file leaves out fields that have no effect.
        there = Recipe.load(saved).model_dump(mode="json")
        require_same_run(there, now, str(saved))
    except (OSError, BadInputError):
        return False
    return not in_all or same_recipe(there, now)


def same_recipe(saved: dict[str, Any], now: dict[str, Any]) -> bool:
    """Tells whether two resolved recipes agree in every field, apart from those that a run settles."""
    old, new = ({key: value for key, value in _flatten(one).items() if key not in SETTLED} for one in (saved, now))
    return old == new


def _must_agree(key: str) -> bool:
    within = [part for part in MATTERS if key == part or key.startswith(f"{part}.")]
    return bool(within) and not any(key == part or key.startswith(f"{part}.") for part in HARMLESS)


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the fields that are set, by their dotted names: a version may have fields that another has not."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            flat[f"{prefix}{key}"] = [_flatten(item) if isinstance(item, dict) else item for item in value]
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def load_tensors(
    folder: Path,
    manifest: Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    more: Mapping[str, torch.Tensor],
) -> None:
    """Loads the state into a model, an optimizer and tensors of extensions, as they are sharded now. Collective.

    Args:
        folder: the folder of the checkpoint.
        manifest: its manifest.
        model: not wrapped in DDP.
        optimizer: torch's optimizer.
        more: tensors of extensions (any shape), by their names in a checkpoint. Filled in place.

    Raises:
        BadInputError: if the checkpoint's tensors do not fit in name, dtype or shape, or cannot be read.
    """
    tensors = _without_unused(model, optimizer, with_optimizer_state(model, optimizer, more), manifest.tensors)
    # Types and shapes are compared before anything is read, for an error that names the tensor.
    problem = _first_mismatch(manifest.tensors, described(tensors))
    if problem is not None:
        raise BadInputError(f"{str(folder)!r} is the checkpoint of another model or optimizer: {problem}")
    try:
        # Over gloo: inside an NCCL collective the first rank would give up on the last one after ten minutes.
        group = ranks.patient_group() if ranks.world_size() > 1 else None
        reader = _ReadOnce(str(folder))
        load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise BadInputError(f"{str(folder)!r} cannot be read: {first_failure(error)}") from error
    put_back(model, optimizer, tensors)
    # With offload the tensors are the masters on the host. This sets the weights on the device from them.
    state = {name.removeprefix(MODEL): t for name, t in tensors.items() if name.startswith(MODEL)}
    # Not strict: tied weights are there once, and an adapted model has only its trained tensors there.
    model.load_state_dict(state, strict=False)


class _ReadOnce(HuggingFaceStorageReader):
    """Reads the headers of all files on rank 0 alone: if each of N ranks did, they would open N x N files."""

    def read_metadata(self) -> Metadata:
        read = super().read_metadata
        return ranks.on_first_rank(read)


def _without_unused(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, torch.Tensor],
    saved: Mapping[str, tuple[str, list[int]]],
) -> dict[str, torch.Tensor]:
    """Returns the tensors without optimizer state of parameters that no step had used before the save.

    The checkpoint has no state for them, as for the last layer of LLaVA's tower. The optimizer creates it when a
    gradient comes.
    """
    used = {_parameter_of_state(name) for name in saved} - {None}
    if not used:
        return tensors
    unused = {name for name, parameter in model.named_parameters() if parameter in optimizer.state} - used
    for name, parameter in model.named_parameters():
        if name in unused:
            del optimizer.state[parameter]
    return {name: tensor for name, tensor in tensors.items() if _parameter_of_state(name) not in unused}


def _parameter_of_state(name: str) -> str | None:
    """Returns the parameter to which a tensor of optimizer state belongs, or None for another tensor."""
    return name.removeprefix(OPTIMIZER).rpartition(".")[0] if name.startswith(OPTIMIZER) else None


def _first_mismatch(saved: Mapping[str, Any], live: Mapping[str, Any]) -> str | None:
    for name in sorted(saved.keys() | live.keys()):
        if name not in live:
            return f"it holds {name}, which is not there now"
        if name not in saved:
            return f"it lacks {name}"
        if saved[name] != live[name]:
            return f"{name} is {saved[name][0]} {saved[name][1]} there, {live[name][0]} {live[name][1]} now"
    return None


def verify_together(folder: Path, manifest: Manifest) -> str | None:
    """Returns the first damaged file of a checkpoint, in words, or None. Each rank reads its share. Collective."""
    mine = sorted(manifest.files)[ranks.rank() :: ranks.world_size()]
    problems = ranks.on_every_rank(lambda: check_files(folder, manifest, mine), "read a checkpoint")
    return next((problem for problem in problems if problem is not None), None)


def read_random_states(folder: Path) -> dict[str, Any]:
    """Reads the random states of this rank. The checkpoint must be of the same number of ranks."""
    path = folder / f"rank_{ranks.rank():05d}.json"
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Reads the run's metrics up to the checkpoint."""
    return [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
