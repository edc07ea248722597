"""Owners: only toolkit/objectives knows which objectives there are, and models carry nothing of ours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from toolkit.objectives.build import CLASSES
from toolkit.objectives.objective import Objective
from toolkit.objectives.rows_alone import RowsAlone
from toolkit.recipe.objectives.registry import SPECS

PACKAGE = Path(__file__).parents[2] / "toolkit"
PLAIN_LOSSES = PACKAGE / "verify/plain_losses.py"
"""Each objective's loss a second time, for `toolkit verify` to compare with: a table of them by kind."""

FILES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] != "objectives" and path != PLAIN_LOSSES
]
NAMES = {found.__name__ for found in (*CLASSES.values(), Objective, RowsAlone)}
UNMISTAKABLE = ("causal_lm", "sequence_classification", "token_classification", "preference", "kto")
"""Names of objectives that are no names of anything else, such as a feature in the table of combinations."""


def branches(source: str) -> Iterator[int]:
    """Lines that compare an objective's kind, choose by it, or ask for the class of an objective or of its section."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if (any(_is_kind(side) for side in sides) and not _asks_for_the_default(sides)) or _is_kind_in_words(sides):
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            if {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)} & {
                *NAMES,
                "ObjectiveSection",
            }:
                yield node.lineno
        elif isinstance(node, ast.Dict) and any(_is_word(key, *UNMISTAKABLE) for key in node.keys):
            yield node.lineno
        elif isinstance(node, ast.match_case | ast.Match) and any(map(_is_kind, ast.walk(node))):
            yield node.lineno if isinstance(node, ast.Match) else node.pattern.lineno


def _is_kind(node: ast.AST) -> bool:
    """Whether it is `objective.kind`, of whatever the objective is a part."""
    if not isinstance(node, ast.Attribute) or node.attr != "kind":
        return False
    owner = node.value
    return (owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")) in ("objective", "spec")


def _is_kind_in_words(sides: list[ast.expr]) -> bool:
    """Whether something called `objective` or `kind` is compared with the name of an objective."""
    names = {side.attr if isinstance(side, ast.Attribute) else getattr(side, "id", "") for side in sides}
    words = [word for side in sides for word in ast.walk(side)]
    return bool(names & {"objective", "kind"}) and any(_is_word(word, *SPECS) for word in words)


def _asks_for_the_default(sides: list[ast.expr]) -> bool:
    return any("ObjectiveSection()" in ast.unparse(side) for side in sides)


def _is_word(node: ast.AST | None, *words: str) -> bool:
    return isinstance(node, ast.Constant) and node.value in words


def test_no_room_branches_on_the_objective() -> None:
    # The words of other tools are read there, and some of them are ours.
    files = [path for path in FILES if "from_tools" not in path.parts]
    assert [f"{path}:{line}" for path in files for line in branches(path.read_text())] == []


def test_a_branch_is_found() -> None:
    source = """
if recipe.objective.kind == "reward": pass
if objective.kind in PADDED: pass
if self.objective == "kto": pass
if isinstance(run.objective, Seq2Seq | Kto): pass
if isinstance(section, ObjectiveSection): pass
found = {"seq2seq": 1, "kto": 2}.get(kind)
if recipe.adapter.kind == "none" and recipe.objective.spec.padded: pass
"""
    assert list(branches(source)) == [2, 3, 4, 5, 6, 7]


def test_every_objective_has_a_description_and_a_class() -> None:
    assert list(CLASSES) == list(SPECS)
    assert all(kind == spec.kind for kind, spec in SPECS.items())


SOMEBODY_ELSES = ("model", "built", "inner", "base", "adapted", "optimizer")
"""What the code calls models and optimizers, whose classes are torch's, transformers' or peft's."""

OF_OTHERS = {
    "config": "a model's own",
    "generation_config": "a model's own, if it writes text",
    "is_quantized": "transformers' mark of a model that it has quantised",
    "num_experts": "a stack of experts counts them itself",
    "_is_fsdp_managed_module": "the mark that torch's FSDP sets, and transformers reads",
    "LOGITS_BIAS": "a buffer that some types have",
}
"""Attributes that instances have, and their classes do not name."""


def undeclared(source: str) -> Iterator[int]:
    """Lines that give somebody else's model or optimizer an attribute of ours."""
    declared = {*dir(PreTrainedModel), *dir(torch.optim.Optimizer), *OF_OTHERS}
    for node in ast.walk(ast.parse(source)):
        given: list[tuple[ast.expr, str]] = []
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            given = [(node.value, node.attr)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            given = [(node.args[0], getattr(node.args[1], "value", getattr(node.args[1], "id", "")))]
        for owner, name in given:
            if getattr(owner, "attr", getattr(owner, "id", "")) in SOMEBODY_ELSES and name not in declared:
                yield node.lineno


def test_nothing_of_ours_hangs_on_somebody_elses_model() -> None:
    """What is known of a model beside it stands in a `LoadedModel`, and what the backend knows in its own objects."""
    assert [f"{path}:{line}" for path in sorted(PACKAGE.rglob("*.py")) for line in undeclared(path.read_text())] == []


def test_an_attribute_of_ours_is_found() -> None:
    source = """
model.fit = fit
chosen, self.model.kept = layers(model)
setattr(model, "trained_parts", parts)
optimizer.zero_grad = zero
model.config = config
self.model = model
"""
    assert sorted(undeclared(source)) == [2, 3, 4]
