"""A user's function: named in a recipe or an option, identified by the hash of its source, and run inside a fence.

It runs as in a script of the user's own, but for what `fenced` says. All functions that a recipe or an option names are
loaded and called here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import numbers
import random
import sys
import threading
import traceback
import types
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from toolkit.errors import BadInputError, OwnCodeError, first_line
from toolkit.terminal import in_notebook, stdout_on_stderr

T = TypeVar("T")

_seed, _moment = [0], [""]
"""The seed of the run, and what is under way of it."""

calls: Counter[str] = Counter()
"""The calls of each function since the moment began, by its field, and of each file; empty if there is no own code."""

_running = threading.RLock()
"""Held while code of the user's runs: generators, folder and stdout are the process's, and a thread may make rows."""

SHOWN = 80
"""Characters of a value that are printed."""


@dataclass(frozen=True)
class UserFunction:
    """A function of a user's.

    Attributes:
        name: `module:function` or `file.py:function`.
        function: the function itself, without the fence.
        fingerprint: SHA-256 of its source at the import, in hexadecimal: of the file that is named, and of the one that
            defines the function if that is another.
        field: the field or the option that names it, for errors.
    """

    name: str
    function: Callable[..., Any]
    fingerprint: str
    field: str

    @property
    def identity(self) -> str:
        """Returns what decides what the function returns: which one it is, and its source. Folders are left out."""
        return f"{self.name.rpartition(':')[2]} {self.fingerprint}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process imports the function again, and must find the same source."""
        return _load_same, (self.name, self.field, self.fingerprint)

    def call(self, where: str, *arguments: Any, **named: Any) -> Any:
        """Returns what the function returns.

        Args:
            where: what it is called for, for errors, such as `rows.jsonl:3`.

        Raises:
            BadInputError: if it fails or would end the process.
        """
        return self.call_each([where], [functools.partial(self.function, *arguments, **named)])[0]

    def call_each(self, places: Sequence[str], calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Returns what each call of the function returns, all inside one fence, which takes a millisecond.

        Args:
            places: what each call is for, for errors.

        Raises:
            BadInputError: if a call fails or would end the process.
        """
        results: list[Any] = []

        def call_all() -> list[Any]:
            for each in calls:
                results.append(each())
            return results

        def what() -> str:
            return f"{self.field}: {self.name} failed on {places[len(results)]}"

        return fenced(call_all, what, "correct the function, or leave the row out", self.field)

    def wrong(self, found: Any, where: str, needed: str) -> BadInputError:
        """Returns the error for a value that the function returned."""
        return BadInputError(f"{self.field}: {self.name} returned {shown(found)} for {where}; needs {needed}")


def load_function(name: str, field: str) -> UserFunction:
    """Imports a function. Only for a name that the user has given, or allowed: importing a module runs its code.

    Args:
        name: `module:function`, found on Python's path, or `file.py:function`.
        field: the field or the option that names it, for errors.

    Raises:
        BadInputError: if there is no such file, module or function, importing it fails or would end the process, or it
            has no source.
    """
    place, _, attribute = name.rpartition(":")
    place = str(Path(place).absolute()) if is_file(name) else place
    what = f"the {'file' if is_file(name) else 'module'} {place!r}"
    try:
        module = _imported_from(place, what)
        find = functools.partial(_function_of, module, attribute)
        function, sources = fenced(find, f"{what} cannot be imported", "correct it")
        if function is None:
            raise BadInputError(f"{what} has no function {attribute!r}; name one that it has")
        if not sources:
            raise BadInputError(f"'{place}:{attribute}' has no source file that a run could record; write it in Python")
    except BadInputError as problem:
        raise BadInputError(f"{field}: {problem}") from problem
    return UserFunction(name, function, hashlib.sha256(b"".join(sources.values())).hexdigest(), field)


def fingerprint_of_class(of: type) -> str | None:
    """Returns SHA-256 of the source file of a class, or None if it has none, as one that is typed at a prompt."""
    try:
        file = inspect.getsourcefile(of)
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except (TypeError, OSError):
        return None


def _load_same(name: str, field: str, fingerprint: str) -> UserFunction:
    found = load_function(name, field)
    if fingerprint != found.fingerprint:
        raise BadInputError(changed_source(fingerprint, found.fingerprint, field, "began this run"))
    return found


def is_file(name: str) -> bool:
    """Returns whether the name of a function names its file, and not a module."""
    return name.rpartition(":")[0].endswith(".py")


def changed_source(before: str, now: str, field: str, what: str) -> str:
    """Returns the error for a run that would not go on with the function that it began with.

    Args:
        before, now: fingerprints of the source at the start of the run, and now.
        field: the field that names the function.
        what: describes what the function has done before.
    """
    return (
        f"{field}: what it names has changed: SHA-256 {before} {what}, and {now} is there now; bring the first one "
        "back, or start anew with another training.output_dir"
    )


def shown(value: Any) -> str:
    """Returns the beginning of a value's `repr`, or its type if it cannot be printed."""
    with contextlib.suppress(BadInputError):
        return fenced(lambda: str(repr(value))[:SHOWN], "", "")
    return f"a value of type {type(value).__name__}, which cannot be printed"


def fenced(action: Callable[[], T], what: str | Callable[[], str], mend: str, field: str = "") -> T:
    """Runs code of a user's and returns its result.

    `sys.exit` and any other exception become one error. What it prints goes to stderr, because stdout may be for JSON
    alone. Its random numbers follow from the seed, the moment and the number of the call, so that it draws the same
    ones if the run resumes; those of the run are the same without it. Only Ctrl-C passes through.

    Args:
        what: the beginning of the error, or what returns it.
        mend: what to do, the end of the error.
        field: what names the code, by which its calls are numbered.

    Raises:
        BadInputError: names the exception and the user's line.
    """
    try:
        with _running, stdout_on_stderr(), contextlib.redirect_stdout(sys.stderr), _same_generators():
            calls[field] += 1
            return seeded_by(f"{_seed[0]} {_moment[0]} {field} {calls[field]}", action)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        told = what() if callable(what) else what
        raise BadInputError(f"{told}: {_in_words(error)}{_line_of(error)}; {mend}") from error


@contextlib.contextmanager
def while_training() -> Iterator[None]:
    """Makes an error of the user's code one that this rank may have alone, as in a step of training."""
    try:
        yield
    except BadInputError as error:
        raise OwnCodeError(str(error)) from error.__cause__


# Random numbers of own code: each call has its own, which follow from texts, so that no checkpoint has their state.


_thread = threading.local()


def made_while_training() -> None:
    """Says that this thread makes rows while another one trains, whose generators of torch it leaves alone."""
    _thread.while_training = True


def generators() -> dict[str, Any]:
    """Returns the states of this process's generators of random numbers, by the library that has them."""
    numpy, torch = (sys.modules.get(name) for name in ("numpy", "torch"))
    with _running:  # of the run, not of code that makes rows in another thread
        found: dict[str, Any] = {"python": random.getstate()}
        if numpy is not None:
            found["numpy"] = numpy.random.get_state()
    if torch is not None:
        found["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():  # of this rank's device: the others belong to other ranks
            found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_generators(states: Mapping[str, Any]) -> None:
    """Restores the states that `generators` returned."""
    alone = not hasattr(_thread, "while_training")
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "torch" in states and alone:
        sys.modules["torch"].set_rng_state(states["torch"])
    if "cuda" in states and alone and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.set_rng_state(states["cuda"])


def seeded_by(text: str, action: Callable[..., T], *arguments: Any) -> T:
    """Calls `action` with generators that are seeded by a text; `_same_generators` puts them back."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    numpy, torch = (sys.modules.get(name) for name in ("numpy", "torch"))
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed)
    if torch is not None and not hasattr(_thread, "while_training"):
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)
    return action(*arguments)


@contextlib.contextmanager
def _same_generators() -> Iterator[None]:
    """Puts the generators back as they are at the start of the block."""
    before = generators()
    try:
        yield
    finally:
        set_generators(before)


def begin_own_code(seed: int) -> None:
    """Begins the random numbers of all own code anew, as a run does, and runs its files anew where they are named."""
    _seed[0] = seed
    calls.clear()
    begin_moment("the start")
    _forget({_file_of(module) for module in _imported.values()})
    _imported.clear()


def begin_moment(moment: str) -> None:
    """Says which step or evaluation begins: the random numbers of own code depend on it and on the calls since then."""
    _moment[0] = moment
    for field in list(calls):
        calls[field] = 0


def as_number(value: Any) -> float | None:
    """Returns a value of the user's as a number, or None if it is no real number, or too large for a float.

    True and false are numbers, those of NumPy, too. The class of the value may be a user's code.
    """
    try:
        if type(value).__module__ == "numpy" and not value.ndim:
            value = value.item()
        return float(value) if isinstance(value, numbers.Number) else None  # type: ignore[arg-type] # fails if complex
    except Exception:
        return None


def _in_words(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "it called sys.exit, which would have ended the process"
    return f"{type(error).__name__}: {first_line(error)}"


def _line_of(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    users = [frame for frame in frames if "importlib" not in frame.filename]
    return f" ({users[-1].filename}:{users[-1].lineno})" if users else ""


def _function_of(module: types.ModuleType, attribute: str) -> tuple[Any, dict[str, bytes]]:
    """Returns a function, or None, and the sources, by file, of the module and of what defines the function."""
    function, sources = getattr(module, attribute, None), {}
    if not callable(function):
        return None, {}
    for each in (module, inspect.unwrap(function)):
        with contextlib.suppress(TypeError, OSError):
            if (file := inspect.getsourcefile(each)) is not None:
                sources[file] = _files.get(file) or Path(file).read_bytes()
    _files.update(sources)
    return function, sources


_imported: dict[str, types.ModuleType] = {}
"""Files and modules of the user's, each of which runs once for all of its functions."""

_files: dict[str, bytes] = {}
"""What ran of own code: the content of its files, and of those beside them that they import, by name."""


def _imported_from(place: str, what: str) -> types.ModuleType:
    """Imports a file or a module, anew if a source was edited since: in a notebook, the process outlives an edit."""
    if _read(_files) != _files:
        _forget(_files)
        _imported.clear()
        _files.clear()
    if place not in _imported:
        _imported[place] = _import_anew(place, what)
    return _imported[place]


def _forget(files: Container[str]) -> None:
    """Forgets the modules of these files, so that the next import runs them; not those without a file."""
    for name, module in list(sys.modules.items()):
        if (file := _file_of(module)) and file in files:
            del sys.modules[name]
            # Python takes an edit of the same second and length for what it compiled.
            with contextlib.suppress(OSError):
                Path(importlib.util.cache_from_source(file)).unlink()


def _file_of(module: Any) -> str:
    return str(getattr(module, "__dict__", {}).get("__file__") or "")


def _read(files: Iterable[str]) -> dict[str, bytes]:
    return {file: Path(file).read_bytes() for file in files if Path(file).is_file()}


def _import_anew(place: str, what: str) -> types.ModuleType:
    is_path = place.endswith(".py")
    if is_path and not Path(place).is_file():
        raise BadInputError(f"there is no file {place!r}; correct the path")
    if in_notebook():  # a cell, or a function when it was called, may have imported a file of the folder before an edit
        found = None if is_path else importlib.machinery.PathFinder.find_spec(place.partition(".")[0])
        where = Path(place if found is None else str(found.origin)).parent
        modules = [module for name, module in list(sys.modules.items()) if not name.startswith("toolkit")]
        _forget({file for file in map(_file_of, modules) if file.endswith(".py") and Path(file).parent == where})
    before = set(sys.modules)
    find = functools.partial(_run_file, Path(place)) if is_path else functools.partial(importlib.import_module, place)
    elsewhere = "" if is_path else ", set PYTHONPATH to the folder that has it, or name its file: scores.py:function"
    module = fenced(find, f"{what} cannot be imported", f"correct it{elsewhere}", Path(place).name)
    folder, added = Path(_file_of(module)).parent, {*sys.modules} - before
    files = (_file_of(sys.modules[name]) for name in added if not name.startswith("toolkit."))
    beside = (file for file in files if file.endswith(".py") and Path(file).is_relative_to(folder))
    _files.update(_read(file for file in beside if "-packages" not in file and file not in _files))
    return module


def _run_file(path: Path) -> types.ModuleType:
    """Runs a Python file as a module, whatever is cached, and keeps the bytes that were run."""
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    module, source = types.ModuleType(name), path.read_bytes()
    module.__file__ = str(path)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # as for a script: it may import what is next to it
    sys.modules[name] = module  # where dataclasses and pickle look for it
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - the user has named it
    except BaseException:
        del sys.modules[name]
        raise
    _files[str(path)] = source
    return module
