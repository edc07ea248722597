"""A user's function that scores completions, named `module:function` and found on Python's path."""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import inspect
import numbers
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import BadInputError, first_line
from toolkit.generation.rows import PromptRow

LENGTH_SHOWN = 80
"""Characters of a wrong score that are printed."""


@dataclass(frozen=True)
class Scorer:
    """A function that scores completions.

    Attributes:
        name: `module:function`.
        function: takes a completion and its row as the file has it; returns True, False or a number from 0 to 1.
        fingerprint: SHA-256 of its source file at the import, in hexadecimal.
        option: the name of the option in errors.
    """

    name: str
    function: Callable[[str, dict[str, Any]], Any]
    fingerprint: str
    option: str

    def score(self, completion: str, row: PromptRow) -> float:
        """Returns the score of a row's completion, 0 to 1.

        Raises:
            BadInputError: if the function fails or returns something else; it names the row.
        """
        try:
            # A copy, so that one score does not depend on those before it.
            found = self.function(completion, copy.deepcopy(dict(row.fields)))
        except Exception as error:  # a function of the user's may do anything
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise BadInputError(
                f"{self.option}: {self.name} failed on {row.place}: {type(error).__name__}: {first_line(error)} "
                f"({last.filename}:{last.lineno}); mend the function, or leave the row out"
            ) from error
        score = float(found) if isinstance(found, numbers.Real) else -1  # true and false are numbers
        if 0 <= score <= 1:
            return score
        raise BadInputError(
            f"{self.option}: {self.name} returned {repr(found)[:LENGTH_SHOWN]} for {row.place}; allowed: True, False, "
            "or a number from 0 to 1"
        )


def load_scorer(name: str, option: str) -> Scorer:
    """Imports a function. Only for a name that the user has given, or allowed: importing a module runs its code.

    Args:
        name: `module:function`.
        option: the name of the option in errors.

    Raises:
        BadInputError: if there is no such module or function, or importing it fails.
    """
    try:
        function, fingerprint = _import_function(name)
    except BadInputError as problem:
        raise BadInputError(f"{option}: {problem}") from problem
    return Scorer(name, function, fingerprint, option)


@functools.cache  # as Python does: a file that changes later is not what runs
def _import_function(name: str) -> tuple[Callable[..., Any], str]:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module's code may do anything
        missing = isinstance(error, ModuleNotFoundError) and module_name.startswith(error.name or "?")
        raise BadInputError(
            f"no module {error.name!r} on Python's path; set PYTHONPATH to the folder that has it, or install it"
            if isinstance(error, ModuleNotFoundError) and missing
            else f"the module {module_name!r} cannot be imported: {type(error).__name__}: {first_line(error)}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise BadInputError(f"the module {module_name!r} has no function {attribute!r}; name one that it has")
    try:
        source = inspect.getsourcefile(inspect.unwrap(function))
        return function, hashlib.sha256(Path(source or "").read_bytes()).hexdigest()
    except (TypeError, OSError):
        raise BadInputError(
            f"{name!r} has no source file by which a run could say what scored it; write a function in Python"
        ) from None
