"""Functions of a user's: how they are found, what identifies them, and that none ends or bends a run in silence."""

from __future__ import annotations

import hashlib
import importlib
import json
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

from toolkit.checkpoint.state import random_states, restore_random_states
from toolkit.data.rows.readers import Shard, mapped
from toolkit.errors import BadInputError
from toolkit.user_function import begin_moment, begin_own_code, fenced, load_function, made_while_training, shown

SOURCE = """
import dataclasses, os, random, subprocess, sys

import numpy, torch
import {beside}

print("imported")


class Own(BaseException):
    pass


def fails(how):
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


def draws(value):
    callable(value) and value()
    return random.random(), numpy.random.rand(), torch.rand(()).item()


@dataclasses.dataclass
class Parsed:
    length: float


def row(value):
    return dict(python=random.random(), numpy=numpy.random.rand(), torch=torch.rand(()).item())


def kind(value):
    return dataclasses.fields(Parsed)[0].type
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
        "sys.exit": ("it called sys.exit, which would have ended the process", "sys.exit(0)"),
        "quit": ("it called sys.exit, which would have ended the process", 'SystemExit("done")'),
        "generator": ("GeneratorExit: GeneratorExit", "raise GeneratorExit"),
        "stop": ("StopIteration: 1", "raise StopIteration"),
        "own": ("Own: mine", 'raise Own("mine")'),
        "deep": ("RecursionError: maximum recursion depth exceeded", None),
        "memory": ("MemoryError: MemoryError", "raise MemoryError"),
    }
    wrong = []
    for how, (words, line) in ends.items():
        with pytest.raises(BadInputError) as caught:
            function.call("rows.jsonl:3", how)
        number = max((n for n, text in enumerate(lines, 1) if line is not None and line in text), default=None)
        place = f" ({file}:{number})" if line is not None else ""
        expected = f"answers.score: {file}:fails failed on rows.jsonl:3: {words}{place}; correct the function"
        if not str(caught.value).startswith(expected if line else expected.removesuffix("; correct the function")):
            wrong.append((how, str(caught.value)))
    assert wrong == []
    assert function.call("rows.jsonl:3", "nothing") is None
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C is the user's own
        fenced(lambda: (_ for _ in ()).throw(KeyboardInterrupt), "", "")


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


def test_random_numbers_of_own_code_follow_the_seed_the_moment_and_the_call(file: Path) -> None:
    drawn: dict[int, list[Any]] = {}
    for seed in (1, 1, 2):
        begin_own_code(seed)
        function = load_function(f"{file}:draws", "objective.loss")
        found = [function.call("row", 1) for _ in range(3)]
        begin_moment("step 8")
        found += [function.call("row", 1) for _ in range(2)]
        kept = random_states()
        begin_own_code(seed)  # as a run that resumes, which has called something else before
        torch.rand(3), load_function(f"{file}:draws", "another").call("row", 1)
        load_function(f"{file}:draws", "objective.loss").call("row", 1)
        states = {**kept, "own": {"objective.loss": kept}}  # as earlier versions wrote them
        restore_random_states(json.loads(json.dumps(states)))
        assert random_states() == kept
        begin_moment("step 8")
        assert [function.call("row", 1) for _ in range(2)] == found[3:]
        begin_moment("evaluation 8")
        drawn.setdefault(seed, []).append([*found, function.call("row", 1)])
    assert drawn[1][0] == drawn[1][1]
    every = [number for run in (drawn[1][0], drawn[2][0]) for call in run for number in call]
    assert len(set(every)) == len(every)


def test_ranks_can_draw_others_as_the_docs_say(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ndef draws(rank):\n    torch.manual_seed(torch.initial_seed() + rank)\n"
        "    return torch.rand(()).item()\n"
    )
    found = []
    for rank in (0, 1, 1):
        begin_own_code(3)
        function = load_function(f"{tmp_path}/mine.py:draws", "objective.loss")
        found.append([function.call("", rank), function.call("", rank)])
    assert found[1] == found[2]
    assert len({number for each in found[:2] for number in each}) == 4


def test_each_row_draws_its_own_numbers_wherever_it_is_made(file: Path) -> None:
    function = load_function(f"{file}:row", "data.map")
    shard = Shard("rows", "rows.jsonl")

    def made(first: int, stop: int) -> list[Any]:
        return list(mapped(iter([{} for _ in range(first, stop)]), function, shard, first))

    whole = made(0, 6)
    assert made(0, 2) + made(2, 6) == whole
    assert len({number for row in whole for number in row.values()}) == 18
    torch.manual_seed(9)
    third = torch.rand(3)[2]
    torch.manual_seed(9)
    thread = threading.Thread(target=lambda: [made_while_training(), made(0, 2)])
    thread.start(), thread.join()
    assert torch.rand(()) == third, "a thread that makes rows puts no state back that the training thread has left"


def test_code_in_two_threads_draws_its_own_numbers(file: Path) -> None:
    """A stream's rows are made in a thread while a loss may run."""
    inside, done = threading.Event(), threading.Event()

    def numbers(meanwhile: Any) -> list[Any]:
        begin_own_code(1)
        loss, rows = (load_function(f"{file}:draws", field) for field in ("objective.loss", "data.map"))
        thread = threading.Thread(target=rows.call, args=("", lambda: [inside.set(), done.wait()]))
        found = [loss.call("", lambda: meanwhile(thread))]
        done.set(), thread.is_alive() and thread.join()
        return [*found, loss.call("", 1)]

    assert numbers(lambda thread: [thread.start(), inside.wait(0.3)]) == numbers(lambda thread: None)


