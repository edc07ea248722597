"""All objectives by the `objective.kind` of a recipe."""

from __future__ import annotations

from toolkit.objectives.specs.causal_lm import CAUSAL_LM
from toolkit.objectives.specs.distillation import DISTILLATION
from toolkit.objectives.specs.kto import KTO
from toolkit.objectives.specs.preference import PREFERENCE
from toolkit.objectives.specs.reward import REWARD
from toolkit.objectives.specs.seq2seq import SEQ2SEQ
from toolkit.objectives.specs.sequence_classification import SEQUENCE_CLASSIFICATION
from toolkit.objectives.specs.spec import ObjectiveSpec
from toolkit.objectives.specs.token_classification import TOKEN_CLASSIFICATION

SPECS: dict[str, ObjectiveSpec] = {
    spec.kind: spec
    for spec in (
        CAUSAL_LM,
        SEQ2SEQ,
        SEQUENCE_CLASSIFICATION,
        TOKEN_CLASSIFICATION,
        PREFERENCE,
        REWARD,
        KTO,
        DISTILLATION,
    )
}
"""In the order in which documentation and messages list them."""
