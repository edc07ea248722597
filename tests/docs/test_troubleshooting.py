"""Every text that docs/troubleshooting.md and docs/hub.md quote is one that the code prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.first

ROOT = Path(__file__).parents[2]
QUOTED = re.compile(r"^\| `([^`]+)` \| [^|]+ \|(?: [^|]+ \|)?$", re.MULTILINE)
PAGES = ("troubleshooting.md", "hub.md")
ANYTHING = "\0"
"""What stands where an f-string puts a value in."""


def texts(code: str) -> Iterator[str]:
    """The strings of a module, f-strings with ANYTHING for their values."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else ANYTHING for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def unknown(quotes: list[str], printed: str) -> list[str]:
    """Those of the quotes that no text has; their `…` stands for one value or several."""
    patterns = {quote: "[^\n]*".join(map(re.escape, quote.split("…"))) for quote in quotes}
    return [quote for quote, pattern in patterns.items() if not re.search(pattern, printed)]


@pytest.fixture(scope="module")
def printed() -> str:
    modules = [path.read_text(encoding="utf-8") for path in (ROOT / "toolkit").rglob("*.py")]
    return "\n".join(text.replace("\n", " ") for module in modules for text in texts(module))


def test_quoted_errors_are_those_of_the_code(printed: str) -> None:
    found = {name: QUOTED.findall((ROOT / "docs" / name).read_text(encoding="utf-8")) for name in PAGES}
    quotes = [quote for of_page in found.values() for quote in of_page]
    assert len(found["troubleshooting.md"]) > 40
    assert len(found["hub.md"]) >= 4
    assert not unknown(quotes, printed)


def test_another_wording_is_found(printed: str) -> None:
    quotes = ["there is no recipe with that name", "needs … torchao", "is of another run"]
    assert unknown(quotes, printed) == quotes[:2]
