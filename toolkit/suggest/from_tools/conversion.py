"""Applies a tool's table to its configuration, and writes the recipe with a comment for each key."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from toolkit.recipe.recipe import Recipe
from toolkit.suggest.draft import COLUMNS, Draft

Rule = Callable[["Conversion", str, Any], None]
"""Takes a key's value into a recipe, or says why not."""

Table = Mapping[str, Rule]


class Conversion:
    """A configuration on its way to a recipe.

    Attributes:
        tool: the tool's name.
        given: the configuration.
        draft: the recipe so far; its reasons name the tool's keys.
        not_needed: key -> why the recipe needs nothing for it.
        no_counterpart: key -> why the recipe has nothing for it.
    """

    def __init__(self, tool: str, given: Mapping[str, Any]) -> None:
        self.tool, self.given = tool, given
        self.draft = Draft()
        self.not_needed: dict[str, str] = {}
        self.no_counterpart: dict[str, str] = {}
        self._is_default = False

    def take(self, key: str, value: Any, name: str, note: str = "") -> None:
        """Sets a field of the recipe from the key `name`. A default does not replace what another key has set."""
        if self._is_default and key in self.draft.values:
            return
        words = f"{name}: {self.given[name]}" if is_scalar(self.given.get(name)) else name
        source = f"The default of {name} in {self.tool}." if self._is_default else f"From {words}."
        self.draft.set(key, value, f"{source} {note}".strip())

    def apply(self, table: Table, defaults: Mapping[str, Any]) -> None:
        """Applies the table to every key, and to the tool's defaults of keys that are not given."""
        for name, value in self.given.items():
            if value is None or value in ("", [], {}):
                self.not_needed[name] = "unset"
            elif name in table:
                table[name](self, name, value)
            else:
                self.no_counterpart[name] = "the table of `toolkit init --from` does not have it"
        self._is_default = True
        for name, value in defaults.items():
            if self.given.get(name) is None:
                table[name](self, name, value)
        self._is_default = False
        self._complete_pairs()
        self._drop_idle()

    def _complete_pairs(self) -> None:
        """Doubles the length of pairs, whose completions these tools count apart, and sets their defaults of SimPO."""
        if self.draft.get("objective.kind") in ("preference", "reward"):
            length, reason = self.draft.get("data.max_length"), self.draft.reasons.get("data.max_length")
            if isinstance(length, int):
                self.draft.set(
                    "data.max_length", 2 * length, f"{reason} Both completions of a pair count together here."
                )
        for key, value in (("beta", 0.1), ("gamma", 0.5)) if self.draft.get("objective.loss") == "simpo" else ():
            if self.draft.get(f"objective.{key}") is None:
                self.draft.set(f"objective.{key}", value, f"The default of simpo in {self.tool}.")

    def _drop_idle(self) -> None:
        """Drops settings that a recipe refuses because they have no effect in it."""
        held_out = {"data.validation", "data.validation_fraction"} & self.draft.values.keys()
        for key, is_used, why in (
            ("training.eval_every_steps", held_out, "there are no held-out rows; set data.validation_fraction"),
            ("training.patience", held_out, "there are no held-out rows; set data.validation_fraction"),
            (
                "checkpoint.keep_best",
                held_out and "checkpoint.every_steps" in self.draft.values,
                "set it with checkpoint.every_steps",
            ),
        ):
            if not is_used and (reason := self.draft.reasons.get(key)):
                self.draft.drop(key)
                self.no_counterpart[reason.split()[1].rstrip(":.")] = why

    def text(self, origin: str) -> str:
        """Returns the recipe as YAML. Comments at its top list the keys that it does not have."""
        head = [f"Written by `toolkit init --from {origin}`; `toolkit validate` checks it."]
        for title, keys in (("Not needed here:", self.not_needed), ("No counterpart:", self.no_counterpart)):
            head += [title] if keys else []
            for name, why in keys.items():
                head += textwrap.wrap(f"{name}: {why}", COLUMNS, initial_indent="  ", subsequent_indent="    ")
        return self.draft.text(head)

    def recipe(self) -> Recipe:
        """Returns the checked recipe. Raises RecipeError."""
        return self.draft.recipe()


def is_scalar(value: Any) -> bool:
    """Tells whether a value is short enough for a comment."""
    return isinstance(value, str | int | float) and len(str(value)) < 40


def to(key: str, note: str = "", change: Callable[[Any], Any] = lambda value: value) -> Rule:
    """Takes the value, after `change`, as the recipe's field `key`."""
    return lambda conversion, name, value: conversion.take(key, change(value), name, note)


def words(key: str, known: Mapping[Any, Any], otherwise: str) -> Rule:
    """Takes one of the known values in the recipe's word. Any other one has no counterpart, for the reason given."""

    def rule(conversion: Conversion, name: str, value: Any) -> None:
        if value in known:
            conversion.take(key, known[value], name)
        else:
            conversion.no_counterpart[name] = f"{value!r}: {otherwise}"

    return rule


def if_true(key: str, value: Any, note: str = "", otherwise: str = "off, as by default here") -> Rule:
    """Sets a field to `value` where the key is true."""

    def rule(conversion: Conversion, name: str, is_set: Any) -> None:
        if is_set in (True, "true", "True"):
            conversion.take(key, value, name, note)
        else:
            conversion.not_needed[name] = otherwise

    return rule


def not_needed(why: str) -> Rule:
    """Notes that the recipe needs nothing for the key."""

    def rule(conversion: Conversion, name: str, value: Any) -> None:
        conversion.not_needed[name] = why

    return rule


def no_counterpart(why: str) -> Rule:
    """Notes that the recipe has nothing for the key."""

    def rule(conversion: Conversion, name: str, value: Any) -> None:
        conversion.no_counterpart[name] = why

    return rule


def number(value: Any) -> Any:
    """Returns a number that YAML has read as text, such as `1e-4`."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def steps(key: str) -> Rule:
    """Takes a number of steps. A share of the run has no counterpart."""

    def rule(conversion: Conversion, name: str, value: Any) -> None:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            conversion.take(key, value, name)
        else:
            conversion.no_counterpart[name] = f"{value!r}: {key} counts steps"

    return rule


def fraction(conversion: Conversion, name: str, value: Any) -> None:
    """Takes the share of the rows that is held out. A number of rows has no counterpart."""
    share = number(value)
    if not share:
        conversion.not_needed[name] = "none is held out, as by default here"
    elif share < 1:
        conversion.take("data.validation_fraction", share, name)
    else:
        conversion.no_counterpart[name] = f"{value}: data.validation_fraction takes a share of the rows"


def share_or_steps(conversion: Conversion, name: str, value: Any) -> None:
    """Takes the length of a warm-up: a share below 1, or steps."""
    length = number(value)
    if length:
        conversion.take("schedule.warmup_fraction" if length < 1 else "schedule.warmup_steps", length, name)
    else:
        conversion.not_needed[name] = "no warm-up, as by default here"
