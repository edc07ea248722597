"""Completions that are judged good or bad one by one (KTO)."""

from __future__ import annotations

from toolkit.recipe.objectives.batches import COMPLETIONS, KL_PREFIX, BatchSpec, Field
from toolkit.recipe.objectives.method import ANY_SIZE, Method, Rate
from toolkit.recipe.objectives.spec import ObjectiveSpec

BATCH: BatchSpec = {
    **COMPLETIONS,
    **{f"{KL_PREFIX}{name}": field for name, field in COMPLETIONS.items()},  # of prompts with other completions
    "reference": Field("R2", "float32"),  # of a prompt with its own and with the other completion
    "good": Field("R", "bool"),  # the judgements
}

LAYOUTS = (
    "judged messages",
    "judged conversations",
    "judged prompt and completion",
    "judged instruction and output",
)

KTO = ObjectiveSpec(
    "kto",
    about="learn from completions that are each labelled true or false",
    layouts=LAYOUTS,
    row_form="judged",
    batch=BATCH,
    settings=("beta", "desirable_weight", "undesirable_weight"),
    methods=(
        Method(
            "kto",
            "every parameter on completions judged one by one",
            LAYOUTS,
            (Rate(ANY_SIZE, 1e-6, "TRL's KTOConfig; its documentation names 5e-7 to 5e-6"),),
            rows_per_step=32,
            epochs=1,
        ),
    ),
    trained_turns="last_turn",
)
