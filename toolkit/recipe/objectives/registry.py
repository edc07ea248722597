"""All objectives by the `objective.kind` of a recipe."""

from __future__ import annotations

from toolkit.recipe.objectives.spec import ObjectiveSpec

_SPECS = (
    ObjectiveSpec(
        "causal_lm",
        about="next-token cross-entropy",
        rows="text",
        settings=("loss",),
        may_pad=True,
        sees_images=True,
        tells_sources=True,
    ),
    ObjectiveSpec(
        "seq2seq",
        about="cross-entropy of a target given its source, in an encoder-decoder",
        rows="source and target",
        auto_class="AutoModelForSeq2SeqLM",
        peft_task="SEQ_2_SEQ_LM",
        encoder_decoder=True,
        padded=True,
    ),
    ObjectiveSpec(
        "sequence_classification",
        about="cross-entropy of a text's class or of several labels, or the squared error of a number",
        rows="labelled",
        pipeline_task="text-classification",
        settings=("labels", "class_weights"),
        auto_class="AutoModelForSequenceClassification",
        peft_task="SEQ_CLS",
        has_classes=True,
        learns_numbers=True,
        writes_text=False,
        padded=True,
    ),
    ObjectiveSpec(
        "token_classification",
        about="cross-entropy of each word's tag, for example of named entities",
        rows="tagged",
        pipeline_task="token-classification",
        settings=("labels", "class_weights"),
        auto_class="AutoModelForTokenClassification",
        peft_task="TOKEN_CLS",
        has_classes=True,
        writes_text=False,
        padded=True,
    ),
    ObjectiveSpec(
        "preference",
        about="prefer chosen completions to rejected ones",
        rows="pairs",
        settings=("loss", "beta", "label_smoothing", "gamma", "odds_weight"),
        # The defaults of these settings are next to the losses.
        losses={
            "dpo": ("beta", "label_smoothing"),
            "ipo": ("beta",),
            "simpo": ("beta", "gamma"),
            "orpo": ("odds_weight",),
        },
        trained_turns="last_turn",
        sees_images=True,
    ),
    ObjectiveSpec(
        "reward",
        about="score chosen completions above rejected ones (Bradley-Terry)",
        rows="pairs",
        pipeline_task="text-classification",
        settings=("center_rewards_coefficient",),
        auto_class="AutoModelForSequenceClassification",
        peft_task="SEQ_CLS",
        head_names=("reward",),
        trained_turns="last_turn",
        sees_images=True,
        writes_text=False,
        has_margins=True,
    ),
    ObjectiveSpec(
        "kto",
        about="learn from completions that are each labelled true or false",
        rows="judged",
        settings=("beta", "desirable_weight", "undesirable_weight"),
        trained_turns="last_turn",
        sees_images=True,
    ),
    ObjectiveSpec(
        "distillation",
        about="match the next-token probabilities of a frozen teacher",
        rows="text",
        settings=("teacher", "divergence", "beta", "temperature", "kd_ratio"),
        required={"teacher": "a model's name or folder"},
        may_pad=True,
        has_teacher=True,
        sees_images=True,
    ),
    ObjectiveSpec(
        "grpo",
        about="learn from completions that the model samples and rewards score",
        rows="prompts",
        settings=(
            *("loss", "beta", "rewards", "group_size", "max_new_tokens"),
            *("rollout_batch_size", "scale_rewards", "mask_truncated"),
        ),
        losses={"dapo": (), "grpo": (), "dr_grpo": ()},
        required={"rewards": "for example [{name: right, compare: numeric}]", "max_new_tokens": "for example 256"},
        may_pad=True,
        samples_itself=True,
    ),
)

SPECS = {spec.kind: spec for spec in _SPECS}
"""In the order in which documentation and messages list them."""
