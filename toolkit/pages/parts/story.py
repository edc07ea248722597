"""The record of a run: its starts, what it warned of, what limits its figures, and which step is its best one.

Checkpoints have it, so that it goes on where the run does. Pages and commands read `run.json` in the run's folder.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import counted
from toolkit.paths import atomic_write, parse_json, read_foreign

RUN_JSON = "run.json"


@dataclass
class Start:
    """A start of a run.

    Attributes:
        step: the step after which it began.
        ranks: the number of its ranks.
        strategy: how the model was sharded.
        versions: of the packages, and the machine.
        changed: settings that differ from those of the start before: key, old and new value as text.
        seconds: its duration, up to the last checkpoint if another start followed.
    """

    step: int
    ranks: int
    strategy: str
    versions: dict[str, str]
    changed: list[list[str]] = field(default_factory=list)
    seconds: float = 0.0

    def describe(self) -> str:
        changes = ", ".join(f"{key} {old} -> {new}" for key, old, new in self.changed)
        return f"from step {self.step:,} on {counted(self.ranks, 'rank')}" + (f" with {changes}" if changes else "")


@dataclass
class Story:
    """What a run was.

    Attributes:
        starts: in order; the last one is under way.
        warnings: text -> how often, in order. The step that a text begins with is that of its first time.
        limits: what limits the figures of held-out rows, a sentence each.
        reads: a digest of each thing that was trained from, by its name.
        exported: which step's weights the run left, in words, if they are not the last ones.
    """

    starts: list[Start] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)
    reads: dict[str, str | None] = field(default_factory=dict)
    exported: str = ""

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    def warn(self, text: str) -> None:
        """Notes a warning; one that only names another step counts as the same."""
        same = re.sub(r"step [\d,]+", "", text)
        known = next((one for one in self.warnings if re.sub(r"step [\d,]+", "", one) == same), text)
        self.warnings[known] = self.warnings.get(known, 0) + 1

    def begin(self, start: Start, before: Mapping[str, Any] | None) -> None:
        """Adds this start to those of the checkpoint that it resumes, whose record is `before`."""
        earlier = story_of(before or {})
        self.starts = [*earlier.starts, start]
        self.warnings = {**earlier.warnings, **self.warnings}

    @property
    def seconds(self) -> float:
        """The duration of all starts."""
        return sum(start.seconds for start in self.starts)

    def values(self) -> dict[str, Any]:
        """Returns it as JSON values, with this start's duration so far."""
        if self.starts:
            self.starts[-1].seconds = time.monotonic() - self._began
        return asdict(self)

    def write(self, run: Path) -> None:
        """Writes `run.json`. Raises OSError if it cannot."""
        atomic_write(run / RUN_JSON, json.dumps(self.values(), indent=1) + "\n")

    def told(self, doubts: Iterable[str] = ()) -> list[str]:
        """Returns doubts about the losses, then the warnings, with their number if there were several; each once."""
        warnings = [text if number == 1 else f"{text} ({number} times)" for text, number in self.warnings.items()]
        return list(dict.fromkeys([*doubts, *warnings]))

    def facts(self) -> dict[str, str]:
        """Returns lines for the report and the card: name -> sentence."""
        parts = f" in {len(self.starts)} starts" if len(self.starts) > 1 else ""
        facts = {"duration": f"{self.seconds:.0f} s{parts}"}
        if len(self.starts) > 1 or any(start.changed for start in self.starts):
            facts["starts"] = "; ".join(start.describe() for start in self.starts)
        if self.exported:
            facts["exported"] = self.exported
        return facts


def story_of(values: Mapping[str, Any]) -> Story:
    """Returns the record of JSON values that `Story.values` returned, or an empty one of other values."""
    try:
        starts = [Start(**start) for start in values.get("starts", [])]
        warnings, limits = dict(values.get("warnings", {})), list(values.get("limits", []))
        return Story(starts, warnings, limits, exported=str(values.get("exported", "")))
    except (TypeError, ValueError, AttributeError):
        return Story()


def read_story(run: Path) -> Story:
    """Reads the record of a run's folder; an empty one if there is none that can be read."""
    try:
        found = parse_json(read_foreign(run / RUN_JSON))
    except (OSError, ValueError):
        return Story()
    return story_of(found) if isinstance(found, dict) else Story()


def limits_of(report: Mapping[str, Any]) -> list[str]:
    """Returns what limits the figures of held-out rows, from a data report."""
    split = report.get("validation") or {}
    also = split.get("also_in_train")
    return [f"{also:,} of {split['kept']:,} held-out rows are also in train"] if also else []


def with_limits(text: str, limits: Sequence[str]) -> str:
    """Returns a figure with what limits it."""
    return f"{text} (but {'; '.join(limits)})" if limits and text else text
