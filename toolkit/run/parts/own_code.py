"""The user's own code that a run imports: shown at the start, recorded in checkpoints, the same when a run resumes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from toolkit import ranks
from toolkit.generation.sampling.reward import find_reward_model
from toolkit.model.beside_weights.base_files import BESIDE_ADAPTER, BaseFiles
from toolkit.paths import configuration_digest, file_name, fingerprint_of
from toolkit.recipe.recipe import EXTENSIONS, Recipe
from toolkit.run.stages.part import Loop, RunPart
from toolkit.run.stages.stages import Read
from toolkit.training.extension import Extension
from toolkit.training.extensions.own import GIVEN, Own, OwnExtensions, load_extensions
from toolkit.user_function import changed_source, load_function


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
        return OwnExtensions(self._owned, loop.metrics.warn, loop.save) if self._owned else None
