"""A part of a run: what a feature adds to it, as one class. The order of parts is in `order.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.session import RunCheckpoints
from toolkit.run.stages.stages import MetaModel, OpenedRun, PreparedRun
from toolkit.training.extension import Extension
from toolkit.training.extensions.heartbeat import Heartbeat
from toolkit.training.loop_state import LoopState, Windows
from toolkit.training.metrics import Metrics


@dataclass(frozen=True)
class Loop:
    """A loop that is about to begin, for the parts that hang on it."""

    run: PreparedRun
    metrics: Metrics
    heartbeat: Heartbeat
    checkpoints: RunCheckpoints

    def save(self, trainer: LoopState) -> None:
        """Saves the state, before an extension ends the run."""
        self.checkpoints.save(trainer, wait=True)


def reads_of(parts: Sequence[RunPart]) -> dict[str, str]:
    """Returns a digest of all that the parts of a run read of the user's, by its field."""
    return {field: digest for part in parts for field, digest in part.reads().items()}


def facts_of_parts(parts: Sequence[RunPart], run: PreparedRun) -> dict[str, str]:
    """Returns the parts' lines of the summary, the report and the card: name -> sentence."""
    return {name: fact for part in parts for name, fact in part.facts(run).items()}


class RunPart:
    """Adds nothing; a part overrides what it needs. All ranks call everything, in this order.

    Args:
        opened: the run, of which nothing is read yet.
        given: the objects that the user gave to `finetune`.
    """

    def __init__(self, opened: OpenedRun, given: Sequence[Extension]) -> None:
        self.opened, self.recipe, self.given = opened, opened.recipe, given

    def before_rows(self, resumed: Manifest | None) -> None:
        """Reads what it needs, so that bad input is reported at once.

        Args:
            resumed: manifest of the checkpoint to resume from.

        Raises:
            BadInputError: if that is wrong, or another than the run to resume had.
        """

    def on_meta(self, on_meta: MetaModel) -> None:
        """Looks at the model without weights, and its rows.

        Raises:
            BadInputError: if they do not fit.
        """

    def require_batches(self, samples_per_step: int) -> None:
        """Checks the number of samples of a step.

        Raises:
            BadInputError: if it does not fit.
        """

    def reads(self) -> Mapping[str, str]:
        """Returns a digest of what it reads of the user's, by its field. Checkpoints and exports have them."""
        return {}

    def facts(self, run: PreparedRun) -> Mapping[str, str]:
        """Returns lines of the summary, the report and the card: name -> sentence."""
        return {}

    def start(self, run: PreparedRun, facts: Mapping[str, str], is_resumed: bool) -> None:
        """Is called when the run is prepared and described, before its first record."""

    def windows(self, loop: Loop) -> Windows | None:
        """Returns what yields the micro-batches in place of the rows, or None."""
        return None

    def extension(self, loop: Loop) -> Extension | None:
        """Returns its extension of the loop."""
        return None

    def recorded(self, split: str, values: Mapping[str, float], step: int) -> None:
        """Is called with the numbers of each record. On rank 0."""

    def finish(self, run: PreparedRun, report: Path) -> None:
        """Is called when the export and the report are written."""
