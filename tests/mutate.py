"""Changes one operator or number of a module at a time, runs tests, and prints what they did not notice.

    python tests/mutate.py toolkit/sharding/plan/strategy.py tests/unit/sharding/test_strategy.py --sample 10

Each mutant is a run of pytest; so it is run by hand. The module is put back at the end, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import multiprocessing
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "peft", "pydantic")
"""Imported once; nothing of the toolkit is, so that each fork imports the changed module."""

SECONDS = 300
"""For the tests of one mutant; a mutant that hangs counts as noticed."""


def mutants(source: str) -> Iterator[tuple[int, str, str]]:
    """Line, what was changed, and the changed source; one for each operator and number."""
    count = sum(1 for _ in ast.walk(ast.parse(source)))
    for number in range(count):
        tree = ast.parse(source)
        node = list(ast.walk(tree))[number]
        if (what := _change(node)) is not None:
            yield node.lineno, what, ast.unparse(tree)  # type: ignore[attr-defined]


def _change(node: ast.AST) -> str | None:
    """Changes a node in place; says how, or None if it is nothing that is changed."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        before, node.ops[0] = node.ops[0], OTHER[type(node.ops[0])]()  # type: ignore[assignment]
        return f"{type(before).__name__} -> {type(node.ops[0]).__name__}"
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OTHER:
        if isinstance(node, ast.BinOp) and any(isinstance(side, ast.Constant | ast.JoinedStr) for side in _texts(node)):
            return None
        before, node.op = node.op, OTHER[type(node.op)]()  # type: ignore[assignment]
        return f"{type(before).__name__} -> {type(node.op).__name__}"
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        before_value, node.value = node.value, node.value + 1
        return f"{before_value} -> {node.value}"
    return None


def _texts(node: ast.BinOp) -> list[ast.expr]:
    """The sides of a sum that are texts."""
    sides = (node.left, node.right)
    return [one for one in sides if isinstance(getattr(one, "value", None), str) or isinstance(one, ast.JoinedStr)]


def is_noticed(tests: list[str]) -> bool:
    """Whether the tests fail, or do not end. They run in a fork of this process, which has imported the libraries."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(tests,))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode != 0


def _run(tests: list[str]) -> None:
    with open(os.devnull, "w") as nothing:
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
    code = pytest.main(["-q", "-x", "-m", "slow or not slow", "-p", "no:cacheprovider", *tests])
    os._exit(int(code))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--sample", type=int, help="try N mutants, drawn by --seed, in place of all")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    for name in LIBRARIES:
        importlib.import_module(name)
    source = asked.module.read_text(encoding="utf-8")
    found = list(mutants(source))
    if asked.sample is not None:
        found = sorted(random.Random(asked.seed).sample(found, min(asked.sample, len(found))))
    if is_noticed(asked.tests):
        sys.exit("the tests fail on the module as it is")
    survived = 0
    try:
        for line, what, changed in found:
            asked.module.write_text(changed, encoding="utf-8")
            if not is_noticed(asked.tests):
                survived += 1
                print(f"survived: {asked.module}:{line} {what}", flush=True)
    finally:
        asked.module.write_text(source, encoding="utf-8")
    print(f"{survived} of {len(found)} mutants survived")


if __name__ == "__main__":
    main()
