"""What ruff cannot say of this house: imports point one way, each thing has one owner, and code only gets fewer.

    python .ci/lint.py

Reads source alone and imports nothing of the package, so that it takes seconds. A line for each finding; exit code 1 if
there is one. docs/architecture.md explains the rules. `tests/unit/test_lint.py` plants a fault for each.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.house import FILES, PACKAGE, circles, folder_of, folders, graph, imports, name_of, nodes_of, room_of  # noqa: E402

READS = {
    "errors": [],
    "published": [],
    "terminal": [],
    "unix": [],
    "ranks": ["errors"],
    "paths": ["errors"],
    "user_function": ["errors", "terminal"],
    "recipe/objectives": ["errors"],
    "recipe": ["recipe/objectives", "ranks", "paths", "published", "terminal", "unix", "user_function"],
    "sharding": ["recipe"],
    "data": ["recipe", "sharding"],
    "model": ["data"],
    "optim": ["model"],
    "objectives": ["optim"],
    "training": ["objectives"],
    "planning": ["training"],
    "checkpoint": ["planning"],
    "pages": ["data"],
    "generation": ["objectives", "pages"],
    "serving": ["checkpoint", "generation"],
    "supervise": ["checkpoint", "pages"],
    "run": ["supervise", "serving"],
    "verify": ["run"],
    "suggest": ["planning"],
    "cluster": ["planning"],
    "cli": ["verify", "suggest", "cluster"],
    "__main__": ["cli"],
    "__init__": ["cli"],
}
"""Room -> the rooms it may import, and with them whatever those may."""

FULLER = {"cli/commands": 20, "objectives": 15, "run/parts": 15}
"""Folders of more than 13 files: lists, of which each file is one entry."""

LONGEST_FILE = 700
LONG_FILES = {"recipe/schema"}
"""Files over the limit: tables and schemas."""

LOOSE = {"__init__", "__main__", "errors", "paths", "published", "ranks", "terminal", "unix", "user_function"}
"""Files outside of any room."""

OBJECTIVES = ("causal_lm", "sequence_classification", "token_classification", "preference", "kto")
"""Names of objectives that are the names of nothing else, such as a feature in the table of combinations."""

OBJECTIVE_NAMES = {*OBJECTIVES, "seq2seq", "reward", "distillation", "grpo"}

KINDS_OF_ROWS = {
    *("pairs", "judged", "labelled", "tagged", "source and target"),
    *("text and label", "tokens and tags", "chosen and rejected", "judged messages"),
}
"""Names of kinds of rows and of their layouts that are no common words; `text` and `messages` are."""

OF_KINDS = {"has_classes", "encoder_decoder", "padded", "trained_turns"}
"""What an objective says of its rows. In toolkit/data a kind answers for it."""

MODELS = ("model", "built", "inner", "base", "adapted", "optimizer")
"""What the code calls models and optimizers, whose classes are torch's, transformers' or peft's."""

OF_MODELS = {
    *(
        "zero_grad",
        "config",
        "generation_config",
        "training",
        "device",
        "requires_grad",
        "param_groups",
        "state",
        "train",
        "eval",
    ),
    *("is_quantized", "num_experts", "_is_fsdp_managed_module", "LOGITS_BIAS", "_tied_weights_keys", "lm_head"),
    *("gradient_checkpointing", "vocab_size", "hf_quantizer", "quantization_method", "_keep_in_fp32_modules"),
}
"""Attributes of models and optimizers that their own classes, or transformers and torch, give them."""


Nodes = Sequence[ast.AST]


def allowed(room: str) -> set[str]:
    """Returns the rooms that the files of a room may import."""
    return {room}.union(*(allowed(read) for read in READS[room]))


def upward_imports(name: str, nodes: Nodes) -> Iterator[str]:
    """Lines of imports that run up."""
    rooms, room = list(READS), room_of(name, list(READS))
    for line, other in imports(nodes):
        if (read := room_of(other, rooms)) not in allowed(room):
            yield f"{line} imports toolkit.{read}, which lies above it"


