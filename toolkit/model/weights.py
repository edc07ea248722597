"""Where a model's parameters come from, and how each rank is given its own rows of them.

Each rank reads its own slices of the safetensors files. Where the files do not hold the parameters as the model
names them (a conversion, a missing head, random weights), rank 0 makes them and sends them out one at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from toolkit import ranks
from toolkit.errors import BadInputError, first_line
from toolkit.sharding.apply import KeepsMasters
from toolkit.sharding.shards import shard_rows

Rows = slice
"""Rows of a tensor's first dimension."""


NAMES_SHOWN = 5
"""Tensors that an error lists."""


class Weights(Protocol):
    """Where parameters come from."""

    def read(self, name: str, like: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Rows of the parameter `name`, on the host. Every rank calls this for every name, in one order."""


def materialize(model: nn.Module, weights: Weights, keep_master: KeepsMasters | None = None) -> None:
    """Gives every meta parameter of `model` its values: a DTensor its local rows, a plain one all.

    Tied parameters stay one object.

    Args:
        keep_master: is given the rows of each trainable DTensor before they are rounded to its type.
    """
    made: dict[int, nn.Parameter] = {}
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            made[id(parameter)] = _made(name, parameter, weights, keep_master)
        state[name] = made[id(parameter)]
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            state[name] = weights.read(name, buffer, slice(0, _num_rows(buffer))).to(buffer)
    model.load_state_dict(state, strict=False, assign=True)
    del model.materialize_weights


def _made(name: str, parameter: nn.Parameter, weights: Weights, keep_master: KeepsMasters | None) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        whole = weights.read(name, parameter, slice(0, _num_rows(parameter)))
        return nn.Parameter(_own(whole, parameter.dtype, torch.device("cpu")), requires_grad=parameter.requires_grad)
    if keep_master is not None and parameter.requires_grad:
        # Says which type is wanted: rank 0 would round what it sends to the type of compute.
        unrounded = torch.empty(parameter.shape, dtype=torch.float32, device="meta")
        local = weights.read(name, unrounded, shard_rows(parameter))
        keep_master(name, local)
    else:
        local = weights.read(name, parameter, shard_rows(parameter))
    local = _own(local, parameter.dtype, torch.device(parameter.device_mesh.device_type))
    # With shape and stride, as torch would take all shards to be as long as this one; unchecked, as a check is an
    # exchange for each parameter.
    sharded = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _own(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A copy: what safetensors reads is a view of the mapped file, which may change or go away."""
    return tensor.to(device=device, dtype=dtype, copy=True)


def _num_rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


class SafetensorsWeights:
    """Slices of the safetensors files of a folder.

    Args:
        files: parameter's name in the model -> (file, name in the file).
    """

    def __init__(self, files: dict[str, tuple[Path, str]]) -> None:
        self._files = files

    def read(self, name: str, like: torch.Tensor, rows: Rows) -> torch.Tensor:
        path, stored_name = self._files[name]
        with safe_open(path, framework="pt") as file:
            if like.ndim == 0:
                return file.get_tensor(stored_name)  # type: ignore[no-any-return]
            return file.get_slice(stored_name)[rows]  # type: ignore[no-any-return]


class RankZeroWeights:
    """Parameters of a whole model that rank 0 makes and broadcasts one at a time.

    Host memory: the whole model on rank 0, one parameter on the others.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make
        self._state: dict[str, torch.Tensor] | None = None
        self._is_made = False

    def read(self, name: str, like: torch.Tensor, rows: Rows) -> torch.Tensor:
        if not self._is_made:
            # Waited for here, over the host, and not in the first broadcast.
            self._state = ranks.alone_on_first_rank(lambda: self._make().state_dict())
            self._is_made = True
        if ranks.world_size() == 1:
            return self._whole(name)[rows] if like.ndim else self._whole(name)
        # NCCL sends from device to device alone.
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        if ranks.rank() == 0:
            whole = self._whole(name).to(device=device, dtype=like.dtype).contiguous()
        else:
            whole = torch.empty(like.shape, dtype=like.dtype, device=device)
        dist.broadcast(whole, src=0)
        return whole[rows] if like.ndim else whole

    def _whole(self, name: str) -> torch.Tensor:
        assert self._state is not None
        return self._state[name]


def require_fitting(
    source: str, missing: Iterable[str], unexpected: Iterable[str], allowed: Sequence[str], prefix: str | None
) -> None:
    """Raises BadInputError for weights that a model lacks in its files, or that its files hold in vain.

    Args:
        allowed: patterns of those that are meant.
        prefix: of the model below a new head, which is meant too; None: no new head.
    """

    def is_meant(name: str) -> bool:
        of_head = prefix is not None and (not name.startswith(f"{prefix}.") or ".pooler." in name)
        return of_head or any(fnmatchcase(name, pattern) for pattern in allowed)

    odd = {
        "are missing from its files, and would be random": [name for name in sorted(missing) if not is_meant(name)],
        "are in its files, and have no place in the model": [name for name in sorted(unexpected) if not is_meant(name)],
    }
    lines = [f"  - {len(names)} {what}: {_some(names)}" for what, names in odd.items() if names]
    if lines:
        listed = "\n".join(lines)
        raise BadInputError(
            f"model.name_or_path: the weights of {source!r} are not those of its configuration:\n{listed}\n"
            "Name another folder, correct its config.json, or, where that is meant, list them in "
            'model.allow_new_weights (for example ["lm_head.*"])'
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")


def unused_names(folder: Path, model: PreTrainedModel) -> list[str]:
    """Tensors of the folder that the model has no place for, but for those that transformers passes over, too."""
    known = {*model.state_dict(), *(name for name, _ in model.named_buffers())}
    passed = [r"rotary_emb\.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or [])]
    return [
        name
        for name in _index(folder)
        if name not in known
        and f"{model.base_model_prefix}.{name}" not in known
        and not any(re.search(pattern, name) for pattern in passed)
    ]


def stored_names(folder: Path, model: PreTrainedModel) -> dict[str, tuple[Path, str]] | None:
    """Where each parameter and buffer of `model` is stored; None where one is not stored as it is named."""
    stored = _index(folder)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    tied_to = _first_names(model)
    files: dict[str, tuple[Path, str]] = {}
    for name, shape in shapes.items():
        found = _lookup(tied_to.get(name, name), stored, model.base_model_prefix)
        if found is None or _stored_shape(*found) != list(shape):
            return None
        files[name] = found
    return files


def _first_names(model: nn.Module) -> dict[str, str]:
    """Parameter's name -> the first name of the same parameter, under which tied weights are stored."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


def _lookup(name: str, stored: dict[str, Path], prefix: str) -> tuple[Path, str] | None:
    """A checkpoint of the bare model (gpt2) names its tensors without the prefix of the model with a head."""
    for candidate in (name, name.removeprefix(f"{prefix}.")):
        if candidate in stored:
            return stored[candidate], candidate
    return None


def _index(folder: Path) -> dict[str, Path]:
    """Tensor's name -> file, of every safetensors file of a model's folder."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        # The name alone: an index from somebody else must not lead out of the folder.
        return {name: folder / Path(file).name for name, file in weight_map.items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        return {}
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


@contextmanager
def readable(source: str) -> Iterator[None]:
    """Tells what is wrong with files that hold no weights: a Git-LFS pointer, one cut short, another format."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError) as error:
        raise BadInputError(
            f"model.name_or_path: the weights of {source!r} cannot be read: {first_line(error)}. A file of some 130 "
            "bytes is a Git-LFS pointer (run `git lfs pull` there); one that was cut short has to be downloaded again"
        ) from error


def _stored_shape(path: Path, name: str) -> list[int]:
    with safe_open(path, framework="pt") as file:
        return list(file.get_slice(name).get_shape())
