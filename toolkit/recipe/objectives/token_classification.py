"""Cross-entropy of each word's tag."""

from __future__ import annotations

from toolkit.recipe.objectives.method import Method
from toolkit.recipe.objectives.sequence_classification import CLASSIFIER_RATES
from toolkit.recipe.objectives.spec import ObjectiveSpec

TOKEN_CLASSIFICATION = ObjectiveSpec(
    "token_classification",
    about="cross-entropy of each word's tag, for example of named entities",
    rows="tagged",
    pipeline_task="token-classification",
    settings=("labels", "class_weights"),
    auto_class="AutoModelForTokenClassification",
    peft_task="TOKEN_CLS",
    methods=(
        Method("tag", "every parameter on tagged words", CLASSIFIER_RATES, rows_per_step=32, epochs=3, by_rows=2),
    ),
    has_classes=True,
    writes_text=False,
    padded=True,
)
