"""The next-token probabilities of a frozen teacher."""

from __future__ import annotations

from toolkit.recipe.objectives.spec import ObjectiveSpec

DISTILLATION = ObjectiveSpec(
    "distillation",
    about="match the next-token probabilities of a frozen teacher",
    rows="text",
    settings=("teacher", "teacher_revision", "divergence", "beta", "temperature", "kd_ratio"),
    required={"teacher": "a model's name or folder"},
    may_pad=True,
    has_teacher=True,
    sees_images=True,
)
