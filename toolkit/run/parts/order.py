"""The parts of a run, in their order: that of its summary, and of its extensions at each point of the loop."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.run.checks.by_block_check import Accumulated
from toolkit.run.checks.own_loss_check import HeadLossPart
from toolkit.run.checks.packed_rows import PackedRows
from toolkit.run.checks.padding_check import PaddedRows
from toolkit.run.checks.quantised_check import QuantisedBase
from toolkit.run.checks.sequence_check import SharedRows
from toolkit.run.checks.tensor_check import CutMatrices
from toolkit.run.parts.answers import AskedWhileTraining, HeldOutTexts
from toolkit.run.parts.averages import Averages
from toolkit.run.parts.ends import Allocation, Best
from toolkit.run.parts.experts import Experts
from toolkit.run.parts.figures import Figures, NonFinitePart, Profile
from toolkit.run.parts.inputs import BasePart, RowsPart, StartedAdapterPart, TeacherPart
from toolkit.run.parts.kept import Kept
from toolkit.run.parts.own_code import OwnCode
from toolkit.run.parts.reference import ReferencePart
from toolkit.run.parts.rollouts import OwnSamples
from toolkit.run.parts.stops import Stops
from toolkit.run.parts.story import Recorded
from toolkit.run.parts.trackers import Tracked
from toolkit.run.stages.part import RunPart
from toolkit.run.stages.stages import OpenedRun
from toolkit.training.extension import Extension

PARTS: tuple[type[RunPart], ...] = (
    Recorded,
    Figures,  # checkpoints hold records, and errors follow them
    NonFinitePart,
    RowsPart,
    BasePart,
    StartedAdapterPart,
    CutMatrices,
    QuantisedBase,
    PackedRows,
    TeacherPart,  # from here on rows are as they are trained
    SharedRows,
    HeadLossPart,
    PaddedRows,
    Accumulated,
    ReferencePart,
    Stops,
    Best,  # before averages, which go on from its weights
    Averages,
    Experts,
    AskedWhileTraining,
    Kept,
    Allocation,
    OwnCode,
    Profile,
    OwnSamples,
    HeldOutTexts,
    Tracked,
)


def parts_of(opened: OpenedRun, given: Sequence[Extension] = ()) -> list[RunPart]:
    """Makes the parts of a run.

    Args:
        given: the objects that the user gave to `finetune`.
    """
    return [part(opened, given) for part in PARTS]
