"""Reads a model's parameters and gives each rank its own rows of them.

Each rank reads its own slices of the safetensors files. If the files do not hold the parameters as the model names
them (a conversion, a missing head, random weights), rank 0 makes them and broadcasts them one at a time.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from toolkit import ranks
from toolkit.errors import BadInputError, in_words, listed
from toolkit.model.beside_weights.base_files import BaseFiles
from toolkit.paths import INDEX, SINGLE
from toolkit.sharding.apply import KeepsMasters
from toolkit.sharding.fsdp2.shards import Rows, shard_rows


@dataclass
class Fit:
    """How a model's files fit it, on rank 0; if one rank reads for all, only after the weights are read.

    Attributes:
        dtype: that of the base, or of weights that are drawn.
        all_drawn: whether there are no files.
        drawn: names of parameters that were drawn at random.
        unused: names of tensors in the files that the model has no place for.
        zero: names of matrices of zeros, on every rank.
        fingerprint: fingerprint of the files of a base that adapters are trained on; see `fingerprint_of`.
        origin: fingerprint of the files that training began with, or None without files.
        adapter: fingerprint of the adapter that training continues, or None.
        stored: names of the tensors in its files, or None without files.
        folder: the folder of its files, or None without files.
        files: the files of its base next to the weights, and of its tokenizer; on rank 0.
        unread: names of tensors in the files that transformers does not load.
    """

    dtype: torch.dtype = torch.float32
    all_drawn: bool = False
    fingerprint: str | None = None
    origin: str | None = None
    adapter: str | None = None
    stored: frozenset[str] | None = None
    folder: Path | None = None
    files: BaseFiles = field(default_factory=BaseFiles)
    drawn: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)

    def take_names(self, folder: Path, model: PreTrainedModel, dtype: torch.dtype | None) -> None:
        """Takes names and dtype of the tensors in the folder that `model` is read from; `dtype` is its configuration's.

        Without one it is that of the first floats in the files, so that transformers would load it in the same.
        """
        self.folder, self.stored = folder, names_in_files(folder)
        self.dtype = dtype or stored_dtype(folder) or self.dtype
        self.unread = sorted(unread_files(folder, model))

    def describe(self) -> str:
        """Describes the differences; empty if the files hold exactly the model."""
        if self.all_drawn:
            return "all drawn at random (model.config)"
        names_of = {"drawn at random": self.drawn, "left unused": self.unused, "nothing but zeros": self.zero}
        names_of["left as they are, as transformers does not load them"] = self.unread
        return "; ".join(f"{len(names)} {what}: {listed(names)}" for what, names in names_of.items() if names)


class Weights(Protocol):
    """A source of parameters."""

    def read(self, name: str, like: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Returns rows of the parameter `name`, on the host. Every rank calls this for every name, in one order.

        Args:
            like: has the shape of the whole parameter, and the dtype and device of the result.
            rows: the rows to read.
        """


def materialize(model: nn.Module, weights: Weights, keep_master: KeepsMasters | None = None) -> None:
    """Gives every meta parameter of `model` its values: a DTensor its local rows, a plain one all.

    Tied parameters stay one object.

    Args:
        keep_master: called with the rows of each trainable DTensor before they are rounded to its dtype.
    """
    made: dict[int, nn.Parameter] = {}
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            made[id(parameter)] = _materialized(name, parameter, weights, keep_master)
        state[name] = made[id(parameter)]
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            value = weights.read(name, buffer, all_rows(buffer))
            # A buffer that was made like a parameter is on the meta device, too.
            state[name] = value.to(buffer.dtype) if buffer.is_meta else value.to(buffer)
    model.load_state_dict(state, strict=False, assign=True)


def _materialized(
    name: str, parameter: nn.Parameter, weights: Weights, keep_master: KeepsMasters | None
) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        whole = weights.read(name, parameter, all_rows(parameter))
        return nn.Parameter(_copied(whole, parameter.dtype, torch.device("cpu")), requires_grad=parameter.requires_grad)
    if keep_master is not None and parameter.requires_grad:
        # Says which type is wanted: rank 0 would round what it sends to the type of compute.
        unrounded = torch.empty(parameter.shape, dtype=torch.float32, device="meta")
        local = weights.read(name, unrounded, shard_rows(parameter))
        keep_master(name, local)
    else:
        local = weights.read(name, parameter, shard_rows(parameter))
    local = _copied(local, parameter.dtype, torch.device(parameter.device_mesh.device_type))
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