def classes_of_samples(name: str, nodes: Nodes) -> Iterator[str]:
    """Lines that ask for the class of samples, which only toolkit/data may do."""
    if name.startswith("data/"):
        return
    for call in _calls(nodes, "isinstance", "issubclass", "type"):
        if any(_last_name(of).endswith("Samples") for of in ast.walk(call)):
            yield f"{call.lineno} asks for the class of samples; their kind in toolkit/data/kinds answers"


def branches_on_kinds(name: str, nodes: Nodes) -> Iterator[str]:
    """Lines that compare something with the name of a kind of row, or ask for its class."""
    if name.startswith(("data/kinds/", "recipe/objectives/")):
        return
    for node in nodes:
        if isinstance(node, ast.Attribute):
            found = node.attr in OF_KINDS and name.startswith("data/")
        elif isinstance(node, ast.Compare):
            found = _compares_a_kind(node)
        else:
            asks = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass")
            kinds = listed_in("data/kinds/registry", "KINDS")
            found = asks and any(_last_name(of) in kinds for of in ast.walk(node))
        if found:
            yield f"{node.lineno} branches on the kind of rows; a method of RowKind answers"


def _compares_a_kind(node: ast.Compare) -> bool:
    words = {of.value for of in ast.walk(node) if isinstance(of, ast.Constant) and isinstance(of.value, str)}
    asked = [ast.unparse(side).split(".")[-2:] for side in (node.left, *node.comparators)]
    by_name = any(
        (side[-1] == "name" and side[0].endswith(("kind", "form", "layout"))) or side == ["spec", "rows"]
        for side in asked
    )
    return by_name or bool(words & KINDS_OF_ROWS and "rows" not in words)  # an objective's unit may be pairs


def branches_on_objectives(name: str, nodes: Nodes) -> Iterator[str]:
    """Lines that compare an objective's kind, choose by it, or ask for the class of an objective or its section."""
    if name.startswith("objectives/") or name == "verify/plain_losses":
        return
    for node in nodes:
        found = False
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            default = any("ObjectiveSection()" in ast.unparse(side) for side in sides)
            found = (any(map(_is_kind, sides)) and not default) or _is_kind_in_words(sides)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            names = {_last_name(of) for of in ast.walk(node.args[1])}
            found = bool(names & {"ObjectiveSection", "Objective", *listed_in("objectives/build", "CLASSES")})
        elif isinstance(node, ast.Dict):
            found = any(_is_word(key, OBJECTIVES) for key in node.keys)
        elif isinstance(node, ast.Match):
            found = _is_kind(node.subject)
        if found:
            yield f"{node.lineno} branches on the objective; its ObjectiveSpec or Objective answers"


@cache
def listed_in(name: str, table: str) -> set[str]:
    """Returns the names of the classes that a table of a file lists: objectives and kinds of rows have one each."""
    assigned = (node for node in nodes_of(PACKAGE / f"{name}.py") if isinstance(node, ast.AnnAssign))
    [value] = [node.value for node in assigned if _last_name(node.target) == table and node.value is not None]
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name) and node.id[0].isupper()}


def _is_kind(node: ast.AST) -> bool:
    """Whether it is `objective.kind`, of whatever the objective is a part."""
    return isinstance(node, ast.Attribute) and node.attr == "kind" and _last_name(node.value) in ("objective", "spec")


def _is_kind_in_words(sides: Sequence[ast.expr]) -> bool:
    """Whether something called `objective` or `kind` is compared with the name of an objective."""
    words = (word for side in sides for word in ast.walk(side))
    return bool({_last_name(side) for side in sides} & {"objective", "kind"}) and any(
        _is_word(word, OBJECTIVE_NAMES) for word in words
    )


def _is_word(node: ast.AST | None, words: Sequence[str] | set[str]) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in words


