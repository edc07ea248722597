"""`toolkit init` and `toolkit plan` of every type that reads images or sound, by its default configuration."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.every_multimodal import REFUSED, UNTRIED, WITHOUT_SIZES, multimodal_kinds
from support.texts import write_rows
from support.tiny import VOCAB_SIZE
from support.whole_models import TEXTS
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from toolkit.data.tokens.tokenizer import _train_byte_pairs
from toolkit.errors import ToolkitError
from toolkit.planning.hardware import presets
from toolkit.planning.table import plan
from toolkit.suggest.suggestion import Machine, suggest

SECONDS = 60.0
"""Of CPU, for both. Most take three; four models of 400 billion parameters and more take thirty."""

CANNOT_RUN = {
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glmga"), "split_with_sizes"),
    "glm5_next": "DynamicOutputShapeException",
    "step3p7": "sliding_window",
    "inkling_mm_model": "nf4 needs matrices of a multiple of 64 weights",
    **dict.fromkeys(("qwen3_omni_moe_thinker", "kyutai_speech_to_text"), "broadcast"),
    **dict.fromkeys(("idefics", "voxtral_realtime"), "cannot run on tensors without values"),
}
"""Types that cannot be planned: of most transformers' own forward fails at the default sizes."""

TOO_LARGE = ("dots3_note", "inkling2", "kimi_k25", "minimax_m3_vl", "mistral_large4", "muse_spark")
"""Which eight GPUs do not hold, not even in 4 bits."""

NOT_FOR_CHAT = ("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop", "vision-encoder-decoder")
"""Encoder-decoders, which want sources and targets in their rows."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("types")
    rows = [[{"role": "user", "content": text}, {"role": "assistant", "content": text}] for text in TEXTS * 20]
    write_rows(folder / "rows.jsonl", ({"messages": row} for row in rows))
    return folder


def save_configuration(kind: str, folder: Path) -> None:
    """Saves what `toolkit init` reads: the default configuration with its class, and a tokenizer."""
    _train_byte_pairs(iter(TEXTS), VOCAB_SIZE).save_pretrained(folder)
    both = {
        **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    config = AutoConfig.for_model(kind)
    config.architectures = [both[kind] if isinstance(both[kind], str) else both[kind][0]]
    config.save_pretrained(folder)


def outcome(kind: str, folder: Path) -> str:
    """`planned`, or what was said; any other exception is a crash."""
    save_configuration(kind, folder / kind)
    hardware = presets()["h100_sxm"]
    try:
        found = suggest(str(folder / kind), str(folder / "rows.jsonl"), Machine(hardware, 8))
        planned = plan(found.recipe, hardware, 8)
    except ToolkitError as error:
        return str(error)
    trained = {part for part, size in planned.parts.items() if size.trained}
    assert trained == {"language"}
    assert sum(size.parameters for size in planned.parts.values()) == planned.num_parameters
    assert sum(size.trained for size in planned.parts.values()) == planned.num_trained
    return "planned"


@pytest.mark.grid
@pytest.mark.parametrize("kind", multimodal_kinds())
def test_every_type_is_planned_or_refused_by_name(kind: str, folder: Path) -> None:
    begin = time.process_time()
    found = outcome(kind, folder)
    assert time.process_time() - begin < SECONDS
    if kind in UNTRIED:
        assert "requires the timm library" in found
    elif kind in WITHOUT_SIZES:
        assert f"there is no model of type {kind}" in found
    elif kind in CANNOT_RUN:
        assert CANNOT_RUN[kind] in found
    elif kind in TOO_LARGE:
        assert "method qlora does not fit" in found
    elif kind in NOT_FOR_CHAT:
        assert "matches no known column layout" in found
    elif kind in REFUSED and kind not in ("paligemma", "shieldgemma2"):  # known by their weights, and by their files
        assert REFUSED[kind] in found
    else:
        assert found == "planned"
