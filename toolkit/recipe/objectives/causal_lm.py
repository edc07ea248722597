"""Next-token cross-entropy, and what other objectives on the same rows share with it."""

from __future__ import annotations

from dataclasses import replace

from toolkit.recipe.objectives.method import ANY_SIZE, Method, Rate
from toolkit.recipe.objectives.spec import ObjectiveSpec

_LORA = Method(
    "lora",
    "LoRA adapters on answers or text",
    (
        Rate(20e9, 2e-4, "QLoRA 7B and 13B, arXiv 2305.14314, table 9"),
        Rate(ANY_SIZE, 1e-4, "QLoRA 33B and 65B, arXiv 2305.14314, table 9"),
    ),
    rows_per_step=16,
    epochs=2,
    adapter=True,
    smaller="qlora",
)

_FULL = Method(
    "full",
    "every parameter on answers",
    (
        Rate(10e9, 2e-5, "TRL's sft.py; alignment-handbook, zephyr-7b-beta sft"),
        Rate(40e9, 1e-5, "Stanford Alpaca 13B"),
        Rate(ANY_SIZE, 2e-6, "Tulu 3 70B, arXiv 2411.15124"),
    ),
    rows_per_step=128,
    epochs=2,
    smaller="lora",
    by_rows=4,
)

_PRETRAIN = Method(
    "pretrain",
    "every parameter on plain text",
    (
        Rate(1e9, 2e-4, "alignment-handbook, gpt2-nl cpt"),
        Rate(20e9, 1e-4, "Llemma 7B, arXiv 2310.10631"),
        Rate(ANY_SIZE, 5e-5, "Llemma 34B, arXiv 2310.10631"),
    ),
    rows_per_step=128,
    epochs=1,
    smaller="lora",
    by_rows=3,
    layouts=("text",),
)


CAUSAL_LM = ObjectiveSpec(
    "causal_lm",
    about="next-token cross-entropy",
    rows="text",
    settings=("loss",),
    methods=(
        _FULL,
        _LORA,
        replace(_LORA, name="qlora", about=f"{_LORA.about}, over a base in 4 bits", quantized=True, smaller=None),
        _PRETRAIN,
    ),
    may_pad=True,
    sees_images=True,
    tells_sources=True,
)
