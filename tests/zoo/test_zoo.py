"""Types of transformers with what we offer: twelve that cover the mechanisms, and the table of all against a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zoo.grid import FEATURES, RESULTS, judged
from zoo.kinds import kinds_of

QUICK = [
    ("classification", "fnet"),  # mixes padding into the text
    ("classification", "xlnet"),  # reads the last position
    ("classification", "jamba"),  # makes a cache that it cannot use
    ("classification", "canine"),  # has no table of words
    ("tagging", "bert"),
    ("preference", "mamba"),  # takes no positions
    ("preference", "gpt_oss"),  # takes them, and rows that share a sample see each other
    ("reward", "bloom"),
    ("reward", "llama"),
    ("lora", "mamba"),  # layers that peft forbids
    ("lora", "jamba"),
    ("plain", "llama"),
    ("shared_rows", "ctrl"),  # scales in place what is embedded
    ("by_block", "ctrl"),
    ("bf16", "jamba"),
    ("bf16", "glm4_moe"),  # its authors keep the bias of its router in float32
    ("checkpointing", "llama4_text"),  # its router tells logits alone, and the experts are found from them
]
"""Feature and type."""

RAN: dict[str, dict[str, str]] = json.loads(RESULTS.read_text(encoding="utf-8"))
PARTS = 12
"""Of a feature's types, each about ten minutes on two cores."""


def outcome(text: str) -> str:
    """Without figures and words: right, refused, wrong, crashed or untried."""
    return text.partition(":")[0]


@pytest.mark.parametrize(("feature", "kind"), QUICK)
def test_types_that_cover_the_mechanisms_train_as_each_row_alone(feature: str, kind: str, tmp_path: Path) -> None:
    assert judged(kind, FEATURES[feature], tmp_path) == "right"


@pytest.mark.parametrize("feature", ["by_block", "shared_rows"])
def test_xlm_which_fills_a_cache_is_refused_before_its_first_step(feature: str, tmp_path: Path) -> None:
    said = judged("xlm", FEATURES[feature], tmp_path)
    assert outcome(said) == "refused"
    assert "XLMWithLMHeadModel" in said or "MultiHeadAttention fills a cache" in said
    assert not list((tmp_path / "run").glob("checkpoint*"))


@pytest.mark.parametrize("feature", ["classification", "tagging"])
def test_squeezebert_which_runs_blocks_without_a_call_needs_ddp(feature: str, tmp_path: Path) -> None:
    """Its encoder calls `layer.forward`. A tagger does not use its pooler, of which DDP has to know."""
    assert judged("squeezebert", FEATURES[feature], tmp_path / "sharded") == (
        "refused: sharding.strategy: SqueezeBertModule is run by its forward and not by a call, so that no hook of "
        "FSDP2 gathers its weights; set sharding.strategy=ddp"
    )
    whole = replace(FEATURES[feature], changes={"sharding": {"strategy": "ddp"}})
    assert judged("squeezebert", whole, tmp_path / "whole") == "right"


@pytest.mark.grid
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("feature", FEATURES)
def test_the_table_is_what_comes_out(feature: str, part: int, tmp_path: Path) -> None:
    found = {}
    for kind in kinds_of(FEATURES[feature].objective)[part::PARTS]:
        if kind in RAN.get(feature, {}):
            found[kind] = outcome(judged(kind, FEATURES[feature], tmp_path / kind))
    assert found == {kind: outcome(RAN[feature][kind]) for kind in found}


@pytest.mark.first
def test_the_table_names_features_and_types_that_there_are() -> None:
    assert RAN.keys() <= FEATURES.keys()
    for feature, outcomes in RAN.items():
        assert outcomes.keys() <= set(kinds_of(FEATURES[feature].objective))
        assert {outcome(text) for text in outcomes.values()} <= {"right", "refused", "wrong", "crashed", "untried"}
        assert all(": " in text for text in outcomes.values() if text != "right"), "has its reason"
