"""The methods that `toolkit init` knows, with values from published recipes; docs/starting_values.md cites them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from toolkit.data.layouts import KINDS, LAYOUTS_OF, Layout, recognise
from toolkit.data.sources import Source
from toolkit.errors import BadInputError, DataError, did_you_mean
from toolkit.recipe.schema import ColumnsSection

ANY_SIZE = math.inf


@dataclass(frozen=True)
class Rate:
    """A peak learning rate.

    Attributes:
        up_to: the most parameters of a model that it is for.
        source: the published recipe that it comes from.
    """

    up_to: float
    value: float
    source: str


@dataclass(frozen=True)
class Method:
    """What is trained on which rows.

    Attributes:
        about: says so in a few words.
        objective: `objective.kind`.
        layouts: the layouts that it learns from.
        rates: by size, the smallest first.
        rows_per_step: rows of an optimizer step; not used by pretraining, whose samples are full.
        loss: `objective.loss` of preferences.
        adapter: whether LoRA adapters are trained instead of the model.
        quantized: whether the frozen model under them is held in 4 bits.
    """

    name: str
    about: str
    objective: str
    layouts: tuple[str, ...]
    rates: tuple[Rate, ...]
    rows_per_step: int
    epochs: float
    loss: str | None = None
    adapter: bool = False
    quantized: bool = False

    def rate(self, num_parameters: int) -> Rate:
        """The learning rate for a model of this size."""
        return next(rate for rate in self.rates if num_parameters <= rate.up_to)


TOKENS_PER_STEP = 2**17
"""Tokens of an optimizer step on plain text, whose rows are of any length: 128 samples of 1024, as alignment-handbook
trains GPT-2 in another language."""

_SUPERVISED = tuple(LAYOUTS_OF["causal_lm"])
_PAIRS = ("chosen and rejected",)

_CLASSIFIER_RATES = (
    Rate(1e9, 2e-5, "BERT, arXiv 1810.04805, appendix A.3"),
    Rate(ANY_SIZE, 1e-5, "RoBERTa, arXiv 1907.11692, table 10"),
)

_DPO_RATES = (
    Rate(3e9, 1e-6, "alignment-handbook, smollm2 dpo"),
    Rate(20e9, 5e-7, "alignment-handbook, zephyr-7b-beta dpo; Tulu 3 8B, arXiv 2411.15124"),
    Rate(ANY_SIZE, 2e-7, "Tulu 3 70B, arXiv 2411.15124"),
)

_LORA = Method(
    "lora",
    "LoRA adapters on answers or text",
    "causal_lm",
    _SUPERVISED,
    (
        Rate(20e9, 2e-4, "QLoRA 7B and 13B, arXiv 2305.14314, table 9"),
        Rate(ANY_SIZE, 1e-4, "QLoRA 33B and 65B, arXiv 2305.14314, table 9"),
    ),
    rows_per_step=16,
    epochs=2,
    adapter=True,
)
_LORA_DPO = Method(
    "lora-dpo",
    "LoRA adapters on preference pairs",
    "preference",
    _PAIRS,
    (Rate(ANY_SIZE, 5e-6, "TRL's dpo.py; alignment-handbook, zephyr-7b-beta dpo with adapters"),),
    rows_per_step=32,
    epochs=1,
    loss="dpo",
    adapter=True,
)

METHODS = {
    method.name: method
    for method in (
        Method(
            "full",
            "every parameter on answers",
            "causal_lm",
            _SUPERVISED,
            (
                Rate(10e9, 2e-5, "TRL's sft.py; alignment-handbook, zephyr-7b-beta sft"),
                Rate(40e9, 1e-5, "Stanford Alpaca 13B"),
                Rate(ANY_SIZE, 2e-6, "Tulu 3 70B, arXiv 2411.15124"),
            ),
            rows_per_step=128,
            epochs=2,
        ),
        _LORA,
        replace(_LORA, name="qlora", about=f"{_LORA.about}, over a base in 4 bits", quantized=True),
        Method(
            "pretrain",
            "every parameter on plain text",
            "causal_lm",
            ("text",),
            (
                Rate(1e9, 2e-4, "alignment-handbook, gpt2-nl cpt"),
                Rate(20e9, 1e-4, "Llemma 7B, arXiv 2310.10631"),
                Rate(ANY_SIZE, 5e-5, "Llemma 34B, arXiv 2310.10631"),
            ),
            rows_per_step=128,
            epochs=1,
        ),
        Method("dpo", "every parameter on preference pairs", "preference", _PAIRS, _DPO_RATES, 128, 1, loss="dpo"),
        Method("ipo", "every parameter on preference pairs", "preference", _PAIRS, _DPO_RATES, 128, 1, loss="ipo"),
        Method(
            "simpo",
            "every parameter on preference pairs",
            "preference",
            _PAIRS,
            (Rate(ANY_SIZE, 5e-7, "SimPO's training_configs: 3e-7 to 1e-6 at 7B to 9B"),),
            rows_per_step=128,
            epochs=1,
            loss="simpo",
        ),
        Method(
            "orpo",
            "every parameter on preference pairs",
            "preference",
            _PAIRS,
            (Rate(ANY_SIZE, 5e-6, "alignment-handbook, mistral-capybara orpo"),),
            rows_per_step=64,
            epochs=3,
            loss="orpo",
        ),
        _LORA_DPO,
        replace(_LORA_DPO, name="qlora-dpo", about=f"{_LORA_DPO.about}, over a base in 4 bits", quantized=True),
        Method(
            "reward",
            "a reward model on preference pairs",
            "reward",
            _PAIRS,
            (Rate(ANY_SIZE, 9e-6, "OpenRLHF's train_rm for Llama 3 8B"),),
            rows_per_step=128,
            epochs=1,
        ),
        Method(
            "kto",
            "every parameter on completions judged one by one",
            "kto",
            tuple(LAYOUTS_OF["kto"]),
            (Rate(ANY_SIZE, 1e-6, "TRL's KTOConfig; its documentation names 5e-7 to 5e-6"),),
            rows_per_step=32,
            epochs=1,
        ),
        Method(
            "classify",
            "every parameter on labelled texts",
            "sequence_classification",
            ("text and label",),
            _CLASSIFIER_RATES,
            rows_per_step=32,
            epochs=3,
        ),
        Method(
            "tag",
            "every parameter on tagged words",
            "token_classification",
            ("tokens and tags",),
            _CLASSIFIER_RATES,
            rows_per_step=32,
            epochs=3,
        ),
        Method(
            "seq2seq",
            "every parameter of an encoder-decoder on sources and targets",
            "seq2seq",
            ("source and target",),
            (Rate(ANY_SIZE, 1e-4, "transformers' page of T5: 1e-4 to 3e-4 with AdamW; BART was given 3e-5"),),
            rows_per_step=128,
            epochs=3,
        ),
    )
}

BY_LAYOUT = ("dpo", "classify", "tag", "pretrain", "full")
"""The methods among which the layout of the rows decides where none is named, in order."""

OF_ENCODER_DECODERS = ("classify", "seq2seq")
"""Likewise, of a model with an encoder and a decoder."""

SMALLER = {"full": "lora", "pretrain": "lora", "dpo": "lora-dpo", "lora": "qlora", "lora-dpo": "qlora-dpo"}
"""Method -> the one that learns from the same rows in less memory."""


def method_of(
    name: str | None, source: Source, columns: ColumnsSection, encoder_decoder: bool = False
) -> tuple[Method, Layout]:
    """The method of that name, or the one that fits the rows and the kind of model, and the layout of the rows.

    Raises:
        BadInputError: an unknown name, no known layout, or one that the method does not learn from.
    """
    if name is not None and name not in METHODS:
        raise BadInputError(
            f"--method: unknown {name!r}{did_you_mean(name, METHODS)}; allowed: {', '.join(sorted(METHODS))}"
        )
    # `lora` and `qlora` take pairs too: their siblings do.
    pairs = {"lora": ("lora-dpo", "lora"), "qlora": ("qlora-dpo", "qlora")}
    by_layout = OF_ENCODER_DECODERS if encoder_decoder else BY_LAYOUT
    names = by_layout if name is None else pairs.get(name, (name,))
    candidates = [METHODS[candidate] for candidate in names]
    objectives = dict.fromkeys(method.objective for method in candidates)
    try:
        layout = recognise(source, columns, *objectives)
    except DataError:
        if name is None:
            raise
        # Rows that another method learns from: the layouts of the one that was asked for still go first.
        layout = recognise(source, columns, *objectives, *(method.objective for method in METHODS.values()))
    for method in candidates:
        if layout.kind in method.layouts:
            return method, layout
    others = [other.name for other in METHODS.values() if layout.kind in other.layouts]
    raise BadInputError(
        f"--method {name} does not learn from rows with {' + '.join(KINDS[layout.kind])}; "
        f"for these: {', '.join(others)}"
    )
