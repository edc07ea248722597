"""The house: imports point one way, nothing forms a circle, and a folder shows what is in it."""

from __future__ import annotations

import ast
import tokenize
from collections import Counter
from pathlib import Path

from support.house import FILES, PACKAGE, circles, folder_of, folders, graph, imports, name_of, room_of, tree_of

from toolkit.data.kinds.registry import KINDS

READS = {
    "errors": [],
    "terminal": [],
    "unix": [],
    "ranks": ["errors"],
    "paths": ["errors"],
    "user_function": ["errors", "terminal"],
    "recipe/objectives": ["errors"],
    "recipe": ["recipe/objectives", "ranks", "paths", "terminal", "unix", "user_function"],
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
    "serving": ["checkpoint", "generation"],
    "supervise": ["checkpoint", "pages"],
    "compare": ["run"],
    "run": ["supervise", "serving"],
    "verify": ["run"],
    "suggest": ["planning"],
    "cluster": ["planning"],
    "cli": ["verify", "suggest", "cluster", "compare"],
    "__main__": ["cli"],
    "__init__": ["cli"],
}
"""Room -> the rooms it may import, and with them whatever those may."""

FULLER = {"cli/commands": 20, "objectives": 15, "recipe/objectives": 14}
"""Folders of more than 13 files: lists, of which each file is one entry."""

LONG_FILES = {"recipe/schema"}
"""Files over 700 lines: tables and schemas."""


def allowed(room: str) -> set[str]:
    return {room}.union(*(allowed(read) for read in READS[room]))


def forbidden(name: str, tree: ast.Module) -> list[str]:
    """The imports of a file that run up."""
    rooms, room = list(READS), room_of(name, list(READS))
    return [
        f"{name}:{line} imports toolkit.{read}"
        for line, other in imports(tree)
        if (read := room_of(other, rooms)) not in allowed(room)
    ]


def test_imports_point_one_way() -> None:
    assert [line for path in FILES for line in forbidden(name_of(path), tree_of(path))] == []


def test_a_forbidden_import_is_found() -> None:
    source = "from toolkit import ranks\nfrom toolkit.run.run import finetune\n"
    assert forbidden("sharding/plugin", ast.parse(source)) == ["sharding/plugin:2 imports toolkit.run"]
    inside = ast.parse("def show():\n    from toolkit import planning\n")
    assert forbidden("pages/page", inside) == ["pages/page:2 imports toolkit.planning"]


def test_no_circle() -> None:
    """Neither between files nor between folders, for types alone neither."""
    files = graph()
    assert circles(files) == []
    assert circles(folders(files)) == []


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e2"}}) == [["a", "b", "c"]]


def test_a_folder_shows_what_is_in_it() -> None:
    counts = Counter(folder_of(name) for name in graph())
    assert {folder: count for folder, count in counts.items() if count > FULLER.get(folder, 13)} == {}


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by these alone, as tests/ has no packages."""
    counts = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []


def asked_for_kinds(name: str, tree: ast.Module) -> list[str]:
    """The lines that ask for the class of samples, which only toolkit/data may do."""
    return [
        f"{name}:{call.lineno}"
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("isinstance", "issubclass", "type")
        for of in ast.walk(call)
        if getattr(of, "id", getattr(of, "attr", "")).endswith("Samples")
    ]


def test_samples_answer_for_their_kind() -> None:
    """A new kind of row says in toolkit/data what the rest needs to know of it."""
    outside = [path for path in FILES if room_of(name_of(path), list(READS)) != "data"]
    assert [line for path in outside for line in asked_for_kinds(name_of(path), tree_of(path))] == []
    asked = ast.parse("isinstance(rows,\n    TextSamples | samples.PairSamples)\nisinstance(rows, Rows)\n")
    assert asked_for_kinds("a", asked) == ["a:1", "a:1"]


KINDS_OF_ROWS = {
    *("pairs", "judged", "labelled", "tagged", "source and target"),
    *("text and label", "tokens and tags", "chosen and rejected", "judged messages"),
}
"""Names of kinds of rows and of their layouts that are no common words; `text` and `messages` are."""

OF_KINDS = {"has_classes", "encoder_decoder", "padded", "trained_turns"}
"""What an objective says of its rows. In toolkit/data a kind answers for it."""


def branches_on_kinds(name: str, tree: ast.Module) -> list[str]:
    """The lines that compare something with the name of a kind of row, or ask for its class."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in OF_KINDS and name.startswith("data/"):
            found.append(node.lineno)
        elif isinstance(node, ast.Compare):
            words = {getattr(of, "value", None) for of in ast.walk(node) if isinstance(of, ast.Constant)}
            asked = [ast.unparse(side).split(".")[-2:] for side in (node.left, *node.comparators)]
            by_name = any(
                (side[-1] == "name" and side[0].endswith(("kind", "form", "layout"))) or side == ["spec", "rows"]
                for side in asked
            )
            # An objective's unit may be pairs.
            if by_name or (words & KINDS_OF_ROWS and "rows" not in words):
                found.append(node.lineno)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            names = {getattr(of, "id", getattr(of, "attr", "")) for of in ast.walk(node)}
            found += [node.lineno] if names & {kind.__name__ for kind in KINDS.values()} else []
    return [f"{name}:{line}" for line in found]


def test_no_room_branches_on_the_kind_of_rows() -> None:
    others = [path for path in FILES if not name_of(path).startswith(("data/kinds/", "recipe/objectives/"))]
    assert [line for path in others for line in branches_on_kinds(name_of(path), tree_of(path))] == []


def test_a_branch_on_the_kind_of_rows_is_found() -> None:
    source = """
if spec.rows == "text": pass
if self.kind.name in NAMES: pass
if layout.name == "text": pass
if form == "tagged": pass
if isinstance(kind, PairRows): pass
self.tagged = objective.spec.padded
if source.name == "text": pass
"""
    assert branches_on_kinds("data/build", ast.parse(source)) == [f"data/build:{line}" for line in range(2, 8)]


def test_the_builder_has_no_flag_of_a_kind() -> None:
    nodes = list(ast.walk(tree_of(PACKAGE / "data/build.py")))
    [builder] = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == "Builder"]
    kept = [node.attr for node in ast.walk(builder) if isinstance(node, ast.Attribute) and type(node.ctx) is ast.Store]
    assert kept == ["data", "tokenizer", "seed", "objective", "kind", "cache", "images"]


def test_few_modules_stand_outside_a_room() -> None:
    loose = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert loose <= {"__main__.py", "errors.py", "ranks.py", "paths.py", "terminal.py", "unix.py", "user_function.py"}


def test_a_file_has_one_subject() -> None:
    """Of which 700 lines are a sign: split a file by what its parts are about, and not to get under a number."""
    long = {name_of(path) for path in FILES if len(path.read_text().splitlines()) > 700}
    assert long <= LONG_FILES


def test_one_word_for_an_image() -> None:
    """The user's and the field's: names in the code say image."""
    found = [name_of(path) for path in FILES if "picture" in path.name]
    for path in FILES:
        with path.open("rb") as file:
            names = {token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME}
        found += [f"{name_of(path)}: {name}" for name in sorted(names) if "picture" in name.lower()]
    assert found == []
