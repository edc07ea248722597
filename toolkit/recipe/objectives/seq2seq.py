"""Cross-entropy of a target given its source, in an encoder-decoder."""

from __future__ import annotations

from toolkit.recipe.objectives.batches import BatchSpec, Field
from toolkit.recipe.objectives.method import ANY_SIZE, Method, Rate
from toolkit.recipe.objectives.spec import ObjectiveSpec

BATCH: BatchSpec = {
    "input_ids": Field("BT"),
    "attention_mask": Field("BT"),
    "labels": Field("BU"),  # the target; -100 for padding
    "lengths": Field("B"),
    "target_lengths": Field("B"),
}

LAYOUTS = ("source and target",)

SEQ2SEQ = ObjectiveSpec(
    "seq2seq",
    about="cross-entropy of a target given its source, in an encoder-decoder",
    layouts=LAYOUTS,
    row_form="source and target",
    batch=BATCH,
    auto_class="AutoModelForSeq2SeqLM",
    peft_task="SEQ_2_SEQ_LM",
    methods=(
        Method(
            "seq2seq",
            "every parameter of an encoder-decoder on sources and targets",
            LAYOUTS,
            (Rate(ANY_SIZE, 1e-4, "transformers' page of T5: 1e-4 to 3e-4 with AdamW; BART was given 3e-5"),),
            rows_per_step=128,
            epochs=3,
            for_encoder_decoders=True,
        ),
    ),
    encoder_decoder=True,
    padded=True,
)
