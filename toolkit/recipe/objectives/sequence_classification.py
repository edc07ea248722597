"""Cross-entropy of a text's class."""

from __future__ import annotations

from toolkit.recipe.objectives.method import ANY_SIZE, Method, Rate
from toolkit.recipe.objectives.spec import ObjectiveSpec

CLASSIFIER_RATES = (
    # BERT's rates are for 110 million parameters and more.
    Rate(50e6, 1e-4, "BERT's small models, arXiv 1908.08962: 3e-5 to 3e-4; ELECTRA's configure_finetuning.py"),
    Rate(1e9, 2e-5, "BERT, arXiv 1810.04805, appendix A.3"),
    Rate(ANY_SIZE, 1e-5, "RoBERTa, arXiv 1907.11692, table 10"),
)

SEQUENCE_CLASSIFICATION = ObjectiveSpec(
    "sequence_classification",
    about="cross-entropy of a text's class or of several labels, or the squared error of a number",
    rows="labelled",
    pipeline_task="text-classification",
    settings=("labels", "class_weights"),
    auto_class="AutoModelForSequenceClassification",
    peft_task="SEQ_CLS",
    methods=(
        Method(
            "classify",
            "every parameter on labelled texts",
            CLASSIFIER_RATES,
            rows_per_step=32,
            epochs=3,
            by_rows=2,
            for_encoder_decoders=True,
        ),
    ),
    has_classes=True,
    learns_numbers=True,
    writes_text=False,
    padded=True,
)
