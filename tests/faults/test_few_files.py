"""Commands where few files may be open."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks import LIMIT_SECONDS

SCRIPT = Path(__file__).parents[2] / "recipes" / "finetune.py"


def started(soft: int, hard: int, *words: str) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return subprocess.run(
        [sys.executable, *words], preexec_fn=limit, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )


@pytest.mark.parametrize("words", [[str(SCRIPT), "--dry-run"], ["-m", "toolkit.cli.app", "validate", "quickstart"]])
def test_too_few_files_are_an_error(words: list[str]) -> None:
    """With 22 files gloo ended a rank of two from C++: `terminate called after throwing gloo::EnforceNotMet`."""
    done = started(22, 22, *words)
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        "error: this process may have 22 files open, and needs 64; raise the limit, for example by `ulimit -n 4096`\n"
    )


def test_the_limit_is_raised_where_the_system_allows_it() -> None:
    told = "import resource; from toolkit.cli.shared.console import require_files; require_files(); "
    done = started(22, 500, "-c", told + "print(resource.getrlimit(resource.RLIMIT_NOFILE))")
    assert done.stdout == "(500, 500)\n", done.stderr
