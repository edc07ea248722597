"""Ctrl-C while a command is still importing: one line and exit code 130, not Python's traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.launches import clean_environment

CODE = """
import builtins, sys
real = builtins.__import__
def interrupted(name, *rest, **named):
    if name == "torch":
        raise KeyboardInterrupt
    return real(name, *rest, **named)
builtins.__import__ = interrupted
"""


@pytest.mark.parametrize(
    ("command", "before"),
    [
        (
            "from toolkit.cli.finetune import finetune_command; sys.exit(finetune_command(['quickstart']))",
            "started 1 rank; importing torch and transformers ...\n",
        ),
        ("from toolkit.cli.app import main; sys.argv = ['toolkit', 'data', 'quickstart']; main()", ""),
    ],
)
def test_one_line(command: str, before: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CODE + command], text=True, capture_output=True, timeout=300, env=clean_environment()
    )
    assert (ended.returncode, ended.stderr) == (130, before + "stopped by Ctrl-C\n")
