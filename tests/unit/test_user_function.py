"""Functions of a user's: how they are found, what identifies them, and that none ends or bends a run in silence."""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.errors import BadInputError
from toolkit.user_function import fenced, load_function, require_same_source, shown

SOURCE = """
import contextlib, ctypes, os, random, subprocess, sys, threading
from os import _exit

import numpy, torch
import {beside}

print("imported")


class Own(BaseException):
    pass


class Unprintable(Exception):
    def __str__(self):
        sys.exit(0)


def fails(how):
    if how == "os._exit":
        os._exit(9)
    if how == "kept _exit":
        _exit(3)
    if how == "sys.exit":
        sys.exit(0)
    if how == "quit":
        raise SystemExit("done")
    if how == "generator":
        raise GeneratorExit
    if how == "stop":
        raise StopIteration(1)
    if how == "own":
        raise Own("mine")
    if how == "unprintable":
        raise Unprintable
    if how == "deep":
        fails("deep")
    if how == "memory":
        raise MemoryError


def prints(value):
    print("by print")
    sys.__stdout__.write("by the stream\\n")
    os.write(1, b"by the file\\n")
    subprocess.run(["echo", "by a child"])
    return value


def seeds(value):
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    return random.random()


def forgets_gradients(value):
    import torch
    torch.set_grad_enabled(False)
    os.chdir("/")
    return value


def forks(value):
    child = os.fork()
    if child == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    beside = f"beside_{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:8]}"
    (tmp_path / f"{beside}.py").write_text("def helps(value):\n    return value\n")
    (tmp_path / "mine.py").write_text(SOURCE.format(beside=beside) + f"\nhelps = {beside}.helps\n")
    return tmp_path / "mine.py"


def test_whatever_it_raises_is_one_error_that_names_it_and_its_line(file: Path) -> None:
    function = load_function(f"{file}:fails", "answers.score")
    lines = SOURCE.splitlines()
    ends = {
        "os._exit": ("it called os._exit(9), which would have ended the process", "os._exit(9)"),
        "kept _exit": ("it called os._exit(3), which would have ended the process", "_exit(3)"),
        "sys.exit": ("it called sys.exit, which would have ended the process", "sys.exit(0)"),
        "quit": ("it called sys.exit, which would have ended the process", 'SystemExit("done")'),
        "generator": ("GeneratorExit: GeneratorExit", "raise GeneratorExit"),
        "stop": ("StopIteration: 1", "raise StopIteration"),
        "own": ("Own: mine", 'raise Own("mine")'),
        "unprintable": ("Unprintable, whose text cannot be printed", "raise Unprintable"),
        "deep": ("RecursionError: maximum recursion depth exceeded", None),
        "memory": ("MemoryError: MemoryError", "raise MemoryError"),
    }
    wrong = []
    for how, (words, line) in ends.items():
        with pytest.raises(BadInputError) as caught:
            function.call("rows.jsonl:3", how)
        # The last line that has it: `sys.exit(0)` stands in a class before.
        number = max((n for n, text in enumerate(lines, 1) if line is not None and line in text), default=None)
        place = f" ({file}:{number})" if line is not None else ""
        expected = f"answers.score: {file}:fails failed on rows.jsonl:3: {words}{place}; correct the function"
        if not str(caught.value).startswith(
            expected if line is not None else expected[: -len("; correct the function")]
        ):
            wrong.append((how, str(caught.value)))
    assert wrong == []
    assert function.call("rows.jsonl:3", "nothing") is None
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C is the user's own
        fenced(lambda: (_ for _ in ()).throw(KeyboardInterrupt), "", "")


def test_outside_the_fence_a_process_ends_as_it_wants(file: Path) -> None:
    """Child processes of the function, other threads of ours, and the process after a call."""
    assert load_function(f"{file}:forks", "f").call("row", 1) == 7
    code = (
        "import os, sys, threading; from toolkit.user_function import load_function\n"
        "f = load_function(sys.argv[1], 'f'); f.call('row', 1)\n"
        "def end(): os._exit(5)\n"
        "threading.Thread(target=end).start() if sys.argv[2] == 'thread' else end()\n"
    )
    for place in ("thread", "main"):
        assert subprocess.run([sys.executable, "-c", code, f"{file}:seeds", place]).returncode == 5, place


def test_what_it_prints_goes_to_stderr_and_random_numbers_stay(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    function = load_function(f"{file}:prints", "f")
    print("{", end="")
    assert function.call("row", 3) == 3
    print("}")
    told = capfd.readouterr()
    assert told.out == "{}\n"
    for line in ("imported", "by print", "by the stream", "by the file", "by a child"):
        assert line in told.err, line
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    before = (random.random(), np.random.rand(), float(torch.rand(())))
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    load_function(f"{file}:seeds", "f").call("row", 1)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == before
    folder = Path.cwd()
    for records in (True, False):
        with torch.set_grad_enabled(records):
            load_function(f"{file}:forgets_gradients", "f").call("row", 1)
            assert torch.is_grad_enabled() is records
            assert Path.cwd() == folder


def test_the_hash_is_that_of_what_runs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = file.read_bytes()
    assert load_function(f"{file}:seeds", "f").fingerprint == hashlib.sha256(text).hexdigest()
    (beside,) = file.parent.glob("beside_*.py")
    both = hashlib.sha256(text + beside.read_bytes()).hexdigest()
    assert load_function(f"{file}:helps", "f").fingerprint == both, "the file that is named, and that of the function"
    monkeypatch.syspath_prepend(str(file.parent))
    alone = hashlib.sha256(beside.read_bytes()).hexdigest()
    assert load_function(f"{beside.stem}:helps", "f").fingerprint == alone
    monkeypatch.chdir(file.parent)
    assert load_function("mine.py:seeds", "f").fingerprint == hashlib.sha256(text).hexdigest()
    # Of the same size and second: Python would take what it has compiled before.
    code = "import sys; from toolkit import user_function as u; print(u.load_function(sys.argv[1], 'f').call('', 0))"
    for value in (1, 2):
        Path("same.py").write_text(f"def f(x):\n    return {value}\n")
        os.utime("same.py", (1e9, 1e9))
        done = subprocess.run([sys.executable, "-c", code, "same.py:f"], capture_output=True, text=True, check=True)
        assert done.stdout == f"{value}\n"


def test_what_cannot_be_imported_is_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = file.parent
    name = "ends_" + folder.name.replace("-", "_")
    monkeypatch.syspath_prepend(str(folder))
    ends = {"exits": "import sys; sys.exit(0)", "leaves": "import os; os._exit(9)", "syntax": "def f(:"}
    ends |= {"absent": "import absent_library", "none": "f = 3", "asks": "def __getattr__(name): raise SystemExit"}
    for kind, text in ends.items():
        (folder / f"{name}_{kind}.py").write_text(text + "\n")
    expected = {
        f"{folder}/{name}_exits.py:f": r"cannot be imported: it called sys.exit, .*_exits.py:1\); correct it",
        f"{name}_exits:f": r"cannot be imported: it called sys.exit, .*_exits.py:1\); correct it",
        f"{folder}/{name}_leaves.py:f": r"cannot be imported: it called os._exit\(9\), .*_leaves.py:1\); correct it",
        f"{folder}/{name}_syntax.py:f": "cannot be imported: SyntaxError: invalid syntax",
        f"{folder}/{name}_absent.py:f": "cannot be imported: ModuleNotFoundError: No module named 'absent_library'",
        f"{folder}/{name}_asks.py:f": "cannot be imported: it called sys.exit",
        f"{folder}/{name}_none.py:f": "has no function 'f'; name one that it has",
        f"{folder}/absent.py:f": "there is no file '.*absent.py'; correct the path",
        "no_such_module_at_all:f": "no module 'no_such_module_at_all' on Python's path; set PYTHONPATH",
        "math:sqrt": "'math:sqrt' has no source file",
    }
    wrong = []
    for named, words in expected.items():
        with pytest.raises(BadInputError) as caught:
            load_function(named, "answers.score")
        if re.match(rf"answers\.score: .*{words}", str(caught.value)) is None:
            wrong.append((named, str(caught.value)))
    assert wrong == []
    threads = threading.active_count()
    (folder / f"{name}_exits.py").write_text("def f(x):\n    return x\n")  # as the error says
    assert load_function(f"{folder}/{name}_exits.py:f", "answers.score").call("row", 4) == 4
    assert threading.active_count() == threads


def test_values_that_cannot_be_printed_are_named_by_their_type() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise SystemExit

    values: dict[str, Any] = {"Odd": Odd(), "int": 10**5000}
    for name, value in values.items():
        assert shown(value) == f"a value of type {name}, which cannot be printed"
    assert shown("a" * 200) == "'" + "a" * 79


def test_another_source_names_both_hashes_and_the_way_out() -> None:
    require_same_source("a" * 64, "a" * 64, "answers.score", "scored the run")
    with pytest.raises(BadInputError) as caught:
        require_same_source("a" * 64, "b" * 64, "answers.score", "scored the run up to step 8")
    assert str(caught.value) == (
        f"answers.score: the source has changed: SHA-256 {'a' * 64} scored the run up to step 8, and {'b' * 64} is "
        "there now; bring the first one back, or start anew with another training.output_dir"
    )
