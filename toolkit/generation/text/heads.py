"""Scores labelled rows with a model whose head is for them: classes, tags, numbers, or rewards of pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import BadInputError, DataError
from toolkit.generation.text.load import ModelPlace, architecture_of, device_of, load_base, positions_of, tokenizer_of
from toolkit.recipe.figures import figure_of
from toolkit.recipe.recipe import read_yaml

if TYPE_CHECKING:
    from toolkit.data.build import TokenisedData
    from toolkit.recipe.objectives.objective_section import ObjectiveSection

KEPT = ("columns", "max_length", "long_rows", "max_dropped_fraction", "add_bos", "template_arguments", "template_date")
"""Settings of the model's recipe with which rows are read."""


@dataclass(frozen=True)
class Scores:
    """What a head makes of labelled rows.

    Attributes:
        figures: those of an evaluation in training; see `Objective.evaluation_record`.
        by_class: `precision`, `recall`, `f1` and `rows` of each class, or of each kind of entity.
        predictions: of each row its name, what is right, and what the model says.
        left_out: why rows were left out, with their number.
    """

    figures: dict[str, Any]
    by_class: dict[str, dict[str, float]]
    predictions: list[dict[str, Any]]
    left_out: dict[str, int]

    @property
    def accuracy(self) -> float:
        """The share of right rows, words or pairs, 0 to 1."""
        return float(self.figures["accuracy"])

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields of the command's JSON."""
        return {**self.figures, "by_class": self.by_class, "left_out": self.left_out}

    def lines(self) -> list[str]:
        """Returns what the command prints."""
        told = {name: value for name, value in self.figures.items() if isinstance(value, float)}
        titles = {name: "Loss" if name == "loss" else figure_of(name).title for name in told}
        lines = [f"{titles[name]}: {figure_of(name).in_short(value)}" for name, value in told.items()]
        lines += [f"left out: {why}: {count:,}" for why, count in self.left_out.items()]
        if not self.by_class:
            return lines
        wide = max(map(len, ("class", *self.by_class)))
        lines.append(f"\n{'class':{wide}}  precision  recall      F1   rows")
        for name, of in self.by_class.items():
            shares = f"{of['precision']:9.1%} {of['recall']:7.1%} {of['f1']:7.1%}"
            lines.append(f"{name:{wide}}  {shares} {of['rows']:6,}")
        confusion = self.figures.get("confusion", [])
        numbers = [[f"{count:,}" for count in row] for row in confusion]
        size = max((len(cell) for row in numbers for cell in row), default=0)
        lines += ["\nrows of each class, by what the model says, in the same order:"] if numbers else []
        names = zip(self.by_class, numbers, strict=False)
        return lines + [f"{name:{wide}}  {' '.join(cell.rjust(size) for cell in row)}" for name, row in names]


def has_head(place: ModelPlace) -> bool:
    """Tells whether a folder's model has a head, so that it scores rows and writes no text."""
    return architecture_of(place).endswith("Classification")


