"""A user's function: named in a recipe or an option, identified by the hash of its source, and run inside a fence.

Whatever code of a user's does inside the fence, it can neither end the process nor change what is trained without a
word: see `fenced`. All functions that a recipe or an option names are loaded and called here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import os
import random
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from toolkit.errors import BadInputError, OwnCodeError, first_line
from toolkit.terminal import stdout_on_stderr

T = TypeVar("T")

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

        return fenced(call_all, what, "correct the function, or leave the row out")


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
    try:
        function, fingerprint = _import_function(str(Path(place).absolute()) if is_file(name) else place, attribute)
    except BadInputError as problem:
        raise BadInputError(f"{field}: {problem}") from problem
    return UserFunction(name, function, fingerprint, field)


def fingerprint_of_class(of: type) -> str | None:
    """Returns SHA-256 of the source file of a class, or None if it has none, as one that is typed at a prompt."""
    try:
        file = inspect.getsourcefile(of)
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except (TypeError, OSError):
        return None


def _load_same(name: str, field: str, fingerprint: str) -> UserFunction:
    found = load_function(name, field)
    require_same_source(fingerprint, found.fingerprint, field, "began this run")
    return found


def is_file(name: str) -> bool:
    """Returns whether the name of a function names its file, and not a module."""
    return name.rpartition(":")[0].endswith(".py")


def require_same_source(before: str, now: str, field: str, what: str) -> None:
    """Checks that a run goes on with the function that it began with.

    Args:
        before, now: fingerprints of the source at the start of the run, and now.
        field: the field that names the function.
        what: describes what the function has done before.

    Raises:
        BadInputError: if the source is another.
    """
    if before != now:
        raise BadInputError(
            f"{field}: the source has changed: SHA-256 {before} {what}, and {now} is there now; bring the first one "
            "back, or start anew with another training.output_dir"
        )


def shown(value: Any) -> str:
    """Returns the beginning of a value's `repr`, or its type if it cannot be printed."""
    with contextlib.suppress(BadInputError):
        return fenced(lambda: str(repr(value))[:SHOWN], "", "")
    return f"a value of type {type(value).__name__}, which cannot be printed"


def fenced(action: Callable[[], T], what: str | Callable[[], str], mend: str) -> T:
    """Runs code of a user's and returns its result.

    It cannot end the process: `sys.exit`, `os._exit` and any other exception become one error. What it prints goes to
    stderr, because stdout may be for JSON alone. The random numbers of `random`, NumPy and torch afterwards are those
    without it. Only Ctrl-C passes through.

    Args:
        what: the beginning of the error, or what returns it.
        mend: what to do, the end of the error.

    Raises:
        BadInputError: names the exception and the user's line.
    """
    try:
        with stdout_on_stderr(), contextlib.redirect_stdout(sys.stderr), _same_state(), _exits_refused():
            return action()
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


class _ExitError(BaseException):
    """Raised in place of `os._exit`."""


_real_exit = os._exit
_fence = threading.local()


def _exit(status: int) -> NoReturn:
    """`os._exit`, which raises in the thread that is in the fence; elsewhere, and in its child processes, it exits."""
    ours = str(sys._getframe(1).f_globals.get("__name__")).startswith("toolkit.")  # a handler of signals
    if getattr(_fence, "pid", None) == os.getpid() and not ours:
        raise _ExitError(f"os._exit({status})")
    _real_exit(status)


@contextlib.contextmanager
def _exits_refused() -> Iterator[None]:
    # It stays in place: a user's module may keep it (`from os import _exit`), and other threads may be in the fence.
    os._exit = _exit
    before, _fence.pid = getattr(_fence, "pid", None), os.getpid()
    try:
        yield
    finally:
        _fence.pid = before


def _working_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


@contextlib.contextmanager
def _same_state() -> Iterator[None]:
    """Puts generators, whether torch records gradients, and the working folder back at the end of the block."""
    numpy, torch = (sys.modules.get(name) for name in ("numpy", "torch"))
    state, folder = random.getstate(), _working_folder()
    of_numpy = numpy.random.get_state() if numpy is not None else None
    of_torch = torch.get_rng_state() if torch is not None else None
    records = torch is None or torch.is_grad_enabled()
    of_cuda = torch.cuda.get_rng_state() if torch is not None and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(state)
        if folder is not None:
            os.chdir(folder)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        if torch is not None:
            torch.set_rng_state(of_torch)
            torch.set_grad_enabled(records)
        if torch is not None and of_cuda is not None:
            torch.cuda.set_rng_state(of_cuda)


def _in_words(error: BaseException) -> str:
    if isinstance(error, _ExitError):
        return f"it called {error}, which would have ended the process"
    if isinstance(error, SystemExit):
        return "it called sys.exit, which would have ended the process"
    try:
        return f"{type(error).__name__}: {first_line(error)}"
    except BaseException:  # a class of the user's, whose text is code, too
        return f"{type(error).__name__}, whose text cannot be printed"


def _line_of(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    users = [frame for frame in frames if "importlib" not in frame.filename]
    return f" ({users[-1].filename}:{users[-1].lineno})" if users else ""


@functools.cache  # as Python does: a file that changes later is not what runs
def _import_function(place: str, attribute: str) -> tuple[Callable[..., Any], str]:
    named = "file" if place.endswith(".py") else "module"
    if named == "file" and not Path(place).is_file():
        raise BadInputError(f"there is no file {place!r}; correct the path")

    def find() -> tuple[Any, list[bytes] | None]:
        module, source = _run_file(Path(place)) if named == "file" else (importlib.import_module(place), None)
        function = getattr(module, attribute, None)
        return (function, _sources(module, source, function)) if callable(function) else (None, [])

    try:
        function, sources = fenced(find, f"the {named} {place!r} cannot be imported", "correct it")
    except BadInputError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and named == "module" and place.startswith(missing.name or "?"):
            raise BadInputError(
                f"no module {missing.name!r} on Python's path; set PYTHONPATH to the folder that has it, install it, "
                f"or name its file, as in scores.py:{attribute}"
            ) from error
        raise
    if function is None:
        raise BadInputError(f"the {named} {place!r} has no function {attribute!r}; name one that it has")
    if not sources:
        raise BadInputError(
            f"'{place}:{attribute}' has no source file by which a run could say what ran; write a function in Python"
        )
    return function, hashlib.sha256(b"".join(sources)).hexdigest()


def _run_file(path: Path) -> tuple[types.ModuleType, bytes]:
    """Runs a Python file as a module. Returns the module and the bytes that were run, whatever is cached."""
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    module, source = types.ModuleType(name), path.read_bytes()
    module.__file__ = str(path)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # as for a script: it may import what is beside it
    sys.modules[name] = module  # where dataclasses and pickle look for it
    try:
        exec(compile(source, path, "exec"), module.__dict__)  # noqa: S102 - the user has named it
    except BaseException:
        del sys.modules[name]
        raise
    return module, source


def _sources(module: types.ModuleType, run: bytes | None, function: Any) -> list[bytes]:
    """Returns the sources of a module and of a function in it, which may come from another file."""
    found: dict[str, bytes] = {} if run is None else {str(module.__file__): run}
    for each in (module, inspect.unwrap(function)):
        with contextlib.suppress(TypeError, OSError):
            file = inspect.getsourcefile(each)
            if file is not None and file not in found:
                found[file] = Path(file).read_bytes()
    return list(found.values())
