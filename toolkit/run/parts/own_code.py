"""The user's own code that a run imports: shown at the start, recorded in checkpoints, the same when a run resumes."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit import ranks
from toolkit.errors import BadInputError, OwnCodeError, did_you_mean
from toolkit.generation.sampling.reward import find_reward_model
from toolkit.model.beside_weights.base_files import BESIDE_ADAPTER, BaseFiles
from toolkit.paths import configuration_digest, file_name, fingerprint_of
from toolkit.recipe.recipe import EXTENSIONS, Recipe
from toolkit.run.stages.part import Loop, RunPart
from toolkit.run.stages.stages import Read
from toolkit.training.extension import Extension
from toolkit.training.loop_state import LoopState
from toolkit.training.step import Step
from toolkit.user_function import (
    as_number,
    changed_source,
    fenced,
    fingerprint_of_class,
    load_function,
    shown,
    while_training,
)


def identify_code(recipe: Recipe) -> dict[str, str]:
    """Returns a fingerprint of each function and reward model that the recipe names, by its field. Collective.

    Raises:
        BadInputError: if one cannot be imported, or is not a reward model.
    """
    named = recipe.own_code()
    judges = {reward.name: reward.model for reward in recipe.objective.rewards or [] if reward.model is not None}

    def identify() -> dict[str, str]:
        found = {field: load_function(name, field).fingerprint for field, name in named.items()}
        fields = {f"objective.rewards.{name}": model for name, model in judges.items()}
        return found | {field: _digest(find_reward_model(model, field)) for field, model in fields.items()}

    return ranks.on_first_rank(identify)


def _digest(folder: str) -> str:
    """Returns a digest of a reward model: its weights and settings, its tokenizer and its processor."""
    place = Path(folder)
    read = [fingerprint_of(place), configuration_digest(place), BaseFiles.read(place, BESIDE_ADAPTER).digests()]
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()


def read_of(field: str, digest: str) -> Read:
    """Returns what is compared of a function, a reward model or an extension. Only extensions may change."""
    if is_extension(field):
        changed = f"{field}: its source has changed since step {{step}}: SHA-256 {{before}}, and now {{now}}"
        return Read(field, digest, changed, unknown="", refuses=False)
    changed = changed_source("{before}", "{now}", field, "ran up to step {step}")
    # Where it failed it is not in the checkpoint, so that it can be mended.
    unknown = f"{field}: the checkpoint of step {{step}} does not say what it was; now SHA-256 {{now}}"
    return Read(field, digest, changed, unknown)


def is_extension(field: str) -> bool:
    """Returns whether a field of code names an extension, in the recipe or among the arguments of `finetune`."""
    return field.startswith((f"{EXTENSIONS}.", f"{GIVEN}."))


def code_fact(recipe: Recipe, code: dict[str, str]) -> str:
    """Describes the user's own code for the summary and the model card; empty if the run imports none."""
    named = {field: f" {file_name(name)}" for field, name in recipe.own_code().items()}
    told = [f"{field}{named.get(field, '')} (SHA-256 {source[:16]})" for field, source in code.items()]
    return "; ".join(told)


class OwnCode(RunPart):
    """Functions, reward models and extensions of the user's."""

    def before_rows(self) -> None:
        named = {field: name for field, name in self.recipe.own_code().items() if is_extension(field)}
        self._owned: list[Own] = []
        ranks.on_every_rank(lambda: self._owned.extend(load_extensions(named, self.given)), "load training.extensions")
        self._code = identify_code(self.recipe) | {own.field: own.fingerprint for own in self._owned}
        self.reads += [read_of(field, digest) for field, digest in self._code.items()]
        self.facts["own code"] = code_fact(self.recipe, self._code)
        if (resumed := self.opened.resumed) is None:
            return
        if gone := [name for name in resumed.named if is_extension(name) and name not in self._code]:
            self.opened.console.warn(
                f"{', '.join(gone)}: extended the run up to step {resumed.step}, and this start does not name it"
            )

    def extension(self, loop: Loop) -> Extension | None:
        return OwnExtensions(self._owned, loop.save) if self._owned else None


# ---- The user's own extensions: named in a recipe or given to `finetune`, checked, called inside a fence ----


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
        save: saves the state of the trainer before `ends_run` ends the run.
    """

    def __init__(
        self,
        owned: Sequence[Own],
        save: Callable[[LoopState], Any] = lambda trainer: None,
    ) -> None:
        self._owned = owned
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

    def close(self) -> None:
        self._call_all("close")