def score_rows(place: ModelPlace, file: Path, batch_size: int, dtype: str, device: str) -> Scores:
    """Scores the rows of a file as a run with the model's recipe scores its held-out rows.

    Args:
        place: the folder of the model, with its `recipe.yaml` if it has one.

    Raises:
        BadInputError: if the model or rows cannot be used.
    """
    import torch
    from accelerate.utils import send_to_device

    from toolkit.data.samples.loader import evaluation_batches
    from toolkit.objectives.build import build_objective
    from toolkit.objectives.classification import SEVERAL_LABELS

    device = device_of(device)
    model = load_base(place, dtype, None, writes=False).to(device).eval()
    section, data = _rows_of(model, place, file)
    samples: Any = data.train
    if samples.has_several_labels != (several := model.config.problem_type == SEVERAL_LABELS):
        asked = "a list" if several else "one label, no list,"
        raise BadInputError(f"--eval: label is not as {place.name!r} learned it; write {asked} in each row")
    unweighted = section.model_copy(update={"class_weights": None})  # balanced ones count rows that are not here
    objective = build_objective(unweighted, model, False, dict.fromkeys(data.label_names or [], 0), apart=True)
    sums: Any = 0
    judged, logits = list[dict[str, Any]](), list[torch.Tensor]()
    with torch.no_grad(), model.register_forward_hook(lambda _model, _inputs, output: logits.append(output.logits)):
        for batch in evaluation_batches(samples, batch_size, 0, 1, None):
            batch = send_to_device(objective.on_host(batch), device)
            sums = sums + objective.evaluation_sums(model, batch)
            judged += objective.judged(logits.pop(), batch, data.label_names or [])
    rows = [row for number in range(len(samples)) for row in samples.rows_of(number)]
    figures = objective.evaluation_record(sums.tolist())
    if section.class_weights is not None:
        del figures["loss"]
    left_out = {why: found.count for why, found in data.report.train.dropped.items()} if data.report.train else {}
    in_order = sorted(zip(rows, judged, strict=True), key=lambda pair: pair[0])  # pairs share samples
    predictions = [{"row": samples.rows.name(row), **found} for row, found in in_order]
    counted = [[objective.parts(row.get(side)) for side in ("label", "predicted")] for row in judged]
    return Scores(figures, _by_class(counted, data.label_names or []), predictions, left_out)


def _rows_of(model: Any, place: ModelPlace, file: Path) -> tuple[ObjectiveSection, TokenisedData]:
    """Returns the objective of a model's head and the rows of a file; raises BadInputError."""
    from toolkit.data.build import build
    from toolkit.model.load import auto_class
    from toolkit.recipe.objectives.objective_section import ObjectiveSection
    from toolkit.recipe.objectives.registry import SPECS
    from toolkit.recipe.schema import DataSection

    recipe = Path(place.name) / "recipe.yaml"
    names = [model.config.id2label[number] for number in range(model.config.num_labels)]
    alike = [spec for spec in SPECS.values() if spec.auto_class == auto_class(model.config).__name__]
    kind = next((spec.kind for spec in alike if list(spec.head_names) == names), alike[0].kind)
    given = read_yaml(recipe) if recipe.is_file() else {"objective": {"kind": kind}}
    chosen = dict(given["objective"])
    if "labels" in ObjectiveSection(**chosen).spec.settings:
        chosen["labels"] = names
    section = ObjectiveSection.model_validate(chosen)
    known = {name: value for name, value in given.get("data", {}).items() if name in KEPT}
    known = {"max_length": positions_of(model) or 512, **known}
    if section.spec.padded:
        known = {"long_rows": "truncate", **known}
    data = DataSection.model_validate({**known, "train": str(file)})
    try:
        return section, build(data, tokenizer_of(place, place), 0, section)
    except DataError as error:
        read = f"read by {str(recipe)!r}" if recipe.is_file() else "read without a recipe"
        raise BadInputError(f"--eval: {str(error).removeprefix('data.train: ')} ({read})") from None


def _by_class(rows: Sequence[Sequence[set[Any]]], names: list[str]) -> dict[str, dict[str, float]]:
    """Returns precision, recall, F1 and number of each class, the last element of what is right and what is said."""
    right, said, hits = (Counter[Any]() for _ in range(3))
    for true, predicted in rows:
        for count, parts in ((right, true), (said, predicted), (hits, true & predicted)):
            count.update(part[-1] for part in parts)
    there = {*right, *said}
    found: dict[str, dict[str, float]] = {}
    for name in [name for name in names if name in there] + sorted(there.difference(names)):
        shares = {"precision": hits[name] / max(1, said[name]), "recall": hits[name] / max(1, right[name])}
        f1 = 2 * hits[name] / max(1, right[name] + said[name])
        found[name] = {**shares, "f1": f1, "rows": right[name]}
    return found