def attributes_of_ours(name: str, nodes: Nodes) -> Iterator[str]:
    """Lines that give somebody else's model or optimizer an attribute of ours."""
    given = [
        (node.value, node.attr, node.lineno)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    for call in _calls(nodes, "setattr"):
        given.append((call.args[0], getattr(call.args[1], "value", _last_name(call.args[1])), call.lineno))
    for owner, attribute, line in sorted(given, key=lambda one: one[2]):
        if _last_name(owner) in MODELS and attribute not in OF_MODELS:
            yield f"{line} sets {attribute!r} on a model or optimizer that is not ours; keep it in a LoadedModel"


def words_for_images(name: str, nodes: Nodes) -> Iterator[str]:
    """Names that call an image a picture."""
    if "picture" in name:
        yield "1 is a file's name with 'picture'; say image"
    for node in nodes:
        for word in (
            getattr(node, "id", ""),
            getattr(node, "attr", ""),
            getattr(node, "arg", ""),
            getattr(node, "name", ""),
        ):
            if isinstance(word, str) and "picture" in word.lower():
                yield f"{getattr(node, 'lineno', 1)} says {word!r}; say image"


def length(name: str, nodes: Nodes) -> Iterator[str]:
    """A file over the limit: split it by what its parts are about, and not to get under a number."""
    last = max((getattr(node, "end_lineno", None) or 0 for node in nodes), default=0)
    if last > LONGEST_FILE and name not in LONG_FILES:
        yield f"{LONGEST_FILE} is the most lines of a file, and it has {last}"


RULES: tuple[Callable[[str, Nodes], Iterator[str]], ...] = (
    upward_imports,
    classes_of_samples,
    branches_on_kinds,
    branches_on_objectives,
    attributes_of_ours,
    words_for_images,
    length,
)
"""What each file must keep."""


def whole_house() -> Iterator[str]:
    """What files keep together: no circle, folders that show what is in them, tests with names of their own."""
    files = graph()
    for circle in (*circles(files), *circles(folders(files))):
        yield f"toolkit: {', '.join(circle)} import each other"
    for folder, count in Counter(map(folder_of, files)).items():
        if count > FULLER.get(folder, 13):
            yield f"toolkit/{folder}: {count} files, where {FULLER.get(folder, 13)} are the most"
    for name in sorted({name for name in files if not folder_of(name)} - LOOSE):
        yield f"toolkit/{name}.py: stands outside of a room"
    tests = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    yield from (f"tests: {count} files are called {name}" for name, count in tests.items() if count > 1)


def code_lines(source: str, nodes: Sequence[ast.AST]) -> int:
    """Returns the number of lines with code: without blank lines, comments and docstrings, those of attributes too."""
    left_out: set[int] = set()
    texts: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            left_out.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.Constant | ast.JoinedStr):
            texts.update(range(node.lineno + 1, (node.end_lineno or 0) + 1))
    return sum(
        bool(line.strip()) and number not in left_out and (number in texts or not line.lstrip().startswith("#"))
        for number, line in enumerate(source.splitlines(), 1)
    )


def size() -> Iterator[str]:
    """Folders with more code than pyproject.toml allows. The numbers there may only fall."""
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["lint"]["code_lines"]
    for folder, most in limits.items():
        count = sum(code_lines(path.read_text(), nodes_of(path)) for path in (ROOT / folder).rglob("*.py"))
        if count > most:
            yield f"{folder}: {count} code lines, where {most} are the most; take out as much as comes in"


def _calls(nodes: Nodes, *names: str) -> Iterator[ast.Call]:
    return (node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") in names)


def _last_name(node: ast.AST) -> str:
    """Returns the last part of a dotted name, or nothing."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def findings() -> Iterator[str]:
    """A line for everything that breaks a rule."""
    for path in FILES:
        name = name_of(path)
        yield from (f"toolkit/{name}.py:{finding}" for rule in RULES for finding in rule(name, nodes_of(path)))
    yield from whole_house()
    yield from size()


def main() -> None:
    found = list(findings())
    print("\n".join(found))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