def test_an_edit_is_what_runs_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "edited_" + hashlib.sha256(str(tmp_path).encode()).hexdigest()[:8]
    for number, text in enumerate(("def f():\n    return 1\n", "def f():\n    return 2\n")):
        (tmp_path / f"{name}.py").write_text(text)
        for named in (f"{tmp_path}/{name}.py:f", f"{name}:f"):
            function = load_function(named, "f")
            assert function.call("") == (1, 2)[number], named
            assert function.fingerprint == hashlib.sha256(text.encode()).hexdigest()
    # Also of a module that a cell of a notebook has imported, and of what a file imports from its folder, at any time.
    monkeypatch.setattr("toolkit.user_function.in_notebook", lambda: True)
    (tmp_path / f"{name}_b.py").write_text(f"from {name}_c import f\n\n\ndef g():\n    return f()\n")
    (tmp_path / f"{name}_c.py").write_text("def f():\n    return 1\n")
    (tmp_path / f"{name}_d.py").write_text(f"def g():\n    from {name}_c import f\n\n    return f()\n")
    for named in (f"{name}_c:f", *(f"{place}{name}_{file}:g" for file in "bd" for place in ("", f"{tmp_path}/"))):
        named = named.replace(":g", ".py:g") if "/" in named else named
        importlib.import_module(f"{name}_c")
        for number in (3, 4):
            (tmp_path / f"{name}_c.py").write_text(f"def f():\n    return {number}\n")
            begin_own_code(0)
            assert load_function(named, "f").call("") == number, named


def test_functions_of_a_file_share_its_names_and_its_random_numbers(tmp_path: Path) -> None:
    """As in a script of its own: an extension can set what a loss reads, and two rewards draw no number twice."""
    begin_own_code(1)
    (tmp_path / "two.py").write_text(
        "import random\nSEEN = []\ndef sets(value):\n    SEEN.append(value)\n    return random.random()\n"
        "def reads():\n    return list(SEEN), random.random()\n"
    )
    sets, reads = load_function(f"{tmp_path}/two.py:sets", "a"), load_function(f"{tmp_path}/two.py:reads", "b")
    drawn = [sets.call("", 3), sets.call("", 4)]
    seen, *more = [*reads.call(""), reads.call("")[1]]
    assert (seen, len({*drawn, *more})) == ([3, 4], 4)


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
    assert load_function("mine.py:kind", "f").call("row", 1) is float, "compiled as Python does, without our imports"
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
    ends = {"exits": "import sys; sys.exit(0)", "syntax": "def f(:"}
    ends |= {"absent": "import absent_library", "none": "f = 3", "asks": "def __getattr__(name): raise SystemExit"}
    for kind, text in ends.items():
        (folder / f"{name}_{kind}.py").write_text(text + "\n")
    expected = {
        f"{folder}/{name}_exits.py:f": r"cannot be imported: it called sys.exit, .*_exits.py:1\); correct it",
        f"{name}_exits:f": r"cannot be imported: it called sys.exit, .*_exits.py:1\); correct it",
        f"{folder}/{name}_syntax.py:f": "cannot be imported: SyntaxError: invalid syntax",
        f"{folder}/{name}_absent.py:f": "cannot be imported: ModuleNotFoundError: No module named 'absent_library'",
        f"{folder}/{name}_asks.py:f": "cannot be imported: it called sys.exit",
        f"{folder}/{name}_none.py:f": "has no function 'f'; name one that it has",
        f"{folder}/absent.py:f": "there is no file '.*absent.py'; correct the path",
        "no_such_module_at_all:f": "cannot be imported: ModuleNotFoundError: No .*; correct it, set PYTHONPATH",
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
