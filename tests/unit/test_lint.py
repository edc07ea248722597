"""Each rule of .ci/lint.py finds a fault that is planted for it."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases

from toolkit.data.kinds.registry import KINDS
from toolkit.objectives.build import CLASSES
from toolkit.recipe.objectives.registry import SPECS

LINT: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / ".ci/lint.py"))

PLANTED: dict[str, tuple[str, str, list[int]]] = {
    **cases(__file__)["PLANTED"],
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
