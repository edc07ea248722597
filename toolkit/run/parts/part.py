"""A part of a run: what a feature adds to it, as one class. The order of parts is in `order.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.session import RunCheckpoints
from toolkit.errors import BadInputError
from toolkit.run.stages.stages import MetaModel, OpenedRun, PreparedRun
from toolkit.training.extension import Extension
from toolkit.training.extensions.heartbeat import Heartbeat
from toolkit.training.loop_state import LoopState, Windows
from toolkit.training.metrics import Metrics

NEW_FOLDER = "or start anew with another training.output_dir"


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


@dataclass(frozen=True)
class Read:
    """Something that a run reads, which a run that resumes has to find again.

    Attributes:
        name: its field, or its name in `Manifest`.
        digest: None if the run reads none.
        changed: what is said of another digest; `{step}`, `{before}` and `{now}` are filled in.
        unknown: what is said where the checkpoint does not have it, "" for nothing; None: it read none.
        refuses: whether a run is refused that finds another one.
    """

    name: str
    digest: str | None
    changed: str
    unknown: str | None = None
    refuses: bool = True


def reads_of(parts: Sequence[RunPart]) -> dict[str, str | None]:
    """Returns a digest of all that a run reads, by its name. Checkpoints and exports have them."""
    return {read.name: read.digest for part in parts for read in part.reads}


def require_same_reads(
    parts: Sequence[RunPart], resumed: Manifest | None, warn: Callable[[str], None] = lambda _: None
) -> None:
    """Checks that a resumed run reads what it began with, as far as its parts know by now. The last call warns.

    Raises:
        BadInputError: if it reads something else.
    """
    before = {} if resumed is None else resumed.digests()
    for read in (read for part in parts for read in part.reads if resumed is not None):
        known = before.get(read.name)
        is_unknown = known is None and read.unknown is not None
        said = (read.unknown or "") if is_unknown else read.changed
        for name, value in (("{step}", resumed and resumed.step), ("{before}", known), ("{now}", read.digest)):
            said = said.replace(name, str(value))
        if known != read.digest and not is_unknown and read.refuses:
            raise BadInputError(said)
        if known != read.digest and said:
            warn(said)


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
        self.reads: list[Read] = []

    def before_rows(self, resumed: Manifest | None) -> None:
        """Reads what it needs, so that bad input is reported at once, and adds to `reads`.

        Args:
            resumed: manifest of the checkpoint to resume from.

        Raises:
            BadInputError: if that is wrong.
        """

    def on_meta(self, on_meta: MetaModel) -> None:
        """Looks at the model without weights, and its rows; adds to `reads`.

        Raises:
            BadInputError: if they do not fit.
        """

    def require_batches(self, samples_per_step: int) -> None:
        """Checks the number of samples of a step.

        Raises:
            BadInputError: if it does not fit.
        """

    def prepared(self, run: PreparedRun) -> None:
        """Is called when the run is prepared; adds to `reads`."""

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
