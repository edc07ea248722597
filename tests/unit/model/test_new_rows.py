"""Rows of added tokens: drawn around the mean of the others, and trained by an adapter, or refused before a step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import peft_by_hand
from support.runs import losses_of
from support.texts import write_rows
from support.tiny import recipe_values, save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit import Recipe, finetune
from toolkit.data.tokens import tokenizer as toolkit_tokenizer
from toolkit.errors import BadInputError
from toolkit.model.load import load
from toolkit.recipe.schema import DataSection, ModelSection

NEW = ["<a>", "<b>", "<c>"]
TEXTS = [f"<a> {text} <b>" for text in peft_by_hand.TEXTS]


def padded(folder: Path, *, tied: bool, spare: int) -> Path:
    """A Llama whose embeddings have `spare` rows without a token, which are nothing like the others."""
    save_llama(folder, peft_by_hand.TEXTS, tied=tied)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    known = model.config.vocab_size
    model.resize_token_embeddings(known + spare, mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        layer.weight.data[known:] = 0.5
    model.save_pretrained(folder)
    return folder


def test_new_rows_are_drawn_around_the_mean_of_the_tokens_of_the_base(tmp_path: Path) -> None:
    """Also those that the base has spare rows for; a token that the base has keeps its row."""
    for tied, spare in ((True, 0), (True, 2), (True, 8), (False, 2), (False, 8)):
        base = padded(tmp_path / f"{tied}{spare}", tied=tied, spare=spare)
        stored: Any = AutoModelForCausalLM.from_pretrained(base)
        known = stored.config.vocab_size - spare
        section = ModelSection(name_or_path=str(base), add_tokens=["<|endoftext|>", *NEW])
        tokens = toolkit_tokenizer.load(section, DataSection(train="rows.jsonl", max_length=8))
        loaded = load(section, tokens, seed=0)
        loaded.load_weights(None)
        model = loaded.model
        assert tokens.convert_tokens_to_ids(NEW) == [known, known + 1, known + 2]
        for layer in ("get_input_embeddings", "get_output_embeddings"):
            rows, before = getattr(model, layer)().weight.detach(), getattr(stored, layer)().weight.detach()
            assert torch.equal(rows[:known], before[:known])
            assert torch.equal(rows[known + 3 :], before[known + 3 :]), "spare rows without a token stay as they are"
            # Rows beyond the base's are transformers' own, which takes spare ones into the mean.
            drawn = rows[known : known + min(spare, 3)]
            assert (drawn - before[:known].mean(0)).abs().max() < 1e-5 if spare else True, (tied, spare, layer)
            assert len({tuple(row.tolist()) for row in rows[known : known + 3]}) == 3, "no two begin alike"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_advice_on_new_tokens_leads_to_the_run_of_peft(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each adapter that would leave rows of new tokens as they are: refused, and then as the error says."""
    monkeypatch.setattr("toolkit.model.new_rows.SPREAD", 0.0)  # the loop has the mean itself
    base = padded(tmp_path / "base", tied=tied, spare=8)
    write_rows(tmp_path / "rows.jsonl", ({"text": text} for text in TEXTS))
    values = recipe_values(base, tmp_path / "rows.jsonl", tmp_path / "out", tmp_path / "cache")
    values["model"]["add_tokens"] = NEW
    values["data"] |= {"max_length": 64, "packing": False}
    values["optimizer"] = {"learning_rate": 2e-2, "weight_decay": 0.1}
    values["schedule"] = {"kind": "constant"}
    values["training"] |= {"max_steps": 3, "seed": peft_by_hand.SEED, "micro_batch_size": peft_by_hand.ROWS_PER_STEP}
    advised = set()
    for asked in (
        {},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
    ):
        values["adapter"] = {"kind": "lora", "r": 2, "target_modules": ["q_proj"], **asked}
        values["export"] = {"merge": True}
        with pytest.raises(BadInputError) as refused:
            finetune(Recipe.from_mapping(values))
        assert not (tmp_path / "out").exists()
        if (found := re.search(r"set adapter\.modules_to_save=\[(.*?)\]", str(refused.value))) is not None:
            advised.add(frozenset(found[1].split(", ")))
    assert frozenset(["embed_tokens", "lm_head"]) in advised
    values["adapter"] = {"kind": "lora", "r": 2, "target_modules": ["q_proj"], "modules_to_save": [*max(advised)]}
    result = finetune(Recipe.from_mapping(values))

    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": NEW})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    plain: Any = AutoModelForCausalLM.from_pretrained(base)
    for layer in (plain.get_input_embeddings(), plain.get_output_embeddings()):
        known = len(tokenizer) - len(NEW)
        layer.weight.data[known : known + len(NEW)] = layer.weight.data[:known].mean(0)
    monkeypatch.setattr(peft_by_hand, "TEXTS", TEXTS)
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    looped = peft_by_hand.peft_loop(plain, tmp_path / "tokenizer", settings, 3)
    assert losses_of(result.metrics) == pytest.approx(looped["losses"], rel=1e-6)
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out/export")
    assert not again.config.tie_word_embeddings
    for name, rows in (("model.embed_tokens", again.model.embed_tokens), ("lm_head", again.lm_head)):
        trained = looped["adapter"][f"base_model.model.{name}.weight"]
        assert float(((rows.weight - trained).abs() < 2e-4).float().mean()) > 0.99, name
        learned = rows.weight[known : known + 2] - plain.get_input_embeddings().weight[:known].mean(0)
        assert learned.abs().max() > 1e-2
