"""Scores of completions, the chosen one's above the rejected one's (Bradley-Terry)."""

from __future__ import annotations

from toolkit.recipe.objectives.method import ANY_SIZE, Method, Rate
from toolkit.recipe.objectives.spec import ObjectiveSpec

REWARD = ObjectiveSpec(
    "reward",
    about="score chosen completions above rejected ones (Bradley-Terry)",
    rows="pairs",
    pipeline_task="text-classification",
    settings=("center_rewards_coefficient",),
    auto_class="AutoModelForSequenceClassification",
    peft_task="SEQ_CLS",
    head_names=("reward",),
    methods=(
        Method(
            "reward",
            "a reward model on preference pairs",
            (Rate(ANY_SIZE, 9e-6, "OpenRLHF's train_rm for Llama 3 8B"),),
            rows_per_step=128,
            epochs=1,
        ),
    ),
    trained_turns="last_turn",
    sees_images=True,
    writes_text=False,
    has_margins=True,
)
