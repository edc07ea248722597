"""The imports of the package, read from its source: which file needs which, and which of them form a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "toolkit"
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """The file's name inside the package: `data/build`."""
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file's source."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of every file that is imported, inside functions and for types alone as well."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, _file(alias.name)) for alias in node.names if alias.name.startswith("toolkit."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "toolkit":
            yield from ((node.lineno, _file(f"{node.module}.{alias.name}")) for alias in node.names)


@cache
def _file(dotted: str) -> str:
    """The file that a dotted name is in: of `toolkit.data.build.Builder` it is `data/build`."""
    parts = dotted.split(".")[1:]
    for length in range(len(parts), 0, -1):
        name = "/".join(parts[:length])
        if (PACKAGE / f"{name}.py").exists():
            return name
        if (PACKAGE / name / "__init__.py").exists():
            return f"{name}/__init__"
    return "__init__"


@cache
def graph() -> dict[str, set[str]]:
    """File -> the files that it imports. Packages are left out: their lazy names would make circles of everything."""
    return {
        name_of(path): {name for _, name in imports(nodes_of(path)) if not name.endswith("__init__")} - {name_of(path)}
        for path in FILES
        if path.name != "__init__.py"
    }


def folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def folders(files: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Folder -> the other folders whose files its files import. Files at the top are not in it."""
    found: dict[str, set[str]] = {}
    for name, read in files.items():
        others = {folder_of(other) for other in read} - {folder_of(name), ""}
        found.setdefault(folder_of(name), set()).update(others)
    return {folder: read for folder, read in found.items() if folder}


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def room_of(name: str, rooms: Sequence[str]) -> str:
    """The room that a file is in: of rooms inside of others the innermost."""
    parts = name.split("/")
    return next((room for room in ("/".join(parts[:2]), parts[0]) if room in rooms), parts[0])
