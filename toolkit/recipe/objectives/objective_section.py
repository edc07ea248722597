"""The section of a recipe that chooses an objective and sets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from toolkit.recipe.objectives.grpo import RewardSection
from toolkit.recipe.objectives.registry import SPECS
from toolkit.recipe.objectives.section import PositiveFloat, PositiveInt, Section, contradiction, function_problem
from toolkit.recipe.objectives.spec import ObjectiveSpec

if TYPE_CHECKING:
    ObjectiveKind = str
else:
    ObjectiveKind = Literal[tuple(SPECS)]


OwnFunction = Annotated[str, Field(pattern=":")]
"""A name with a colon, which no loss of ours has."""


class ObjectiveSection(Section):
    """What is minimised."""

    kind: ObjectiveKind = Field(
        "causal_lm",
        description=f"Choose the objective. {' '.join(f'{spec.kind}: {spec.about}.' for spec in SPECS.values())}",
    )
    loss: Literal["dpo", "ipo", "simpo", "orpo", "dapo", "grpo", "dr_grpo"] | OwnFunction | None = Field(
        None,
        description="Choose the preference loss: dpo, ipo, simpo or orpo (arXiv 2305.18290, 2310.12036, 2405.14734, "
        "2403.07691); null: dpo. Of grpo: dapo averages over the step's tokens, grpo over each completion's tokens and "
        "then over completions, dr_grpo divides by max_new_tokens (arXiv 2503.14476, 2402.03300, 2503.20783); null: "
        "dapo. Or minimise this function of logits or log-probabilities (causal_lm; file.py:function, or "
        "module:function on Python's path), whose file's code is run; null: cross-entropy.",
    )
    beta: PositiveFloat | None = Field(
        None,
        description="Scale the rewards of dpo, ipo and kto (null: 0.1) or simpo (null: 2). With divergence jsd: the "
        "teacher's share of the mixture, below 1; null: 0.5. Of grpo: weight the KL divergence from the model without "
        "its adapter, or, if every weight is trained, from a frozen copy of the model; null: no reference.",
    )
    label_smoothing: float | None = Field(
        None,
        ge=0.0,
        lt=0.5,
        description="Assume that this share of pairs is labelled the wrong way round (dpo); null: 0.",
    )
    gamma: float | None = Field(None, ge=0.0, description="Set the target margin of simpo; null: 1.")
    odds_weight: PositiveFloat | None = Field(None, description="Weight the odds ratio of orpo; null: 0.1.")
    desirable_weight: PositiveFloat | None = Field(
        None, description="Weight the losses of completions judged true (kto); null: 1."
    )
    undesirable_weight: PositiveFloat | None = Field(
        None, description="Weight the losses of completions judged false (kto); null: 1."
    )
    center_rewards_coefficient: PositiveFloat | None = Field(
        None,
        description="Add the square of a pair's summed rewards to the loss, times this, so that rewards stay around 0 "
        "(reward, arXiv 2312.09244); null: do not.",
    )
    teacher: str | None = Field(
        None,
        min_length=1,
        description="Learn from this model: a hub name or a folder. It must have the student's tokenizer "
        "(distillation).",
    )
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] | None = Field(
        None,
        description="Choose the divergence from the teacher. forward_kl: KL(teacher || student). reverse_kl: "
        "KL(student || teacher). jsd: generalised Jensen-Shannon divergence (arXiv 2306.13649). null: forward_kl.",
    )
    temperature: PositiveFloat | None = Field(
        None,
        description="Divide both models' logits by this in the divergence, and multiply the divergence by its square "
        "(arXiv 1503.02531); null: 1.",
    )
    kd_ratio: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None,
        description="Weight the divergence by this, and the labels' cross-entropy by the rest; null: 0.5.",
    )
    rewards: list[RewardSection] | None = Field(
        None, min_length=1, description="Score sampled completions by these (grpo); see objective.rewards."
    )
    group_size: int | None = Field(
        None, ge=2, description="Sample N completions of each prompt, which are compared (grpo); null: 8."
    )
    max_new_tokens: PositiveInt | None = Field(
        None,
        description="Cut a sampled completion after N tokens (grpo); prompts may fill the rest of data.max_length.",
    )
    rollout_batch_size: PositiveInt | None = Field(
        None, description="Sample N completions at a time on each rank (grpo); null: training.micro_batch_size."
    )
    scale_rewards: Literal["group", "batch", "none"] | None = Field(
        None,
        description="Divide a reward's distance from the mean of its group by the standard deviation of the group, of "
        "the step's rewards, or by nothing (grpo); null: group.",
    )
    mask_truncated: bool | None = Field(
        None, description="Learn nothing from completions that were cut (grpo); null: false."
    )
    labels: list[str] | None = Field(
        None,
        description="Name the classes, or tags, in the order of their numbers; null: those of data.train, sorted. "
        "[NAME]: learn the number of each text (sequence_classification).",
    )
    class_weights: Literal["balanced"] | list[PositiveFloat] | None = Field(
        None, description="Weight each class in the loss. balanced: rows / (classes x rows of the class)."
    )
    router_aux_coef: float | None = Field(
        None,
        ge=0.0,
        description="Weight the balance loss of a mixture of experts (arXiv 2101.03961), taken over all ranks; null: "
        "the model's own router_aux_loss_coef.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> ObjectiveSection:
        for key, what in self.spec.required.items():
            if getattr(self, key) is None:
                raise contradiction(f"objective.{key}: must be set with objective.kind {self.kind}: {what}")
        if self.own_loss is not None and (problem := function_problem(self.own_loss)):
            raise contradiction(f"objective.loss: {problem}")
        names = [reward.name for reward in self.rewards or []]
        if len(set(names)) < len(names):
            raise contradiction("objective.rewards: two have the same name; give each its own")
        least = "one name" if self.spec.learns_numbers else "two names"
        if self.labels is not None and len(set(self.labels)) < max(len(self.labels), 1 + (least == "two names")):
            raise contradiction(f"objective.labels: needs {least} or more, all different")
        return self

    @property
    def spec(self) -> ObjectiveSpec:
        """What the other rooms ask about an objective of this kind."""
        return SPECS[self.kind]

    @property
    def own_loss(self) -> str | None:
        """The user's function that is minimised, if any."""
        return self.loss if self.loss is not None and ":" in self.loss else None

    @property
    def chosen_loss(self) -> str:
        """`loss`, or its default."""
        return self.loss or next(iter(self.spec.losses), "")

    @property
    def completions_per_prompt(self) -> int:
        """`group_size`, or its default."""
        return self.group_size or 8
