"""Collects the state of a run as named tensors and random numbers, and loads that of a checkpoint on any ranks."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from toolkit import ranks
from toolkit.checkpoint.manifest import METRICS, Manifest, check_files
from toolkit.errors import BadInputError, first_line
from toolkit.model.adapters.adapters import has_adapter, trained_names
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.fsdp2.shards import beside, local_tensor, state_once
from toolkit.user_function import generators, set_generators

MODEL, OPTIMIZER = "model.", "optimizer."
"""The prefixes of the model's and the optimizer's tensors. Averages start with `average.`"""


def named_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, more: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """Returns the live tensors of model, optimizer and extensions by name. Sharded ones are DTensors of whole shape.

    Tied weights are there once. An adapted model has only its trained tensors, because the others are in the base. With
    offload the tensors are the float32 masters and the moments on the host. A 0-dim tensor is returned with shape (1,).
    A quantised moment is returned as its float32 values, which are a copy: see `put_back`.

    Args:
        model: not wrapped in DDP.
        optimizer: torch's optimizer.
        more: tensors of extensions (any shape), by their names in a checkpoint.
    """
    state = state_once(model)
    kept_names = trained_names(model) if has_adapter(model) else state.keys()
    tensors = {f"{MODEL}{name}": tensor for name, tensor in state.items() if name in kept_names}
    tensors |= more
    tensors |= {name: unquantised(value) for name, value in _optimizer_tensors(model, optimizer)}
    return {name: tensor.detach() if tensor.ndim else tensor.detach().view(1) for name, tensor in tensors.items()}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, kept in optimizer.state.items():
        for key, value in kept.items():
            if isinstance(value, torch.Tensor):
                yield f"{OPTIMIZER}{parameters[id(parameter)]}.{key}", value


@torch.no_grad()
def first_non_finite(tensors: dict[str, torch.Tensor], parameters: Iterable[str]) -> str | None:
    """Returns the first of the model's parameters that is not finite on this rank, or None if all are.

    Args:
        tensors: tensors of any shape, as `named_tensors` returns them.
        parameters: the names of the parameters to check. Not buffers: a mask may hold infinities.
    """
    for name in parameters:
        local = local_tensor(tensors[MODEL + name]) if MODEL + name in tensors else torch.empty(0)
        if local.is_floating_point() and local.numel():
            # One pass and no memory, unlike `isfinite().all()`. NaN is passed on.
            extremes = torch.stack(torch.aminmax(local))
            if not extremes.isfinite().all():
                return name
    return None


def is_quantised(tensor: torch.Tensor) -> bool:
    """Returns whether this rank's part of a tensor (any shape) is of a subclass, like torchao's moments."""
    return type(local_tensor(tensor)) not in (torch.Tensor, nn.Parameter)


def unquantised(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the float32 values of a quantised tensor, in its shape and sharding, or another tensor unchanged.

    Blocks of values share a scale, and the start of the blocks depends on the number of ranks. Only plain values can be
    loaded on any number.
    """
    if not is_quantised(tensor):
        return tensor
    values = local_tensor(tensor).dequantize().float()
    return beside(tensor, values) if isinstance(tensor, DTensor) else values


@torch.no_grad()
def put_back(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Quantises loaded values into the optimizer's quantised moments.

    Args:
        model: the model.
        optimizer: its optimizer.
        tensors: the tensors (any shape) that `named_tensors` returned, filled since then.
    """
    for name, value in _optimizer_tensors(model, optimizer):
        if is_quantised(value):
            quantise_into(local_tensor(value), local_tensor(tensors[name]))


def quantise_into(moment: Any, values: torch.Tensor) -> None:
    """Sets a quantised moment to dequantised values. In the same blocks it gets the same codes again.

    Args:
        moment: a tensor of torchao with 8 or 4 bits or float8, changed in place.
        values: float32, of the moment's shape.
    """
    if not hasattr(moment, "qmap"):  # float8, whose range is symmetric
        moment.copy_(values)
        return
    # The signed maps end at 1 and above -1. `copy_` scales a block by its largest absolute value, so a block in which
    # that value is negative would shrink each time.
    blocks, qmap = values.reshape(-1, moment.block_size), moment.qmap
    scale = blocks.amax(1)
    if qmap.min() < 0:
        scale = torch.maximum(scale, blocks.amin(1) / qmap.min())
    scale = scale.clip(1e-12)
    codes = torch.bucketize(blocks / scale[:, None], (qmap[1:] + qmap[:-1]) / 2, right=True).to(torch.uint8).flatten()
    if moment.codes.numel() < codes.numel():  # 4 bits: two to a byte
        codes = codes[::2] << 4 | codes[1::2]
    moment.codes.copy_(codes.view_as(moment.codes))
    moment.scale.copy_(scale)


def with_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, more: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Has the optimizer create the state of its first step. Returns `named_tensors`, with tensors of any shape."""
    # torch creates missing state by a step on zero gradients. When these counted as unused by all ranks, every resumed
    # run lost its moments (docs/log/sharding.md).
    get_optimizer_state_dict(model, optimizer)
    return named_tensors(model, optimizer, more)


def host_copy(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies this rank's parts of tensors (any shape) to the host, so that training does not change them."""
    return {name: _copy_to_host(tensor) for name, tensor in tensors.items()}


def _copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    # Copy even if it is on the host already: the next step changes the live tensor.
    local = local_tensor(tensor).to("cpu", copy=True)
    return beside(tensor, local) if isinstance(tensor, DTensor) else local


def described(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, list[int]]]:
    """Returns dtype and whole shape of each tensor by name, for the manifest."""
    return {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()}


def first_failure(error: CheckpointException) -> str:
    """Names the first rank that failed inside torch.distributed.checkpoint, with its message."""
    rank, found = next(iter(error.failures.items()))
    return f"rank {rank}: {first_line(found[0])}"


def random_states() -> dict[str, Any]:
    """Returns the states of this rank's random number generators, as plain JSON values."""
    return _plain(generators())


def restore_random_states(states: dict[str, Any]) -> None:
    """Restores the states that `random_states` returned."""
    set_generators(_from_plain(states))


def _plain(states: dict[str, Any]) -> dict[str, Any]:
    found = dict(states)
    if "numpy" in states:
        name, keys, *rest = states["numpy"]
        found["numpy"] = [name, np.asarray(keys).tolist(), *rest]
    return found | {name: _to_base64(states[name]) for name in ("torch", "cuda") if name in states}


def _from_plain(states: dict[str, Any]) -> dict[str, Any]:
    version, numbers, gauss = states["python"]
    name, keys, *rest = states["numpy"]
    found = {"python": (version, tuple(numbers), gauss), "numpy": (name, np.array(keys, dtype=np.uint32), *rest)}
    return found | {name: _from_base64(states[name]) for name in ("torch", "cuda") if name in states}


def _to_base64(state: torch.Tensor) -> str:
    # Text for JSON: nothing in a checkpoint is a pickle.
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _from_base64(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


# ---- Checks that a checkpoint fits a run, and loads it on any number of ranks ----

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
