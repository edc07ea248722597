"""Attention by heads, and full attention, of rows that ranks share or that share a sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import cases
from support.tiny import llama
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
)

from toolkit.data.samples.sequence_parts import Part
from toolkit.errors import BadInputError
from toolkit.model.attention.attention import require_sequence
from toolkit.model.attention.full_attention import attends_in_full
from toolkit.sharding.parallel.sequence_parallel import require_groups

TABLES = cases(__file__)


def qwen_next() -> Any:
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_experts": 2}
    config = AutoConfig.for_model("qwen3_next", **sizes, layer_types=["linear_attention"])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def bert() -> Any:
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **sizes))


@pytest.mark.parametrize(
    ("model", "parts", "told"),
    [
        (lambda: llama(), 3, "3 does not divide the 4 attention heads of LlamaForCausalLM; set it to one of 1, 2, 4"),
        (qwen_next, 2, "Qwen3NextForCausalLM has layers of the kind linear_attention"),
        (
            lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            2,
            r"the rotary embeddings of LlamaForCausalLM \(dynamic\) change .*; lower data.max_length to 64",
        ),
        (bert, 2, "BertForSequenceClassification is not a decoder with a head called `score`: .*; remove it"),
    ],
)
def test_a_model_whose_rows_cannot_be_shared_is_refused_by_name(model: Any, parts: int, told: str) -> None:
    with pytest.raises(BadInputError, match=f"^sharding.sequence: {told}"):
        require_sequence(model(), parts, 100)


def test_models_whose_rows_can_be_shared_pass() -> None:
    require_sequence(llama(), 4, 100)


def test_groups_fill_the_ranks() -> None:
    require_groups("sharding.sequence", 4, 8)
    with pytest.raises(BadInputError, match=r"4 does not divide the 6 ranks .* set it to one of 1, 2, 3, 6"):
        require_groups("sharding.sequence", 4, 6)


def test_parts_of_a_row_hold_its_tokens_targets_and_lengths() -> None:
    ids = torch.arange(1, 11)[None]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6]])
    labels = ids.masked_fill(positions == 0, -100)
    labels[0, 8:] = -100
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions, "lengths": torch.tensor([8])}
    parts = [Part(index, 4).of(batch) for index in range(4)]
    whole = {
        name: torch.cat([part[name] for part in parts], dim=1) for name in ("input_ids", "targets", "position_ids")
    }
    assert whole["input_ids"].tolist() == [[*range(1, 11), 1, 1]], "not the token whose embedding may be zero"
    # Each token predicts the next one, across the borders of parts but not of documents.
    assert whole["targets"].tolist() == [[2, 3, -100, 5, 6, 7, 8, -100, -100, -100, -100, -100]]
    assert whole["position_ids"].tolist() == parts[0]["whole_positions"].tolist() == [[*positions[0].tolist(), 0, 1]]
    assert [int(part["lengths"]) for part in parts] == [3, 3, 2, 0]
    assert Part().of(batch) is batch


def test_parts_of_classified_rows_count_a_row_once_and_each_word_where_it_is() -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]])
    rows = {"input_ids": ids, "attention_mask": (ids > 0).long(), "token_type_ids": ids % 2}
    rows["lengths"] = torch.tensor([5, 2])
    first, second = (Part(index, 2).of({**rows, "labels": torch.tensor([2, 1])}) for index in range(2))
    assert first["input_ids"].tolist() == [[1, 2, 3], [6, 7, 0]]
    assert second["token_type_ids"].tolist() == [[0, 1, 0], [0, 0, 0]]
    assert [part["labels"].tolist() for part in (first, second)] == [[2, 1], [-100, -100]]
    assert "attention_mask" not in first
    words = torch.tensor([[2, -100, 1, -100, 0], [1, -100, -100, -100, -100]])
    parts = [Part(index, 2).of({**rows, "labels": words})["labels"] for index in range(2)]
    assert torch.cat(parts, dim=1).tolist() == [[2, -100, 1, -100, 0, -100], [1, -100, -100, -100, -100, -100]]


SMALL = {"num_hidden_layers": 2}
BY_KIND = {
    "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def on_meta(kind: str, attention: str = "sdpa", **fields: Any) -> Any:
    config = CONFIG_MAPPING[kind](**{**SMALL, **fields})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2", "olmo2", "phi3", "smollm3"])
def test_plain_families_attend_in_full(kind: str) -> None:
    assert attends_in_full(on_meta(kind, "eager"))


@pytest.mark.parametrize(("kind", "why"), TABLES["LONGER"])
def test_others_are_checked_on_longer_rows(kind: str, why: str) -> None:
    layers = {"num_layers": 2, "attention_types": [[["global", "local"], 1]]} if kind == "gpt_neo" else {}
    assert not attends_in_full(on_meta(kind, "eager", **layers)), why


@pytest.mark.parametrize(
    ("kind", "fields", "found"),
    [
        ("mistral", {"sliding_window": None}, True),
        # Its file does not read the kinds of layers.
        ("mistral", {"sliding_window": 40, "layer_types": ["full_attention"] * 2}, False),
        ("phi3", {"sliding_window": 40, "layer_types": ["full_attention"] * 2}, False),
        ("olmo3", {"layer_types": ["full_attention"] * 2, "rope_parameters": BY_KIND}, False),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, False),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, True),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, False),
    ],
)
def test_the_configuration_decides(kind: str, fields: dict[str, Any], found: bool) -> None:
    assert attends_in_full(on_meta(kind, **fields)) == found


def test_code_that_is_not_transformers_own_is_not_known() -> None:
    class Mine(LlamaForCausalLM):  # as a file next to the weights has it
        pass

    model = llama("sdpa")
    assert attends_in_full(model)
    model.__class__ = Mine
    assert not attends_in_full(model)


def test_kernels_that_work_in_blocks_of_tokens_need_longer_rows() -> None:
    model = llama("sdpa")
    model.config._attn_implementation = "flex_attention"
    assert not attends_in_full(model)


def test_a_parameter_that_meets_several_tokens_is_found() -> None:
    model = llama("sdpa")
    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    assert not attends_in_full(model)
