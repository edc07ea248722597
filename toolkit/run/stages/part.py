"""A part of a run: what a feature adds to it, as one class. The order of parts is in `parts/order.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.session import RunCheckpoints
from toolkit.errors import BadInputError
from toolkit.run.stages.stages import BuiltRun, MetaModel, OpenedRun, PreparedRun
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


def require_same_reads(opened: OpenedRun, warn: Callable[[str], None] | None = None) -> None:
    """Checks that a resumed run reads what it began with, as far as its parts know by now. The last call warns.

    Raises:
        BadInputError: if it reads something else.
    """
    if (resumed := opened.resumed) is None:
        return
    before = resumed.digests()
    for read in opened.reads:
        known = before.get(read.name)
        is_unknown = known is None and read.unknown is not None
        said = (read.unknown or "") if is_unknown else read.changed
        for name, value in (("{step}", resumed.step), ("{before}", known), ("{now}", read.digest)):
            said = said.replace(name, str(value))
        if known != read.digest and not is_unknown and read.refuses:
            raise BadInputError(said)
        if known != read.digest and said and warn is not None:
            warn(said)


class RunPart:
    """Adds nothing; a part overrides what it needs. All ranks call everything, in this order.

    Args:
        opened: the run, of which nothing is read yet.
        given: the objects that the user gave to `finetune`.

    Attributes:
        reads, facts: those of the run, to which it adds its own.
    """

    def __init__(self, opened: OpenedRun, given: Sequence[Extension]) -> None:
        self.opened, self.recipe, self.given = opened, opened.recipe, given
        self.reads, self.facts = opened.reads, opened.facts

    def before_rows(self) -> None:
        """Reads what it needs, so that bad input is reported at once, and adds to `reads`.

        Raises:
            BadInputError: if that is wrong.
        """

    def on_meta(self, on_meta: MetaModel) -> None:
        """Looks at the model without weights, and its rows; adds to `reads`.

        Raises:
            BadInputError: if they do not fit.
        """

    def check(self, run: BuiltRun) -> None:
        """Looks at what the sharded model computes; may change with what it trains (`run.sharded`).

        Raises:
            BadInputError: on every rank, if that is not what the recipe assumes.
        """

    def prepared(self, run: PreparedRun) -> None:
        """Is called when the run is prepared; adds to `reads` and `facts`."""

    def start(self, run: PreparedRun) -> None:
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
