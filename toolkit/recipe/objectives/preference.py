"""Chosen completions over rejected ones: dpo, ipo, simpo and orpo."""

from __future__ import annotations

from dataclasses import replace

from toolkit.recipe.objectives.method import ANY_SIZE, Method, Rate
from toolkit.recipe.objectives.spec import ObjectiveSpec

SETTINGS_OF_LOSSES = {
    "dpo": ("beta", "label_smoothing"),
    "ipo": ("beta",),
    "simpo": ("beta", "gamma"),
    "orpo": ("odds_weight",),
}
"""Preference loss -> the settings that have an effect on it; their defaults are next to the losses."""


_RATES = (
    Rate(3e9, 1e-6, "alignment-handbook, smollm2 dpo"),
    Rate(20e9, 5e-7, "alignment-handbook, zephyr-7b-beta dpo; Tulu 3 8B, arXiv 2411.15124"),
    Rate(ANY_SIZE, 2e-7, "Tulu 3 70B, arXiv 2411.15124"),
)

_DPO = Method(
    "dpo",
    "every parameter on preference pairs",
    _RATES,
    rows_per_step=128,
    epochs=1,
    loss="dpo",
    smaller="lora-dpo",
    by_rows=1,
)

_LORA_DPO = Method(
    "lora-dpo",
    "LoRA adapters on preference pairs",
    (Rate(ANY_SIZE, 5e-6, "TRL's dpo.py; alignment-handbook, zephyr-7b-beta dpo with adapters"),),
    rows_per_step=32,
    epochs=1,
    loss="dpo",
    adapter=True,
    smaller="qlora-dpo",
)

_METHODS = (
    _DPO,
    replace(_DPO, name="ipo", loss="ipo", smaller=None, by_rows=None),
    Method(
        "simpo",
        "every parameter on preference pairs",
        (Rate(ANY_SIZE, 5e-7, "SimPO's training_configs: 3e-7 to 1e-6 at 7B to 9B"),),
        rows_per_step=128,
        epochs=1,
        loss="simpo",
    ),
    Method(
        "orpo",
        "every parameter on preference pairs",
        (Rate(ANY_SIZE, 5e-6, "alignment-handbook, mistral-capybara orpo"),),
        rows_per_step=64,
        epochs=3,
        loss="orpo",
    ),
    _LORA_DPO,
    replace(
        _LORA_DPO, name="qlora-dpo", about=f"{_LORA_DPO.about}, over a base in 4 bits", quantized=True, smaller=None
    ),
)

PREFERENCE = ObjectiveSpec(
    "preference",
    about="prefer chosen completions to rejected ones",
    rows="pairs",
    settings=("loss", "beta", "label_smoothing", "gamma", "odds_weight"),
    losses=SETTINGS_OF_LOSSES,
    methods=_METHODS,
    trained_turns="last_turn",
    sees_images=True,
)
