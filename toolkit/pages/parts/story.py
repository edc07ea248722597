"""The record of a run: its starts, what it warned of, what limits its figures, and which step is its best one.

Checkpoints have it, so that it goes on where the run does. Pages and commands read `run.json` in the run's folder.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import counted
from toolkit.paths import ORIGIN, atomic_write, parse_json, read_foreign
from toolkit.recipe.figures import OF_STEPS, steering

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
        outcome: its figures so far, each from its first to its last value; `headline` writes it.
        doubts: warnings about the losses or the rewards of a run that is done.
        best: `step`, `by` (as in `training.best_by`), `value` and `checkpoint` (its folder or null) of the best step.
        last: `step` and `value` of the last step.
        exported: `step` and `value` of the weights that the run left. Each of the three is empty if it isn't known.
    """

    starts: list[Start] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)
    reads: dict[str, str | None] = field(default_factory=dict)
    outcome: str = ""
    doubts: list[str] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    exported: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._of_rows: list[str] = []

    def warn(self, text: str) -> None:
        """Notes a warning; one that only names another step counts as the same."""
        same = re.sub(r"step [\d,]+", "", text)
        known = next((one for one in self.warnings if re.sub(r"step [\d,]+", "", one) == same), text)
        self.warnings[known] = self.warnings.get(known, 0) + 1

    def of_rows(self, report: Mapping[str, Any]) -> None:
        """Takes limits and warnings from a data report, in place of those of an earlier report of this start."""
        split = report.get("validation") or {}
        also = split.get("also_in_train")
        self.limits = [f"{also:,} of {split['kept']:,} held-out rows are also in train"] if also else []
        self.warnings = {text: count for text, count in self.warnings.items() if text not in self._of_rows}
        self._of_rows = report["warnings"]
        self.warnings |= dict.fromkeys(self._of_rows, 1)

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
        atomic_write(run / RUN_JSON, json.dumps(asdict(self), indent=1) + "\n")

    def told(self) -> list[str]:
        """Returns doubts about the losses, then the warnings, with their number if there were several; each once."""
        warnings = [text if number == 1 else f"{text} ({number} times)" for text, number in self.warnings.items()]
        return list(dict.fromkeys([*self.doubts, *warnings]))

    def limited(self, text: str) -> str:
        """Returns figures of held-out rows with what limits them."""
        return with_limits(text, self.limits)

    def facts(self) -> dict[str, str]:
        """Returns lines for the report and the card: name -> sentence."""
        parts = f" in {len(self.starts)} starts" if len(self.starts) > 1 else ""
        facts = {"duration": f"{self.seconds:.0f} s{parts}"}
        if len(self.starts) > 1 or any(start.changed for start in self.starts):
            facts["starts"] = "; ".join(start.describe() for start in self.starts)
        return facts | self.weights()

    def weights(self) -> dict[str, str]:
        """Says which step's weights were exported and which are best, in as far as they are not the last ones."""
        figure, last, told = steering(self.best.get("by", "loss")), self.last, dict[str, str]()
        since = " since the save before" if figure.field in {one.field for one in OF_STEPS} else ""  # their mean
        for name, found in (("exported", self.exported), ("best", self.best)):
            value, of_last = (
                "not known" if x.get("value") is None else figure.in_short(x["value"]) for x in (found, last)
            )
            # A best value that reads like the last one is not worth a line.
            if found and found["step"] != last["step"] and (name == "exported" or value != of_last):
                where = f"step {found['step']:,} of {last['step']:,}"
                told[name] = self.limited(f"{where}, whose {figure.name}{since} is {value}; the last is {of_last}")
        return {name: text for name, text in told.items() if name == "exported" or text != told.get("exported")}


def story_of(values: Mapping[str, Any]) -> Story:
    """Returns the record of JSON values that `Story.values` returned, or an empty one of other values."""
    empty: Any = vars(Story())
    known = {name: value for name, value in values.items() if isinstance(value, type(empty.get(name)))}
    try:
        story = Story(**{**known, "starts": [Start(**start) for start in known.get("starts", [])]})
        _ = story.facts(), story.told()  # what cannot be told is not a record
    except (TypeError, ValueError, AttributeError, KeyError):
        return Story()
    return story


def read_story(run: Path) -> Story:
    """Reads the record of a run's folder, or of an export's; an empty one if there is none that can be read."""
    try:
        found = parse_json(read_foreign(run / (RUN_JSON if (run / RUN_JSON).is_file() else ORIGIN)))
    except (OSError, ValueError):
        return Story()
    return story_of(found) if isinstance(found, dict) else Story()


def with_limits(text: str, limits: Sequence[str]) -> str:
    """Returns a figure with what limits it."""
    return f"{text} (but {'; '.join(limits)})" if limits and text else text
