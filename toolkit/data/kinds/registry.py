"""All kinds of rows. `ObjectiveSpec.rows` says which of them an objective learns from."""

from __future__ import annotations

from toolkit.data.kinds.judged import JudgedRows
from toolkit.data.kinds.kind import RowKind
from toolkit.data.kinds.labelled import LabelledRows
from toolkit.data.kinds.pairs import PairRows
from toolkit.data.kinds.prompts import PromptRows
from toolkit.data.kinds.source_target import SourceTargetRows
from toolkit.data.kinds.tagged import TaggedRows
from toolkit.data.kinds.text import TextRows
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.objectives.registry import SPECS
from toolkit.recipe.schema import DataSection

KINDS: dict[str, type[RowKind]] = {
    kind.name: kind for kind in (TextRows, PairRows, JudgedRows, LabelledRows, TaggedRows, SourceTargetRows, PromptRows)
}

LAYOUTS = {form.name: form for kind in KINDS.values() for form in kind.layouts}


def kind_for(objective: str) -> type[RowKind]:
    """Returns the kind of row that an objective learns from, given its `objective.kind`."""
    return KINDS[SPECS[objective].rows]


def rows_of(data: DataSection, objective: ObjectiveSection) -> RowKind:
    """Returns the kind of row of a recipe."""
    return kind_for(objective.kind)(data, objective)
