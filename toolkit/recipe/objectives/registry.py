"""All objectives by the `objective.kind` of a recipe."""

from __future__ import annotations

from toolkit.recipe.objectives.causal_lm import CAUSAL_LM
from toolkit.recipe.objectives.distillation import DISTILLATION
from toolkit.recipe.objectives.grpo import GRPO
from toolkit.recipe.objectives.kto import KTO
from toolkit.recipe.objectives.preference import PREFERENCE
from toolkit.recipe.objectives.reward import REWARD
from toolkit.recipe.objectives.seq2seq import SEQ2SEQ
from toolkit.recipe.objectives.sequence_classification import SEQUENCE_CLASSIFICATION
from toolkit.recipe.objectives.spec import ObjectiveSpec
from toolkit.recipe.objectives.token_classification import TOKEN_CLASSIFICATION

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
        GRPO,
    )
}
"""In the order in which documentation and messages list them."""
