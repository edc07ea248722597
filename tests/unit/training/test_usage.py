"""Tokens of a step counted by hand, and FLOPs against those that torch counts while the model runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny import llama
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from toolkit.data.samples.samples import Batch, sample_of, stack
from toolkit.training.usage import Counts, counts_of, forget_peaks, model_flops, peak_host_bytes

DOCUMENTS = (24, 40, 8)
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_hidden_layers": 4}


def decoder(**changes: Any) -> nn.Module:
    return llama("eager", **SIZES, num_key_value_heads=2, vocab_size=96, **changes)


def frozen_but_for_one() -> nn.Module:
    model = decoder().requires_grad_(False)
    model.model.layers[2].requires_grad_(True)
    return model


def adapted() -> nn.Module:
    found: nn.Module = get_peft_model(decoder(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return found


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**SIZES, vocab_size=96, attn_implementation="eager"))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": 96, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="eager"))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "all": decoder,
    "tied": lambda: decoder(tie_word_embeddings=True),
    "frozen": frozen_but_for_one,
    "lora": adapted,
    "gpt2": gpt2,
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    model = MODELS[name]()
    counted = 0
    for length in DOCUMENTS:  # one by one: no token sees another document, and nothing is padding
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, length, dtype=torch.long)).logits.sum().backward()
        counted += counter.get_total_flops()
    packed = sample_of([(torch.ones(n).numpy(), torch.ones(n).bool().numpy()) for n in DOCUMENTS], 100, 0)
    assert model_flops(model).of(counts_of(stack([packed]), 1)) == pytest.approx(counted, rel=0.02)


def test_what_only_the_first_token_meets_is_counted_for_all() -> None:
    """BERT's pooler and head: a tenth of this small model's, a hundredth of 12 layers'."""
    model = bert()
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 40, dtype=torch.long)).logits.sum().backward()
    whole = model_flops(model).of(Counts(tokens=40, pairs=1600))
    assert counter.get_total_flops() < whole < 1.06 * counter.get_total_flops()


def test_packed_documents_padding_and_targets_are_counted_apart() -> None:
    pieces = [(torch.ones(n).numpy(), (torch.arange(n) < 2).numpy()) for n in (5, 3)]
    batch = stack([sample_of(pieces, 12, 0), sample_of(pieces[:1], 12, 0)])
    assert counts_of(batch, 3) == Counts(targets=3, tokens=13, padded_tokens=24, pairs=25 + 9 + 25)


def test_rows_of_text_without_positions_are_documents() -> None:
    batch: Batch = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "lengths": torch.tensor([6, 2])}
    assert counts_of(batch, 2) == Counts(targets=2, tokens=8, padded_tokens=12, pairs=36 + 4)


def test_of_experts_a_token_meets_some() -> None:
    experts = nn.Module()
    experts.config = type("Config", (), {"num_experts_per_tok": 2})()
    experts.up = nn.Parameter(torch.empty(8, 16, 32))
    assert model_flops(experts).per_token == 2 * 2 * 2 * 16 * 32  # forward and the weights' gradients


def test_the_peak_of_one_run_is_not_that_of_the_next() -> None:
    forget_peaks(torch.device("cpu"))
    before = peak_host_bytes()
    torch.zeros(2**28, dtype=torch.uint8)
    assert peak_host_bytes() > before + 2**27
    forget_peaks(torch.device("cpu"))
    assert peak_host_bytes() < before + 2**27
