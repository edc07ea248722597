"""Wrong fields, values and overrides of a recipe: `toolkit validate` refuses each with one clear error.

A field has one value outside each of its bounds and one for each error of ours. What pydantic makes of wrong types is
not tested for each field.
"""

from __future__ import annotations

from pathlib import Path

from support.cases import cases
from support.refusals import Outcome, toolkit, unclear

TABLES = cases(__file__)
REFUSED = TABLES["REFUSED"].splitlines()
"""A field of the quickstart, and values of which each is refused; the error names the field."""

OVERRIDES = TABLES["OVERRIDES"]
"""What stands for an override -> what the error names."""

FILES: dict[str, tuple[str, str]] = TABLES["FILES"]
"""What a recipe's file holds -> what the error names."""


def test_refused_values() -> None:
    fields = [line.partition(": ") for line in REFUSED]
    given = [(f"{field}={value}", field) for field, _, values in fields for value in values.split(" | ")]
    assert unclear((override, toolkit("validate", "quickstart", override), field) for override, field in given) == []


def test_refused_overrides() -> None:
    validate = ("validate", "quickstart", "training.seed=1", "--")
    assert unclear((override, toolkit(*validate, override), named) for override, named in OVERRIDES.items()) == []


def test_refused_files(tmp_path: Path) -> None:
    def outcome(content: str) -> Outcome:
        (tmp_path / "recipe.yaml").write_bytes(content.replace("{deep}", "[" * 2000).encode("latin-1"))
        return toolkit("validate", str(tmp_path / "recipe.yaml"))

    assert unclear((name, outcome(content), named) for name, (content, named) in FILES.items()) == []
