"""Builds the objective that a recipe names."""

from __future__ import annotations

from torch import nn

from toolkit.model.attention.positions import takes_positions
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.classification import SequenceClassification
from toolkit.objectives.distillation import Distillation
from toolkit.objectives.grpo import Grpo
from toolkit.objectives.kto import Kto
from toolkit.objectives.objective import Ingredients, Objective
from toolkit.objectives.own_loss import OwnLoss
from toolkit.objectives.preference import Preference
from toolkit.objectives.reward import Reward
from toolkit.objectives.seq2seq import Seq2Seq
from toolkit.objectives.tagging import TokenClassification
from toolkit.recipe.objectives.objective_section import ObjectiveSection

CLASSES: dict[str, type[Objective]] = {
    "causal_lm": CausalLM,
    "seq2seq": Seq2Seq,
    "sequence_classification": SequenceClassification,
    "token_classification": TokenClassification,
    "preference": Preference,
    "reward": Reward,
    "kto": Kto,
    "distillation": Distillation,
    "grpo": Grpo,
}
"""`objective.kind` -> its class."""


def build_objective(
    section: ObjectiveSection,
    model: nn.Module,
    packed: bool,
    label_counts: dict[str, int] | None,
    teacher: nn.Module | None = None,
    apart: bool = False,
    sources: tuple[str, ...] = (),
    continued: bool = False,
) -> Objective:
    """Returns the recipe's objective.

    Args:
        packed: whether documents share samples.
        label_counts: rows, or words, of each class to train on, in the order of the classes. It is None if nothing is
            classified.
        teacher: the frozen model of a distillation.
        apart: whether completions that are compared must not share rows; they never do in a model without positions.
        sources: names of the sources whose losses are reported separately.
        continued: whether the model's adapters were trained before (`adapter.start_from`).

    Raises:
        BadInputError: if the model cannot be trained with this objective, or the number of class weights is not the
            number of classes.
    """
    apart = apart or not takes_positions(model)
    counts = label_counts or {}
    found = CLASSES[section.kind] if section.own_loss is None else OwnLoss
    return found.build(Ingredients(section, model, packed, counts, teacher, apart, sources, continued))
