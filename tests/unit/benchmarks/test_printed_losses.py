"""benchmarks/commands.py reads losses, CPU time and errors from the output of any training command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

TRAINS = """
import sys, yaml
assert yaml.safe_load(open(sys.argv[1])) == {"steps": 4}
print("reading ...")
for step, loss in enumerate((9.5, 9.25, 9.0, 8.5), 1):
    print({"loss": str(loss)} if step % 2 else f"step {step}/4  0:01 left  loss {loss}  lr 3.00e-04")
"""
BURNS = """
import subprocess, sys
burn = "import time\\nwhile time.process_time() < 0.3: pass"
subprocess.run([sys.executable, "-S", "-c", burn], check=True)
print("done", flush=True)
sys.stdin.read()
"""
FAILS = """
import sys
print("{'loss': '9.5'}")
print("ValueError: no flash attention in /somewhere/on/this/machine.py", file=sys.stderr)
print("subprocess.CalledProcessError: the launcher's words", file=sys.stderr)
sys.exit(1)
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter with programs of its own beside it."""
    path = tmp_path / "python"
    path.symlink_to(sys.executable)
    return str(path)


def program(python: str, text: str) -> list[str]:
    Path(python).with_name("tool").write_text(text, encoding="utf-8")
    return ["tool", "SETTINGS"]


def test_the_second_epoch_is_the_cpu_time_between_two_losses(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import commands

    told = {"PYTHONPATH": ":".join(sys.path), "PYTHONUNBUFFERED": "1"}
    monkeypatch.setattr(commands, "_environment", lambda *_: told)
    seconds = iter([1.0, 2.5, 4.0, 7.0])
    monkeypatch.setattr(commands, "_cpu_of_session", lambda _leader: next(seconds))
    found = commands.run(python, program(python, TRAINS), {"steps": 4}, epochs=2)
    assert found.failed is None
    assert found.losses == [9.5, 9.25, 9.0, 8.5]
    assert found.last_epoch_seconds(2) == 4.5
    assert found.peak_bytes > 1 << 20


def test_the_time_of_processes_that_have_ended_counts() -> None:
    import commands

    command = [sys.executable, "-c", BURNS]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        assert commands._cpu_of_session(process.pid) >= 0.28  # ticks of 0.01 s
        process.communicate()


def test_the_first_error_is_told_without_paths(python: str) -> None:
    import commands

    assert commands.run(python, program(python, FAILS), {}, 1).failed == "ValueError: no flash attention in PATH"


def test_losses_that_are_not_those_of_whole_epochs_are_a_failure(python: str) -> None:
    import commands

    found = commands.run(python, program(python, "print({'loss': '9.5'})\nprint('stopped early')"), {}, 2)
    assert found.failed == "stopped early"
