"""Every causal language model of transformers, small: which there are, and which cannot be made small or run alone."""

from __future__ import annotations

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support.cases import cases

TABLES = cases(__file__)
LEFT_OUT: dict[str, str] = TABLES["LEFT_OUT"]
"""By name, why one is not tested here."""


def causal_kinds() -> list[str]:
    """Names of all that are tested, as far as this version of transformers has them."""
    return [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in CONFIG_MAPPING and kind not in LEFT_OUT]
