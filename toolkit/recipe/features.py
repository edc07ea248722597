"""The features that settings ask for; the table of combinations is written in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

from toolkit.recipe.objectives.spec import ObjectiveSpec
from toolkit.recipe.schema import Sections, ShardingSection, TrainingSection


@dataclass(frozen=True)
class Surroundings:
    """What else decides whether settings can go together. A default means: not so, or not known yet.

    Attributes:
        device: torch's name of the devices' type.
        is_quantised: whether the base's files hold frozen layers in few bits.
        keeps_float32: the first trained parameter that stays in float32 next to 16-bit compute, or None.
        sums_in_autograd: whether FSDP2 sums gradients of several types itself, as from torch 2.15 on.
        own_loop: whether the backend runs in the user's own loop, without a recipe.
        has_images: whether rows have images, and the model sees them.
    """

    device: str | None = None
    is_quantised: bool = False
    keeps_float32: str | None = None
    sums_in_autograd: bool = False
    own_loop: bool = False
    has_images: bool = False


NOWHERE = Surroundings()


def settings_of_backend(precision: Any = None, compiled: bool = False, **sharding: Any) -> Sections:
    """Returns the settings of a loop of the user's own, which has no other sections."""
    section = ShardingSection.model_construct(**sharding)
    training = cast(Any, TrainingSection).model_construct(mixed_precision=precision, compile=compiled)
    return cast(Sections, cast(Any, Sections).model_construct(sharding=section, training=training))


class Key:
    """The path of a field: `KEYS.data.packing` is `data.packing`."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __getattr__(self, name: str) -> Key:
        return Key(*self._names, name)

    def __str__(self) -> str:
        return ".".join(self._names)

    def __call__(self, settings: Sections) -> Any:
        """Returns the field's value."""
        return reduce(getattr, self._names, cast(Any, settings))

    def is_set(self, settings: Sections) -> bool:
        """Tells whether the field has another value than its default."""
        section = reduce(getattr, self._names[:-1], cast(Any, settings))
        return bool(self(settings) != type(section).model_fields[self._names[-1]].default)

    def told(self, value: Any) -> str:
        """Returns the field with a value, as errors name it."""
        return str(self) if value is True else f"{self} {({None: 'null', False: 'false'}).get(value, value)}"


KEYS = cast(Sections, Key())
"""Names fields by attributes, which the type checker looks up."""

Predicate = Callable[[Sections, Surroundings], bool]


@dataclass(frozen=True)
class Feature:
    """A feature that settings can ask for.

    Attributes:
        name: its name in docs.
        is_asked: tells whether settings ask for it.
        told: its name in errors; None: `name`.
    """

    name: str
    is_asked: Predicate
    told: Callable[[Sections, Surroundings], str] | None = None

    def __and__(self, other: Feature) -> Feature:
        """Returns the feature of settings that ask for both; errors name the other one."""
        return Feature(
            f"{self.name} and {other.name}",
            lambda settings, around: self.is_asked(settings, around) and other.is_asked(settings, around),
            other.named,
        )

    def named(self, settings: Sections, around: Surroundings) -> str:
        """Returns the name of this feature in errors."""
        return self.told(settings, around) if self.told is not None else self.name


def on(*keys: Any) -> Feature:
    """Returns the feature of fields, any of which asks for it if it is set; errors name the first."""
    return Feature(
        " or ".join(map(str, keys)),
        lambda settings, _: any(key.is_set(settings) for key in keys),
        lambda settings, _: next(str(key) for key in keys if key.is_set(settings)),
    )


def without(*keys: Any) -> Feature:
    """Returns the feature of fields of which none is set."""
    name = f"without {' or '.join(map(str, keys))}"
    return Feature(name, lambda settings, _: not any(key.is_set(settings) for key in keys))


def equal(key: Any, *values: Any) -> Feature:
    """Returns the feature of a field that has one of some values."""
    name = " or ".join([key.told(values[0]), *map(str, values[1:])])
    return Feature(name, lambda settings, _: key(settings) in values, lambda settings, _: key.told(key(settings)))


def other(key: Any, *values: Any) -> Feature:
    """Returns the feature of a field that has none of some values."""
    name = f"{key} but {' and '.join(map(str, values))}"
    return Feature(name, lambda settings, _: key(settings) not in values, lambda settings, _: key.told(key(settings)))


def rest(section: Any, switch: str) -> Feature:
    """Returns the feature of a section of which another field than its switch is written; errors name the first."""
    return Feature(
        f"other fields of {section}",
        lambda settings, _: bool(section(settings).model_fields_set - {switch}),
        lambda settings, _: f"{section}.{min(section(settings).model_fields_set - {switch})}",
    )


def objective(name: str, is_so: Callable[[ObjectiveSpec], bool]) -> Feature:
    """Returns the feature of some objectives; errors name the one that is set."""
    kind = Key("objective", "kind")
    return Feature(
        name, lambda settings, _: is_so(settings.objective.spec), lambda settings, _: kind.told(kind(settings))
    )
