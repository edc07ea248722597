"""What strangers write does nothing on the terminal, and no bracket ends a run."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import toolkit
from toolkit.cli.shared.console import print_error, print_table
from toolkit.errors import BadInputError
from toolkit.pages.card import _plain
from toolkit.terminal import Terminal, format_time

HOSTILE = "a[/]b [red]c[/red] :smile: \x1b[2J\x9b1m\u202ed"
SHOWN = "a[/]b [red]c[/red] :smile: \u241b[2J\ufffd1m\ufffdd"


@pytest.mark.parametrize(
    "write",
    [
        lambda: Terminal().print(HOSTILE),
        lambda: Terminal().warn(HOSTILE),
        lambda: Terminal().fail(HOSTILE),
        lambda: print_error(BadInputError(HOSTILE)),
        lambda: print_table(["name"], [[HOSTILE]]),
    ],
    ids=["print", "warn", "fail", "error", "table"],
)
def test_text_is_printed_as_it_is(write: Callable[[], object]) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.redirect_stdout(told):
        write()
    assert SHOWN in told.getvalue()


def test_nobody_else_makes_a_console() -> None:
    sources = {path.name: path.read_text() for path in Path(toolkit.__file__).parent.rglob("*.py")}
    assert [name for name, text in sources.items() if " Console(" in text or "=Console(" in text] == ["terminal.py"]


def test_markdown_of_a_card_is_no_link_and_no_html() -> None:
    assert _plain("a|b\n![x](http://h/p.png) <img src=x> `c` \\[y](z)") == (
        "a\\|b !\\[x](http://h/p.png) &lt;img src=x> \\`c\\` \\\\\\[y](z)"
    )


def test_a_time_is_written_in_utc_wherever_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        assert format_time(1_700_000_000.7) == "2023-11-14 22:13:20 UTC"
    time.tzset()
