"""The next-token probabilities of a frozen teacher."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipe.objectives.section import contradiction
from toolkit.recipe.objectives.spec import ObjectiveSettings, ObjectiveSpec


@dataclass(frozen=True)
class _Distillation(ObjectiveSpec):
    def check(self, section: ObjectiveSettings) -> None:
        if section.teacher is None:
            raise contradiction(
                "objective.teacher: must be set with objective.kind distillation: a model's name or folder"
            )
        if section.beta is not None and section.divergence != "jsd":
            raise contradiction(
                f"objective.beta has no effect with objective.divergence {section.divergence or 'forward_kl'}; remove "
                "it, or set objective.divergence=jsd"
            )
        if section.beta is not None and section.beta >= 1:
            raise contradiction(
                f"objective.beta: found {section.beta:g}; with objective.divergence jsd it is above 0 and below 1; for "
                "1 set objective.divergence=reverse_kl"
            )


DISTILLATION = _Distillation(
    "distillation",
    about="match the next-token probabilities of a frozen teacher",
    rows="text",
    settings=("teacher", "teacher_revision", "divergence", "beta", "temperature", "kd_ratio"),
    may_pad=True,
    has_teacher=True,
    sees_images=True,
)
