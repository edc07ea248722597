"""The objective that a recipe asks for."""

from __future__ import annotations

from torch import nn

from toolkit.errors import BadInputError
from toolkit.model.positions import takes_positions
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.classification import SequenceClassification
from toolkit.objectives.distillation import Distillation
from toolkit.objectives.divergence import Divergence
from toolkit.objectives.kto import Kto
from toolkit.objectives.preference import Preference
from toolkit.objectives.preference_losses import LOSSES
from toolkit.objectives.reward import Reward
from toolkit.objectives.rows_alone import RowsAlone
from toolkit.objectives.seq2seq import Seq2Seq
from toolkit.objectives.specs.section import ObjectiveSection
from toolkit.objectives.tagging import TokenClassification

AnyObjective = CausalLM | SequenceClassification | Preference | Reward | Kto | Distillation | RowsAlone


def build_objective(
    section: ObjectiveSection,
    model: nn.Module,
    packed: bool,
    label_counts: dict[str, int] | None,
    teacher: nn.Module | None = None,
    apart: bool = False,
) -> AnyObjective:
    """The recipe's objective.

    Args:
        packed: whether documents share samples.
        label_counts: rows, or words, of each class to train on, in the order of the classes; None: no classification.
        teacher: of a distillation.
        apart: whether completions that are compared must not share rows; they never do in a model without positions.

    Raises:
        BadInputError: a model that cannot be trained so, or class weights of another number than classes.
    """
    apart = apart or not takes_positions(model)
    if section.kind == "preference":
        given = {key: getattr(section, key) for key in ("beta", "label_smoothing", "gamma", "odds_weight")}
        return Preference(model, LOSSES[section.preference_loss], given, apart)
    if section.kind == "kto":
        return Kto(
            model, section.beta or 0.1, section.desirable_weight or 1.0, section.undesirable_weight or 1.0, apart
        )
    if section.kind == "reward":
        return Reward(model, section.center_rewards_coefficient or 0.0, apart)
    if section.kind == "seq2seq":
        return Seq2Seq(model)
    if teacher is not None:
        kind, ratio = section.divergence or "forward_kl", section.kd_ratio or 0.5
        return Distillation(
            model, packed, teacher, Divergence(kind, section.beta or 0.5, section.temperature or 1.0, ratio)
        )
    if label_counts is None:
        return CausalLM(model, packed)
    if section.kind == "token_classification":
        return TokenClassification(model, list(label_counts), _class_weights(section, label_counts))
    return SequenceClassification(model, len(label_counts), _class_weights(section, label_counts))


def _class_weights(section: ObjectiveSection, counts: dict[str, int]) -> list[float] | None:
    weights = section.class_weights
    if weights is None:
        return None
    # rows / (classes * rows of the class), as scikit-learn's class_weight="balanced".
    if weights == "balanced":
        return [sum(counts.values()) / (len(counts) * max(1, count)) for count in counts.values()]
    if len(weights) != len(counts):
        raise BadInputError(
            f"objective.class_weights: {len(weights)} weights for {len(counts)} classes ({', '.join(counts)}); "
            "give one for each, in this order"
        )
    return [float(weight) for weight in weights]
