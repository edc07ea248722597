"""Runs of recipes on ranks, one after another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.ranks import meet
from support.tiny import with_sections
from toolkit import Recipe, finetune
from toolkit.errors import ToolkitError


def finetuned(values: dict[str, Any], sections: dict[str, dict[str, Any]] | None = None) -> Any:
    """The result of a run, once the ranks have met.

    Args:
        sections: fields that are added to the recipe's values, or replace them.
    """
    meet()
    return finetune(Recipe.from_mapping(with_sections(values, sections or {})))


def outcome(values: dict[str, Any], sections: dict[str, dict[str, Any]] | None = None) -> Any:
    """The result of a run; or what its error says, and the exit code."""
    try:
        return finetuned(values, sections)
    except ToolkitError as error:
        return str(error), error.exit_code


def losses_of(records: list[dict[str, Any]], split: str = "train") -> list[float]:
    """Those of a run's steps, or of its evaluations (`eval`)."""
    return [record["loss"] for record in records if record["split"] == split]


def records_of(run: Path) -> list[dict[str, Any]]:
    """What a run's folder has of its steps and evaluations."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