def _copied(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a copy: safetensors reads views of the mapped file, which may change or be removed."""
    return tensor.to(device=device, dtype=dtype, copy=True)


def all_rows(tensor: torch.Tensor) -> Rows:
    """Returns the index of all rows of a tensor of any shape."""
    return (slice(0, tensor.shape[0] if tensor.ndim else 1),)


class SafetensorsWeights:
    """Reads slices of the safetensors files of a folder.

    Args:
        files: parameter's name in the model -> (file, name in the file).
        look: called with the name and the rows of everything that is read.
    """

    def __init__(self, files: dict[str, tuple[Path, str]], look: Callable[[str, torch.Tensor], None]) -> None:
        self._files = files
        self._look = look

    def read(self, name: str, like: torch.Tensor, rows: Rows) -> torch.Tensor:
        path, stored_name = self._files[name]
        with safe_open(path, framework="pt") as file:
            if like.ndim == 0:
                return file.get_tensor(stored_name)  # type: ignore[no-any-return]
            read: torch.Tensor = file.get_slice(stored_name)[rows]
        self._look(name, read)
        return read


class RankZeroWeights:
    """Broadcasts the parameters of a whole model that rank 0 makes, one at a time.

    The host of rank 0 holds the whole model, the others one parameter.
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
            return self._whole_parameter(name)[rows] if like.ndim else self._whole_parameter(name)
        # NCCL sends from device to device alone.
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        if ranks.rank() == 0:
            whole = self._whole_parameter(name).to(device=device, dtype=like.dtype).contiguous()
        else:
            whole = torch.empty(like.shape, dtype=like.dtype, device=device)
        dist.broadcast(whole, src=0)
        return whole[rows] if like.ndim else whole

    def _whole_parameter(self, name: str) -> torch.Tensor:
        assert self._state is not None
        return self._state[name]


def require_fitting(
    source: str,
    missing: Iterable[str],
    unexpected: Iterable[str],
    reshaped: Mapping[str, tuple[Sequence[int], Sequence[int]]],
    allowed: Sequence[str],
    prefix: str | None,
    head: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> None:
    """Checks that the files hold all weights of a model and no others.

    Args:
        reshaped: weights with another shape in the files than in the model, with both shapes.
        allowed: patterns of names that may be missing or unused.
        prefix: prefix of the model below a new head, which may be missing, too; None without a new head.
        head: classes of a head that is for others than the data's, and its weights.

    Raises:
        BadInputError: if weights are missing, unused, of another shape or for other classes.
    """

    def is_meant(name: str) -> bool:
        of_head = prefix is not None and (not name.startswith(f"{prefix}.") or ".pooler." in name)
        return of_head or is_allowed(name)

    def is_allowed(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in allowed)

    odd = {
        "are missing from its files, and would be random": [name for name in sorted(missing) if not is_meant(name)],
        "are in its files, and have no place in the model": [name for name in sorted(unexpected) if not is_meant(name)],
        "have another shape in its files than in the model, and would be random": [
            f"{name} {list(stored)} for {list(needed)}"
            for name, (stored, needed) in sorted(reshaped.items())
            if not is_allowed(name)
        ],
        f"are of a head for other classes ({', '.join(head[0])}), and would be random": [
            name for name in head[1] if not is_allowed(name)
        ],
    }
    lines = [f"  - {len(names)} {what}: {listed(names)}" for what, names in odd.items() if names]
    if lines:
        differences = "\n".join(lines)
        raise BadInputError(
            f"model.name_or_path: the weights of {source!r} do not match its configuration:\n{differences}\n"
            "Name another folder, correct its config.json, or, if this is intended, list them in "
            'model.allow_new_weights (for example ["lm_head.*"])'
        )


def require_values(
    source: str, folder: Path, model: PreTrainedModel, files: dict[str, tuple[Path, str]], allowed: Sequence[str]
) -> None:
    """Checks that files hold weights: no whole numbers, and one value for each tied weight.

    Args:
        files: the result of `stored_names`.
        allowed: patterns of weights that may be left unused.

    Raises:
        BadInputError: if they do not.
    """
    state = model.state_dict()
    with readable(source):
        whole = [name for name, stored in files.items() if _is_not_float(*stored) and state[name].is_floating_point()]
        if whole:
            raise BadInputError(
                f"model.name_or_path: {len(whole)} of the weights of {source!r} are stored as integers or in 8 bits, "
                f"as in quantised models, without the scales that they need: {listed(whole)}; name the model that "
                "they were quantised from"
            )
        stored = _files_of_tensors(folder)
        for alias, name in _first_names(model).items():
            other = None if alias == name else _place_of(alias, stored, model.base_model_prefix)
            is_meant = any(fnmatchcase(alias, pattern) for pattern in allowed)
            if other is not None and not is_meant and not _is_same(files[name], other):
                raise BadInputError(
                    f"model.name_or_path: {alias} and {name} differ in the files of {source!r}, and its config.json "
                    "ties them; set tie_word_embeddings to false there, or list the first in "
                    "model.allow_new_weights to leave it unused"
                )


PIECE_ROWS = 4096
"""Number of rows of a stored tensor that a check holds at a time."""


def _stored_pieces(path: Path, name: str) -> Iterator[torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        rows = file.get_slice(name)
        for start in range(0, rows.get_shape()[0], PIECE_ROWS):
            yield rows[start : start + PIECE_ROWS]


def _is_not_float(path: Path, name: str) -> bool:
    """Tells whether a tensor is stored as whole numbers, as truth values, or in 8 bits, which need a scale."""
    with safe_open(path, framework="pt") as file:
        return file.get_slice(name).get_dtype() not in FLOATS


FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""safetensors' names of the types of weights -> torch's."""


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Returns the dtype of the first floats in a model's folder; None if it has none."""
    stored = _files_of_tensors(folder).items()
    kinds = (safe_open(path, "pt").get_slice(name).get_dtype() for name, path in stored)  # type: ignore[no-untyped-call]
    return next((FLOATS[kind] for kind in kinds if kind in FLOATS), None)


def _is_same(first: tuple[Path, str], second: tuple[Path, str]) -> bool:
    """Tells whether two stored tensors of one shape hold the same numbers."""
    return first == second or all(
        torch.equal(one, other) for one, other in zip(_stored_pieces(*first), _stored_pieces(*second), strict=False)
    )


@contextmanager
def without_load_report() -> Iterator[None]:
    """Hides transformers' report of missing tensors: an error here lists them, or they may be missing."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def unused_names(folder: Path, model: PreTrainedModel) -> list[str]:
    """Returns tensors of the folder that the model has no place for, except those that transformers ignores, too."""
    known = {*model.state_dict(), *(name for name, _ in model.named_buffers())}
    passed = [r"rotary_emb\.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or [])]
    return [
        name
        for name in _files_of_tensors(folder)
        if name not in known
        and f"{model.base_model_prefix}.{name}" not in known
        and not any(re.search(pattern, name) for pattern in passed)
    ]


def unread_files(folder: Path, model: PreTrainedModel) -> dict[str, Path]:
    """Returns the file of each tensor that transformers does not load, by name: layers that predict further tokens.

    There are none for a model of another class than its files, which leaves a part of them out, for a base in 8 or 4
    bits, whose export has another type, and for a model with more tokens than its files, as such layers can have
    embeddings of their own.
    """
    passed = model._keys_to_ignore_on_load_unexpected or []
    config = PretrainedConfig.get_config_dict(folder, local_files_only=True)[0] if passed else {}
    classes, named = {each.__name__ for each in type(model).__mro__}, config.get("architectures") or []
    text = {**config, **(config.get("text_config") or {})}
    is_resized = text.get("vocab_size") != getattr(model.config.get_text_config(), "vocab_size", None)
    if not classes.intersection(named) or "quantization_config" in text or is_resized:
        return {}
    own = {*model.state_dict(), *(name for name, _ in model.named_buffers())}
    # Patterns name the blocks of one size of a type; in another these are its own, under other names in memory.
    own |= {block for name in own if (block := block_of(name))}
    return {
        name: path
        for name, path in _files_of_tensors(folder).items()
        if any(re.search(pattern, name) for pattern in passed) and name not in own and block_of(name) not in own
    }


def block_of(name: str) -> str | None:
    """Returns the name of the block (`model.layers.0`) that a tensor of this name is in, or None if it is in none."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else None


def stored_names(folder: Path, model: PreTrainedModel) -> dict[str, tuple[Path, str]] | None:
    """Returns the place of each stored parameter and buffer of `model`; None if one has no place under its name."""
    stored = _files_of_tensors(folder)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    tied_to = _first_names(model)
    files: dict[str, tuple[Path, str]] = {}
    for name, shape in shapes.items():
        found = _place_of(tied_to.get(name, name), stored, model.base_model_prefix)
        if found is None or _stored_shape(*found) != list(shape):
            return None
        files[name] = found
    return files


def names_in_files(folder: Path) -> frozenset[str]:
    """Returns names of all tensors in a model's folder."""
    return frozenset(_files_of_tensors(folder))


def places_of(folder: Path, model: PreTrainedModel, names: Iterable[str]) -> dict[str, tuple[Path, str]]:
    """Returns the file, and the name in the file, of each of these tensors that is stored."""
    stored, tied_to = _files_of_tensors(folder), _first_names(model)
    found = {name: _place_of(tied_to.get(name, name), stored, model.base_model_prefix) for name in names}
    return {name: place for name, place in found.items() if place is not None}


def _first_names(model: nn.Module) -> dict[str, str]:
    """Returns each parameter's first name, under which tied weights are stored, by its name."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


def _place_of(name: str, stored: dict[str, Path], prefix: str) -> tuple[Path, str] | None:
    """Finds a tensor, also without the prefix that a checkpoint of a model without a head (gpt2) lacks."""
    for candidate in (name, name.removeprefix(f"{prefix}.")):
        if candidate in stored:
            return stored[candidate], candidate
    return None


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """Returns the safetensors file of each tensor in a model's folder, by name."""
    # Before an index, which may be left of an earlier save: so transformers decides.
    if (single := folder / SINGLE).is_file():
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    index = folder / INDEX
    return _indexed_files(folder, json.loads(index.read_text(encoding="utf-8"))) if index.is_file() else {}


def _indexed_files(folder: Path, index: object) -> dict[str, Path]:
    """Returns the file of each tensor. Raises BadInputError for a malformed index, or one that leaves its folder."""
    named = index.get("weight_map") if isinstance(index, dict) else None
    wrong = None
    if not isinstance(named, dict) or not named:
        wrong = "it has no weight_map that names any tensor"
    elif odd := [file for file in named.values() if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+", file)]:
        wrong = f"it names {odd[0]!r}, which is not a file next to it"
    elif missing := [file for file in dict.fromkeys(named.values()) if not (folder / file).is_file()]:
        wrong = f"it names {missing[0]!r}, which is not there"
    if wrong is not None:
        raise BadInputError(
            f"model.name_or_path: {str(folder / INDEX)!r} does not say where the weights are: {wrong}; download the "
            "model again, or name another one"
        )
    assert named is not None
    return {name: folder / file for name, file in named.items()}


def require_safetensors(name: str, folder: Path) -> None:
    """Checks that a folder's weights are where readers look, and not only pickles, which can run code when read.

    Raises:
        BadInputError: if they are.
    """
    pickles = [path.name for ending in ("pytorch_model*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(ending))]
    if pickles and not any(folder.glob("*.safetensors")):
        raise BadInputError(
            f"model.name_or_path: the weights of {name!r} are pickled ({pickles[0]}), and a pickle can run code when "
            "it is read; where you trust them, make safetensors of them with transformers: "
            f"AutoModelForCausalLM.from_pretrained({name!r}).save_pretrained(NEW_FOLDER), and the tokenizer likewise"
        )
    elsewhere = PretrainedConfig.get_config_dict(folder, local_files_only=True)[0].get("transformers_weights")
    if elsewhere is not None:
        raise BadInputError(
            f"model.name_or_path: config.json of {name!r} names a file of weights ({elsewhere}) in "
            f"transformers_weights; rename that file to {SINGLE}, and remove the key"
        )


@contextmanager
def readable(source: str) -> Iterator[None]:
    """Explains errors of files without weights: a Git-LFS pointer, a truncated file, another format.

    Raises:
        BadInputError: in place of the library's error.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        fix = (
            "A file of about 130 bytes is a Git-LFS pointer (run `git lfs pull` there); download a truncated one again"
        )
        if isinstance(error, json.JSONDecodeError) or "no file named" in str(error):
            fix = "Download the model again, or name a folder that holds its weights"
        raise BadInputError(
            f"model.name_or_path: the weights of {source!r} cannot be read: {in_words(error)}. {fix}"
        ) from error


def _stored_shape(path: Path, name: str) -> list[int]:
    with safe_open(path, framework="pt") as file:
        return list(file.get_slice(name).get_shape())
