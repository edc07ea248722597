"""Cross-entropy of a target given its source, in an encoder-decoder."""

from __future__ import annotations

from toolkit.recipe.objectives.method import ANY_SIZE, Method, Rate
from toolkit.recipe.objectives.spec import ObjectiveSpec

SEQ2SEQ = ObjectiveSpec(
    "seq2seq",
    about="cross-entropy of a target given its source, in an encoder-decoder",
    rows="source and target",
    auto_class="AutoModelForSeq2SeqLM",
    peft_task="SEQ_2_SEQ_LM",
    methods=(
        Method(
            "seq2seq",
            "every parameter of an encoder-decoder on sources and targets",
            (Rate(ANY_SIZE, 1e-4, "transformers' page of T5: 1e-4 to 3e-4 with AdamW; BART was given 3e-5"),),
            rows_per_step=128,
            epochs=3,
            for_encoder_decoders=True,
        ),
    ),
    encoder_decoder=True,
    padded=True,
)
