"""Says whether the slow tier has passed on the rooms and versions that are here: then `.ci/run` runs its control set.

    python .ci/proven.py              exit code 0 if it has
    python .ci/proven.py write        after `pytest -m slow`: keeps a digest of each in .ci/proven.txt

Comments and docstrings do not count. Digests of another version of Python differ, and then the tier runs.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATHS = ("toolkit/checkpoint", "toolkit/sharding", "toolkit/training", ".ci/constraints.txt")
"""What most of the slow tier is about. Other rooms have the first tier and the control set (tests/control.yaml)."""


def code_of(file: Path) -> bytes:
    """A file's content; of Python without comments and docstrings."""
    if file.suffix != ".py":
        return file.read_bytes()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return ast.dump(tree).encode()


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def digest(path: Path) -> str:
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and "__pycache__" not in file.parts:
            found.update(f"{file.relative_to(ROOT)}\n".encode() + code_of(file))
    return found.hexdigest()


def main() -> None:
    found = "".join(f"{digest(ROOT / path)} {path}\n" for path in PATHS)
    kept = ROOT / ".ci/proven.txt"
    if sys.argv[1:] == ["write"]:
        kept.write_text(found)
    elif not kept.exists() or kept.read_text() != found:
        sys.exit("the slow tier has not run on these rooms and versions")


if __name__ == "__main__":
    main()
