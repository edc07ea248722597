"""Ctrl-C while a command is still importing: one line and exit code 130, not Python's traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.cases import cases
from support.launches import clean_environment
from support.ranks import LIMIT_SECONDS

TABLES = cases(__file__)

CODE = """
import builtins, sys
real = builtins.__import__
def interrupted(name, *rest, **named):
    if name == "torch":
        raise KeyboardInterrupt
    return real(name, *rest, **named)
builtins.__import__ = interrupted
"""


@pytest.mark.parametrize(("command", "before"), TABLES["ONE_LINE"])
def test_one_line(command: str, before: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CODE + command],
        text=True,
        capture_output=True,
        timeout=LIMIT_SECONDS,
        env=clean_environment(),
    )
    assert (ended.returncode, ended.stderr) == (130, before + "stopped by Ctrl-C\n")


def test_ranks_say_it_for_the_command_that_has_started_them() -> None:
    """Of an interrupt of all processes of a terminal: rank 0 has told it, and its launcher ends with the same code."""
    command = (
        "import sys, toolkit.cli.ranks.launcher\n"
        "def launched(*_, **__):\n    print('stopped by Ctrl-C', file=sys.stderr)\n    return 130\n"
        "toolkit.cli.ranks.launcher.run_launcher = launched\n"
        "from toolkit.cli.app import main; sys.argv = ['toolkit', 'train', 'quickstart', '--cpu=2']; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", command], text=True, capture_output=True, timeout=LIMIT_SECONDS, env=clean_environment()
    )
    assert (ended.returncode, ended.stderr.count("stopped by Ctrl-C")) == (130, 1), ended.stderr


def ended(code: str, folder: Path) -> tuple[int, str]:
    """How a process ends that has the handler, with modules in `folder`."""
    # A shell's background job has SIGINT ignored, and so have its children.
    handled = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    begun = (
        f"{handled}; sys.path.insert(0, {str(folder)!r}); from toolkit.cli.shared.signals import end_at_interrupts; "
    )
    found = subprocess.run(
        [sys.executable, "-c", f"{begun}end_at_interrupts()\n{code}"],
        text=True,
        capture_output=True,
        timeout=LIMIT_SECONDS,
        env=clean_environment(),
    )
    return found.returncode, found.stderr


def test_an_interrupt_while_a_module_is_imported_ends_the_process_at_once(tmp_path: Path) -> None:
    """transformers looks for modules, and takes any exception of theirs for a missing package."""
    (tmp_path / "slow.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor _ in range(99): pass\n"
    )
    code = "try:\n    import slow\nexcept BaseException:\n    pass\nprint('went on', file=sys.stderr)"
    assert ended(code, tmp_path) == (130, "stopped by Ctrl-C\n")


def test_an_interrupt_of_a_command_is_an_exception_as_usual(tmp_path: Path) -> None:
    code = (
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    sys.exit(7)"
    )
    assert ended(code, tmp_path) == (7, "")
    ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); end_at_interrupts()\n" + code
    assert ended(ignored, tmp_path) == (0, "")
