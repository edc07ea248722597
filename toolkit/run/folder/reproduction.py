"""Checks whether rows and models are those of an export's run, and compares the weights of two exports."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from toolkit.checkpoint.writer import same_bytes
from toolkit.data import build
from toolkit.data.tokens import tokenizer
from toolkit.errors import BadInputError
from toolkit.model.load import fingerprint
from toolkit.objectives.teacher import frozen_section
from toolkit.paths import fingerprint_of
from toolkit.recipe.adapter_file import WEIGHTS, started_config
from toolkit.recipe.recipe import Recipe
from toolkit.run.folder.export_origin import Origin
from toolkit.user_function import load_function


def require_same_inputs(origin: Origin, recipe: Recipe) -> None:
    """Checks that the models, the rows and the code are those of the origin.

    It imports the function that scores answers, which runs code, and tokenises the rows, which the run finds cached.

    Raises:
        BadInputError: if they are not; it names them.
    """
    models = [("model.name_or_path", recipe.model, origin.base)]
    if (frozen := frozen_section(recipe, origin.precision)) is not None:
        field = "model.name_or_path" if recipe.objective.teacher is None else "objective.teacher"
        models.append((field, frozen, origin.teacher))
    for field, model, recorded in models:
        if recorded is not None and fingerprint(model) != recorded:
            raise BadInputError(
                f"{field}: the weights of {model.name_or_path!r} are not those that the export was trained from; name "
                f"the folder that has them: {field}=..."
            )
    if recipe.adapter.start_from is not None:
        started_config(recipe.adapter.start_from)
        if fingerprint_of(Path(recipe.adapter.start_from).expanduser(), WEIGHTS) != origin.adapter:
            raise BadInputError(
                f"adapter.start_from: the adapter in {recipe.adapter.start_from!r} is not the one that the export was "
                "trained from; name the folder that has it: adapter.start_from=..."
            )
    if missing := sorted(origin.code.keys() - recipe.own_code().keys()):
        raise BadInputError(
            f"{missing[0]}: the run had code that its recipe does not name, as extensions given to finetune(); it can "
            "only be trained again from Python"
        )
    for field, name in recipe.own_code().items():
        now = load_function(name, field).fingerprint
        # Exports of earlier versions have that of the function that scores answers alone.
        before = origin.code.get(field, origin.scorer if field == "answers.score" else None)
        if now != before:
            raise BadInputError(
                f"{field}: the source of {name!r} (SHA-256 {now}) is not the one that the run used (SHA-256 "
                f"{before}); name the function that has it: {field}=..."
            )
    tokens = tokenizer.load(recipe.model, recipe.data, recipe.objective.kind)
    found = build.build(recipe.data, tokens, recipe.training.seed, recipe.objective)
    # Older exports do not know the content of images.
    if found.fingerprint != origin.data or origin.content not in (None, found.content):
        names = ", ".join(source.path for source in [*recipe.data.train, *(recipe.data.validation or [])])
        raise BadInputError(
            f"data.train: the rows of {names}, their images, or their tokenizer, are not those that the export was "
            "trained on; name the files that are: data.train=..."
        )


@dataclass(frozen=True)
class Difference:
    """The difference between the weights of two exports.

    Attributes:
        tensors: number of tensors.
        different: number of tensors that are not equal bit for bit.
        largest: largest difference of two values as a share of their tensor's largest value; infinite if names,
            shapes or types differ.
        where: the tensor with the largest difference; "" if all are equal.
    """

    tensors: int
    different: int
    largest: float
    where: str


def difference(one: Path, other: Path) -> Difference:
    """Compares the weights of two exports, one tensor at a time."""
    firsts, seconds = _files_of_tensors(one), _files_of_tensors(other)
    if unlike := sorted(firsts.keys() ^ seconds.keys()):
        return Difference(len(firsts), len(unlike), math.inf, unlike[0])
    different, largest, where = 0, 0.0, ""
    for name, path in sorted(firsts.items()):
        first, second = _tensor(path, name), _tensor(seconds[name], name)
        if same_bytes(first, second):
            continue
        different += 1
        if (share := _largest_share(first, second)) >= largest:
            largest, where = share, name
    return Difference(len(firsts), different, largest, where)


def require_weights(export: Path) -> None:
    """Raises BadInputError if an export has no weights to compare, or they cannot be read."""
    try:
        if not _files_of_tensors(export):
            raise BadInputError(f"{str(export)!r} has no weights (*.safetensors) to compare; name a whole export")
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"the weights in {str(export)!r} cannot be read: {error}; name a whole export") from error


def _largest_share(first: torch.Tensor, second: torch.Tensor) -> float:
    """Returns the largest difference as a share of the largest value of `first`; infinite if shape or dtype differ."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return math.inf
    first, second = first.double(), second.double()
    share = ((first - second).abs().max() / first.abs().max().clamp(min=torch.finfo(torch.float64).tiny)).item()
    return math.inf if math.isnan(share) else share


def _files_of_tensors(export: Path) -> dict[str, Path]:
    """Returns the file of each tensor by its name."""
    found: dict[str, Path] = {}
    for path in sorted(export.glob("*.safetensors")):
        if not path.is_file():  # opening a FIFO would wait forever
            raise OSError(f"{path.name} is not a regular file")
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _tensor(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor
