"""The user's own extensions: named in a recipe or given to `finetune`, checked before a run, called inside a fence."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit import ranks
from toolkit.errors import BadInputError, OwnCodeError, did_you_mean
from toolkit.training.extension import Extension
from toolkit.user_function import as_number, fenced, fingerprint_of_class, load_function, shown, while_training

if TYPE_CHECKING:
    from toolkit.training.loop_state import LoopState
    from toolkit.training.step import Step

CALLS = (
    "before_training",
    "before_step",
    "rate_factor",
    "reason_to_stop",
    "wants_save",
    "after_update",
    "after_step",
    "at_evaluation",
    "after_evaluation",
    "ends_run",
    "state",
    "resume",
    "close",
)
"""The calls that stay as they are, see docs/own_code.md. The rest of `Extension` is the toolkit's own."""

GIVEN = "extensions"
"""The argument of `finetune`."""

MEND = "correct the extension"


@dataclass(frozen=True)
class Own:
    """An extension of the user's.

    Attributes:
        field: where it is named, such as `training.extensions.Stopper`, for errors and checkpoints.
        extension: the object.
        fingerprint: SHA-256 of its source, or `no source` if it has none, as one that is typed at a prompt.
    """

    field: str
    extension: Extension
    fingerprint: str

    def overrides(self, call: str) -> bool:
        return getattr(type(self.extension), call) is not getattr(Extension, call)

    def call(self, call: str, *arguments: Any) -> Any:
        """Returns what a call of the extension returns; what it raises becomes an error that names it."""
        action = functools.partial(getattr(self.extension, call), *arguments)
        with while_training():
            return fenced(action, f"{self.field}: {call} failed", MEND, self.field)

    def wrong(self, call: str, found: Any, needed: str) -> OwnCodeError:
        return OwnCodeError(f"{self.field}: {call} returned {shown(found)}; needs {needed}")


def load_extensions(named: Mapping[str, str], given: Sequence[Extension]) -> list[Own]:
    """Makes the extensions that a recipe names, and checks them with those that were given to `finetune`.

    Args:
        named: field -> name of a class, or of a function that returns an extension.

    Raises:
        BadInputError: if one is not an extension, overrides nothing that is called, or takes other arguments.
    """
    found = []
    for field, name in named.items():
        function = load_function(name, field)
        made = fenced(function.function, f"{field}: {name}() failed", "it is given no arguments; correct it", field)
        found.append(Own(field, _require_extension(made, f"{field}: {name}"), function.fingerprint))
    for extension in given:
        field = f"{GIVEN}.{type(extension).__name__}"
        source = fingerprint_of_class(type(_require_extension(extension, GIVEN)))
        found.append(Own(field, extension, source or "no source"))
    for own in found:
        _require_calls(own)
    if twice := next((own.field for own in found if [other.field for other in found].count(own.field) > 1), None):
        raise BadInputError(f"{twice}: there are two of this name, and checkpoints could not tell them apart; keep one")
    return found


def _require_extension(made: Any, what: str) -> Extension:
    if isinstance(made, Extension):
        return made
    hint = "; call the class" if inspect.isclass(made) and issubclass(made, Extension) else ""
    raise BadInputError(f"{what} is {shown(made)}, and needs to be a toolkit.Extension{hint}")


def _require_calls(own: Own) -> None:
    """Raises BadInputError for calls that are never made, or cannot be."""
    theirs = [name for name in vars(Extension) if not name.startswith("_")]
    if private := [name for name in theirs if name not in CALLS and own.overrides(name)]:
        raise BadInputError(f"{own.field}: {private[0]} is the toolkit's own and may change; use {', '.join(CALLS)}")
    overridden = [name for name in CALLS if own.overrides(name)]
    if not overridden:
        methods = [name for name, _ in inspect.getmembers(type(own.extension), inspect.isfunction)]
        hints = (did_you_mean(name, CALLS) for name in methods if not hasattr(Extension, name))
        hint = next(filter(None, hints), "")
        raise BadInputError(
            f"{own.field}: it overrides no call of the loop, so it has no effect{hint}; write one of {', '.join(CALLS)}"
        )
    for name in overridden:
        arguments = [None] * len(inspect.signature(getattr(Extension, name)).parameters)
        try:
            inspect.signature(getattr(type(own.extension), name)).bind(*arguments)
        except TypeError as error:
            wanted = ", ".join(inspect.signature(getattr(Extension, name)).parameters)
            raise BadInputError(f"{own.field}: {name} takes other arguments: {error}; write {name}({wanted})") from None


class OwnExtensions(Extension):
    """Calls all extensions of the user's, in order.

    What decides about the run is what rank 0's objects return, or any rank's (`reason_to_stop`, `wants_save`), so that
    ranks cannot part ways. Exceptions, calls of `sys.exit` and values of a wrong type become errors.

    Args:
        owned: the extensions.
        warn: shows a warning.
        save: saves the state of the trainer before `ends_run` ends the run.
    """

    def __init__(
        self,
        owned: Sequence[Own],
        warn: Callable[[str], None] = print,
        save: Callable[[LoopState], Any] = lambda trainer: None,
    ) -> None:
        self._owned = owned
        self._warn = warn
        self._save = save

    def _of(self, call: str) -> Iterable[Own]:
        return (own for own in self._owned if own.overrides(call))

    def _call_all(self, call: str, *arguments: Any) -> list[tuple[Own, Any]]:
        """Returns what each extension returns, whatever the first one does."""
        return [(own, own.call(call, *arguments)) for own in self._of(call)]

    def before_training(self, trainer: LoopState) -> None:
        self._call_all("before_training", trainer)

    def before_step(self, step: int) -> None:
        self._call_all("before_step", step)

    def rate_factor(self, step: int) -> float:
        factor = 1.0
        for own, found in self._call_all("rate_factor", step):
            number = as_number(found)
            if number is None or not 0 <= number < math.inf:
                raise own.wrong("rate_factor", found, "a number from 0 on, by which the learning rate is multiplied")
            factor *= number
        return factor

    def reason_to_stop(self) -> str | None:
        for own in self._of("reason_to_stop"):
            found = own.call("reason_to_stop")
            if found is not None and not isinstance(found, str):
                raise own.wrong("reason_to_stop", found, "the reason as text, or None to go on")
            if found is not None:
                return f"{own.field}: {found}"
        return None

    def wants_save(self) -> bool:
        return self._any_true("wants_save")

    def _any_true(self, call: str, *arguments: Any) -> bool:
        found = self._call_all(call, *arguments)
        for own, value in found:
            if not isinstance(value, bool):
                raise own.wrong(call, value, "True or False")
        return any(value for _, value in found)

    def after_update(self, step: int, skipped: bool) -> dict[str, Any]:
        return self._figures("after_update", step, skipped)

    def at_evaluation(self, trainer: LoopState) -> dict[str, Any]:
        return self._figures("at_evaluation", trainer)

    def _figures(self, call: str, *arguments: Any) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        for own, found in self._call_all(call, *arguments):
            items = dict.items(found if isinstance(found, dict) else {"": None})  # not those of a class of the user's
            known: dict[str, Any] = {name: as_number(value) for name, value in items}
            if not all(isinstance(name, str) for name in known) or None in known.values():
                raise own.wrong(call, found, "a dict of names and numbers, or {}")
            if twice := sorted(figures.keys() & known.keys()):
                raise own.wrong(call, found, f"names that no other extension has, and {twice[0]!r} is one's")
            figures |= known
        return figures

    def after_step(self, trainer: LoopState, step: Step) -> None:
        self._call_all("after_step", trainer, step)

    def after_evaluation(self, trainer: LoopState, record: dict[str, Any]) -> None:
        for own in self._of("after_evaluation"):
            own.call("after_evaluation", trainer, dict(record))

    def ends_run(self, trainer: LoopState) -> bool:
        if not list(self._of("ends_run")) or not ranks.gather_objects(self._any_true("ends_run", trainer))[0]:
            return False
        self._save(trainer)
        return True

    def state(self) -> dict[str, Any]:
        states = {}
        for own, found in self._call_all("state"):
            try:
                states[own.field] = json.loads(json.dumps(found, allow_nan=False))
            except (TypeError, ValueError):
                raise own.wrong("state", found, "what JSON can hold: dicts, lists, texts and numbers") from None
        return {"extensions": states}

    def resume(self, state: Mapping[str, Any]) -> None:
        before: Mapping[str, Any] = state["extensions"]
        for own in self._of("resume"):
            if own.field in before:
                own.call("resume", before[own.field])
        gone = sorted(before.keys() - {own.field for own in self._of("resume")})
        if gone:
            self._warn(f"the checkpoint has the state of {', '.join(gone)}, which nothing takes up now")

    def close(self) -> None:
        self._call_all("close")
