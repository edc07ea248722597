"""Completions that are drawn with the log-probabilities of their tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny import save_llama
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    GenerationConfig,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from toolkit.errors import BadInputError
from toolkit.generation.sampling.fresh import FreshSample, draw
from toolkit.generation.text.complete import Prompt
from toolkit.generation.text.load import Loaded, load_model
from toolkit.run.parts.rollouts import batch_size_of

NEW_TOKENS = 12


def loaded_from(folder: Path, stops: set[int]) -> Loaded:
    found = load_model(str(save_llama(folder, ["some words", "and other words"], tied=False)))
    return Loaded(found.name, found.model, AutoTokenizer.from_pretrained(folder), frozenset(stops), found.positions)


def test_tokens_are_drawn_from_the_model_and_their_log_probabilities_are_its_own(tmp_path: Path) -> None:
    stops = set(range(100, 130))  # a tenth of the vocabulary, so that some completions end and others are cut
    loaded = loaded_from(tmp_path, stops)
    prompts = [Prompt([5, 6, 7, 8][: 2 + number % 3], [], row=number, k=k) for number in range(4) for k in range(3)]
    drawn = draw(loaded, prompts, NEW_TOKENS, seed=3)
    assert {sample.stopped for sample in drawn} == {True, False}
    for prompt, sample in zip(prompts, drawn, strict=True):
        assert sample.stopped == (sample.ids[-1] in stops)
        assert stops.isdisjoint(sample.written)
        assert sample.stopped or len(sample.ids) == NEW_TOKENS
        ids = torch.tensor([prompt.ids + sample.ids])
        logits = loaded.model(ids).logits[0, len(prompt.ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.log_probabilities), expected, atol=1e-5, rtol=1e-5)


def test_a_draw_depends_on_its_row_and_number_and_not_on_its_batch(tmp_path: Path) -> None:
    loaded = loaded_from(tmp_path, {2})
    prompts = [Prompt([5, 6, 7], [], row=row, k=k) for row in range(2) for k in range(2)]
    together = draw(loaded, prompts, NEW_TOKENS, seed=3)
    alone = [draw(loaded, [prompt], NEW_TOKENS, seed=3)[0] for prompt in prompts]
    other = draw(loaded, prompts, NEW_TOKENS, seed=4)

    def ids(samples: list[FreshSample]) -> list[list[int]]:
        return [sample.ids for sample in samples]

    assert ids(together) == ids(alone)
    assert len({tuple(sample) for sample in ids(together)}) == len(prompts)
    assert ids(together) != ids(other)


def test_a_model_that_mixes_up_the_rows_of_a_batch_draws_one_by_one_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding enters the state of RWKV, and of RecurrentGemma."""
    loaded = loaded_from(tmp_path, {2})
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 128}
    gemma = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 8, "lru_width": 32}
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    rwkv = RwkvForCausalLM(RwkvConfig(vocab_size=len(loaded.tokenizer), **sizes)).eval()
    recurrent = RecurrentGemmaConfig(vocab_size=len(loaded.tokenizer), num_hidden_layers=3, **gemma)
    mixing = [replace(loaded, model=model) for model in (rwkv, RecurrentGemmaForCausalLM(recurrent).eval())]
    for each in mixing:
        each.model.generation_config = GenerationConfig()
        for parameter in each.model.parameters():
            parameter.data.mul_(8 if parameter.dim() > 1 else 1)
    prompts = [Prompt([5, 6, 7, 8] * (1 + row % 3 * (row > 3)), [], row=row) for row in range(8)]  # the second batch
    recipe: Any = SimpleNamespace(
        objective=SimpleNamespace(rollout_batch_size=None, max_new_tokens=6),
        training=SimpleNamespace(micro_batch_size=4, seed=0),
    )
    for each, size in ((loaded, 4), *((each, 1) for each in mixing)):
        told: list[str] = []
        assert batch_size_of(recipe, each, prompts, True, told.append) == size
        assert ["one by one" in line for line in told] == [True] * (size == 1)
    bert = BertLMHeadModel(BertConfig(vocab_size=len(loaded.tokenizer), initializer_range=0.1, **small))
    bart = BartForCausalLM(BartConfig(vocab_size=len(loaded.tokenizer), d_model=32, encoder_layers=1, decoder_layers=2))
    for model, why in (
        (bert, r"differ from those of training by [\d.]+e-02 nats on average, more than 1e-03; name a model"),
        (bart, "generate fails .IndexError: list"),
    ):
        with pytest.raises(BadInputError, match=why):
            batch_size_of(recipe, replace(loaded, model=model.eval()), prompts, True, told.append)
    monkeypatch.setattr("toolkit.run.parts.rollouts.sampler_gap", lambda *_: 0.5)
    with pytest.raises(BadInputError, match=r"by 5.0e-01 nats on average, more than 1e-01; compute in float32, or"):
        batch_size_of(recipe, loaded, prompts, False, told.append)
