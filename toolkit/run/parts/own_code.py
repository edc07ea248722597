"""The user's own code that a run imports: shown at the start, recorded in checkpoints, the same when a run resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from toolkit import ranks
from toolkit.checkpoint.manifest import Manifest
from toolkit.generation.sampling.reward import find_reward_model
from toolkit.paths import configuration_digest, file_name, fingerprint_of
from toolkit.recipe.recipe import EXTENSIONS, Recipe
from toolkit.run.parts.part import Loop, RunPart
from toolkit.run.stages.stages import PreparedRun
from toolkit.training.extension import Extension
from toolkit.training.extensions.own import GIVEN, Own, OwnExtensions, load_extensions
from toolkit.user_function import load_function, require_same_source


def identify_code(recipe: Recipe) -> dict[str, str]:
    """Returns a fingerprint of each function and reward model that the recipe names, by its field. Collective.

    Raises:
        BadInputError: if one cannot be imported, or is no reward model.
    """
    named = recipe.own_code()
    judges = {reward.name: reward.model for reward in recipe.objective.rewards or [] if reward.model is not None}

    def identify() -> dict[str, str]:
        found = {field: load_function(name, field).fingerprint for field, name in named.items()}
        fields = {f"objective.rewards.{name}": model for name, model in judges.items()}
        return found | {field: _digest(find_reward_model(model, field)) for field, model in fields.items()}

    return ranks.on_first_rank(identify)


def _digest(folder: str) -> str:
    """Returns a digest of a reward model: its weights, its settings, and the tokenizer that reads for it."""
    files = [Path(folder) / name for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")]
    read = [f"{fingerprint_of(Path(folder))} {configuration_digest(Path(folder))}".encode()]
    return hashlib.sha256(b"".join(read + [file.read_bytes() for file in files if file.is_file()])).hexdigest()


def require_same_code(code: dict[str, str], resumed: Manifest | None, warn: Callable[[str], None]) -> None:
    """Checks that a resumed run goes on with the sources that it began with. Only extensions may change.

    Raises:
        BadInputError: if another one has changed; it names the field.
    """
    if resumed is None:
        return
    for field, fingerprint in code.items():
        before = resumed.named.get(field, fingerprint)
        if field not in resumed.named and not is_extension(field):  # where it failed, so that it can be mended
            warn(f"{field}: the checkpoint of step {resumed.step} does not say what it was; now SHA-256 {fingerprint}")
        if not is_extension(field):
            require_same_source(before, fingerprint, field, f"ran up to step {resumed.step}")
        elif before != fingerprint:
            warn(f"{field}: its source has changed since step {resumed.step}: SHA-256 {before}, and now {fingerprint}")
    gone = [field for field in resumed.named if is_extension(field) and field not in code]
    if gone:
        warn(f"{', '.join(gone)}: extended the run up to step {resumed.step}, and this start does not name it")


def is_extension(field: str) -> bool:
    """Returns whether a field of code names an extension, in the recipe or among the arguments of `finetune`."""
    return field.startswith((f"{EXTENSIONS}.", f"{GIVEN}."))


def code_fact(recipe: Recipe, code: dict[str, str]) -> str | None:
    """Describes the user's own code for the summary and the model card, or returns None if the run imports none."""
    named = {field: f" {file_name(name)}" for field, name in recipe.own_code().items()}
    told = [f"{field}{named.get(field, '')} (SHA-256 {source[:16]})" for field, source in code.items()]
    return "; ".join(told) or None


class OwnCode(RunPart):
    """Functions, reward models and extensions of the user's."""

    def before_rows(self, resumed: Manifest | None) -> None:
        named = {field: name for field, name in self.recipe.own_code().items() if is_extension(field)}
        self._owned: list[Own] = []
        ranks.on_every_rank(lambda: self._owned.extend(load_extensions(named, self.given)), "load training.extensions")
        self._reads = identify_code(self.recipe) | {own.field: own.fingerprint for own in self._owned}
        require_same_code(self._reads, resumed, self.opened.console.warn)

    def reads(self) -> Mapping[str, str]:
        return self._reads

    def facts(self, run: PreparedRun) -> Mapping[str, str]:
        said = code_fact(self.recipe, self._reads)
        return {} if said is None else {"own code": said}

    def extension(self, loop: Loop) -> Extension | None:
        return OwnExtensions(self._owned, loop.metrics.warn, loop.save) if self._owned else None
