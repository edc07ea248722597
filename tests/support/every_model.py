"""Every causal language model of transformers, small: which there are, and which cannot be made small or run alone."""

from __future__ import annotations

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LEFT_OUT = {
    **dict.fromkeys(
        (
            *("dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2"),
            *("llama4", "mllama", "moss_transcribe_diarize", "phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
        ),
        "text beside images or sound; the text models have names of their own",
    ),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "predicts sound, in several codebooks"),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "reads the states of another model"),
    "blt": "hashes bytes into tables that have no small size",
    "dots3_note_text": "its heads differ from layer to layer and have no small size",
    "reformer": "its backward needs dropout's mode",
    "xlnet": "transformers itself fails in bfloat16: part of its weights stays in float32",
    "kimi_linear": "gradients of the small model are NaN in transformers, too",
}
"""By name, why one is not tested here."""


def causal_kinds() -> list[str]:
    """Names of all that are tested, as far as this version of transformers has them."""
    return [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in CONFIG_MAPPING and kind not in LEFT_OUT]
