"""The house: imports point one way, and files and functions stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "toolkit"

READS = {
    "errors": [],
    "ranks": ["errors"],
    "paths": ["errors"],
    "terminal": [],
    "unix": [],
    "recipe/section": ["errors"],
    "objectives/specs": ["recipe/section"],
    "recipe": ["objectives/specs", "ranks", "paths", "terminal", "unix"],
    "sharding": ["recipe"],
    "data": ["recipe", "sharding"],
    "model": ["data"],
    "optim": ["model"],
    "objectives": ["optim"],
    "training": ["objectives"],
    "planning": ["training"],
    "checkpoint": ["planning"],
    "pages": ["data"],
    "generation": ["model", "pages"],
    "supervise": ["checkpoint", "pages"],
    "run": ["supervise", "generation"],
    "verify": ["run"],
    "suggest": ["planning"],
    "cli": ["verify", "suggest"],
    "__init__": ["cli"],
}
"""Room -> the rooms it may import, and with them whatever those may."""

LONG_FILES = {"recipe/schema.py"}
"""Files over 500 lines: tables and schemas."""


def allowed(room: str) -> set[str]:
    return {room}.union(*(allowed(read) for read in READS[room]))


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and room of every import of the package, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "toolkit":
            names = [f"toolkit.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        yield from ((node.lineno, room_of_module(name.split(".")[1:])) for name in names if name.startswith("toolkit."))


def forbidden(room: str, source: str) -> list[str]:
    return [f"line {line} imports toolkit.{read}" for line, read in imports(source) if read not in allowed(room)]


def room_of(path: Path) -> str:
    return room_of_module(path.relative_to(PACKAGE).with_suffix("").parts)


def room_of_module(parts: Sequence[str]) -> str:
    """The room that a module is in: of rooms inside of others the innermost."""
    return next((room for room in ("/".join(parts[:2]), parts[0]) if room in READS), parts[0])


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    assert forbidden(room_of(path), path.read_text()) == []


def test_a_forbidden_import_is_found() -> None:
    assert forbidden("sharding", "from toolkit import ranks\nfrom toolkit.run.stages import PreparedRun\n") == [
        "line 2 imports toolkit.run"
    ]
    assert forbidden("pages", "def show():\n    from toolkit import planning\n") == ["line 2 imports toolkit.planning"]


def test_few_modules_stand_outside_a_room() -> None:
    loose = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert loose <= {"errors.py", "ranks.py", "paths.py", "terminal.py", "unix.py"}


def test_files_have_at_most_500_lines() -> None:
    long = {str(path.relative_to(PACKAGE)) for path in FILES if len(path.read_text().splitlines()) > 500}
    assert long <= LONG_FILES


def test_functions_have_at_most_60_lines() -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, functions) and node.end_lineno is not None and node.end_lineno - node.lineno >= 60
    ]
    assert found == []
