"""Completions that are judged good or bad one by one (KTO)."""

from __future__ import annotations

from toolkit.recipe.objectives.method import ANY_SIZE, Method, Rate
from toolkit.recipe.objectives.spec import ObjectiveSpec

KTO = ObjectiveSpec(
    "kto",
    about="learn from completions that are each labelled true or false",
    rows="judged",
    settings=("beta", "desirable_weight", "undesirable_weight"),
    methods=(
        Method(
            "kto",
            "every parameter on completions judged one by one",
            (Rate(ANY_SIZE, 1e-6, "TRL's KTOConfig; its documentation names 5e-7 to 5e-6"),),
            rows_per_step=32,
            epochs=1,
        ),
    ),
    trained_turns="last_turn",
    sees_images=True,
)
