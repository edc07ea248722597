"""Each rule of .ci/lint.py finds a fault that is planted for it."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest

from toolkit.data.kinds.registry import KINDS
from toolkit.objectives.build import CLASSES
from toolkit.recipe.objectives.registry import SPECS

LINT: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / ".ci/lint.py"))

PLANTED = {
    "upward_imports": (
        "sharding/plugin",
        "from toolkit import ranks\nfrom toolkit.run.run import a\ndef show():\n    from toolkit import planning\n",
        [2, 4],
    ),
    "classes_of_samples": (
        "run/fit",
        "isinstance(rows,\n    TextSamples | samples.PairSamples)\nisinstance(rows, Rows)\n",
        [1],
    ),
    "branches_on_kinds": (
        "data/build",
        """
if spec.rows == "text": pass
if self.kind.name in NAMES: pass
if layout.name == "text": pass
if form == "tagged": pass
if isinstance(kind, PairRows): pass
self.tagged = objective.spec.padded
if source.name == "text": pass
""",
        list(range(2, 8)),
    ),
    "branches_on_objectives": (
        "run/fit",
        """
if recipe.objective.kind == "reward": pass
if objective.kind in PADDED: pass
if self.objective == "kto": pass
if isinstance(run.objective, Seq2Seq | Kto): pass
if isinstance(section, ObjectiveSection): pass
found = {"seq2seq": 1, "kto": 2}.get(kind)
if recipe.adapter.kind == "none" and recipe.objective.spec.padded: pass
""",
        [2, 3, 4, 5, 6, 7],
    ),
    "attributes_of_ours": (
        "model/load",
        """
model.fit = fit
chosen, self.model.kept = layers(model)
setattr(model, "trained_parts", parts)
optimizer.zero_grad = zero
model.config = config
self.model = model
""",
        [2, 3, 4],
    ),
    "words_for_images": ("data/images/images", "image = 1\npicture_count = 2\nrow['pictures']\n", [2]),
    "length": ("data/build", "\n" * 700 + "a = 1\n", [700]),
}


@pytest.mark.parametrize("rule", PLANTED)
def test_a_planted_fault_is_found(rule: str) -> None:
    name, source, lines = PLANTED[rule]
    found = LINT[rule](name, list(ast.walk(ast.parse(source))))
    assert sorted({int(finding.split()[0]) for finding in found}) == lines


def test_every_rule_has_a_planted_fault() -> None:
    assert [rule.__name__ for rule in LINT["RULES"]] == list(PLANTED)


def test_a_circle_is_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e2"}}
    assert LINT["circles"](edges) == [["a", "b", "c"]]


def test_lines_of_code_are_those_that_are_neither_blank_nor_comments_nor_docstrings() -> None:
    source = '"""Says what it is."""\n\n# why\na = 1  # here\n"""Of a."""\nb = """\n# text\n"""\n'
    assert LINT["code_lines"](source, list(ast.walk(ast.parse(source)))) == 4


def test_the_tables_have_the_names_that_rules_look_for() -> None:
    assert list(CLASSES) == list(SPECS)
    assert set(SPECS) == LINT["OBJECTIVE_NAMES"]
    assert all(kind == spec.kind for kind, spec in SPECS.items())
    assert {of.__name__ for of in CLASSES.values()} == LINT["listed_in"]("objectives/build", "CLASSES")
    assert {of.__name__ for of in KINDS.values()} <= LINT["listed_in"]("data/kinds/registry", "KINDS")
