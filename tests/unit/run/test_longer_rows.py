"""Rotary embeddings that change for a whole forward if one row is long: the run says so (Phi-3's longrope)."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import run_on_ranks
from support.texts import make_texts, write_rows
from support.tiny import llama, recipe_values, save_llama
from transformers import AutoTokenizer, Phi3Config, Phi3ForCausalLM

from toolkit.model.attention.positions import rotary_limit
from toolkit.run.checks.padding_check import changed_by_longer_rows


def phi3() -> Phi3ForCausalLM:
    torch.manual_seed(0)
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10_000.0}
    config = Phi3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, original_max_position_embeddings=32,
        rope_parameters=factors, pad_token_id=0,
    )  # fmt: skip
    return Phi3ForCausalLM(config).eval()


def told(
    model: Any, longest: int, packing: bool = False, rows: int = 2, max_length: int = 100, streaming: bool = False
) -> str | None:
    recipe: Any = SimpleNamespace(
        data=SimpleNamespace(max_length=max_length), training=SimpleNamespace(micro_batch_size=rows)
    )
    report: Any = SimpleNamespace(
        packing=packing, streaming=streaming, train=SimpleNamespace(longest={"tokens": longest})
    )
    return changed_by_longer_rows(model, recipe, report)


@torch.no_grad()
def test_a_row_is_computed_otherwise_beside_a_long_one() -> None:
    """This is what the warning is about."""
    model, ids = phi3(), torch.randint(1, 64, (2, 40))
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, 20:] = 0
    alone = model(input_ids=ids[:1, :20]).logits
    beside = model(input_ids=ids, attention_mask=mask).logits[:1, :20]
    assert (alone - beside).abs().max() > 1e-3 * alone.abs().max()
    fits = model(input_ids=ids[:, :32], attention_mask=mask[:, :32]).logits[:1, :20]
    assert torch.allclose(alone, fits, atol=1e-6)


@pytest.mark.parametrize(("packing", "rows"), [(True, 1), (False, 2)])
def test_a_warning_tells_what_to_set(packing: bool, rows: int) -> None:
    model = phi3()
    assert rotary_limit(model) == ("longrope", 32)
    found = told(model, 90, packing, rows)
    assert found is not None
    assert "Phi3ForCausalLM (longrope)" in found
    assert "more than 32 tokens, and the longest has 90" in found
    assert "Set data.max_length=32, or data.packing=false and training.micro_batch_size=1" in found
    cut = told(model, 500, packing, rows)
    assert cut is not None
    assert "the longest has 100" in cut, "longer rows are cut"


def test_of_a_stream_only_the_limit_is_known() -> None:
    assert told(phi3(), 20) is None
    found = told(phi3(), 20, streaming=True)
    assert found is not None
    assert "the longest has 100" in found, "a later window may hold such a row"


def test_no_warning_if_nothing_changes() -> None:
    assert told(phi3(), 90, packing=False, rows=1) is None, "each row is alone"
    assert told(phi3(), 32) is None
    assert told(phi3(), 90, max_length=32) is None
    plain = llama()
    assert rotary_limit(plain) is None
    assert told(plain, 90, packing=True) is None


def warned(folder: Path) -> str:
    """What a run of a step writes to standard error."""
    from toolkit import finetune
    from toolkit.recipe.recipe import Recipe

    write_rows(folder / "rows.jsonl", ({"text": text} for text in make_texts(8)))
    values = recipe_values(folder / "model", folder / "rows.jsonl", folder / "run", folder / "cache", max_steps=1)
    values["data"]["max_length"] = 90
    with contextlib.redirect_stderr(io.StringIO()) as told:
        finetune(Recipe.from_mapping(values))
    return told.getvalue()


@pytest.mark.slow
def test_a_run_warns(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "model", make_texts(8), tied=True)
    config = Phi3Config(**{**phi3().config.to_dict(), "vocab_size": len(AutoTokenizer.from_pretrained(folder))})
    Phi3ForCausalLM(config).save_pretrained(folder)
    found = run_on_ranks(warned, 1, tmp_path)[0]
    assert "(longrope) change for a whole micro-batch if one row has more than 32 tokens" in found
