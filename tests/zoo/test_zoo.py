"""Types of transformers with what we offer: twelve that cover the mechanisms, and the table of all against a run."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from support.cases import cases

from zoo.grid import CHECKPOINTED, FEATURES, RESULTS, Feature, Job, all_judged, judged
from zoo.kinds import kinds_of

QUICK = [(feature, kind) for feature, kind in cases(__file__)["QUICK"]]
"""Feature and type."""

RAN: dict[str, dict[str, str]] = json.loads(RESULTS.read_text(encoding="utf-8"))
PARTS = 12
"""Of a feature's types, each about ten minutes on two cores."""


def outcome(text: str) -> str:
    """Without figures and words: right, refused, wrong, crashed or untried."""
    return text.partition(":")[0]


def test_types_that_cover_the_mechanisms_train_as_each_row_alone_or_are_refused(tmp_path: Path) -> None:
    """XLM fills a cache. SqueezeBERT's encoder calls `layer.forward`; its tagger does not use its pooler."""
    asked = [*QUICK, *((feature, "xlm") for feature in ("by_block", "shared_rows"))]
    asked += [(feature, "squeezebert") for feature in ("classification", "tagging")]
    jobs: list[Job] = [(kind, FEATURES[feature], tmp_path / f"{feature}-{kind}") for feature, kind in asked]
    by_ddp = [feature for feature, kind in asked if kind == "squeezebert"]
    changes = {"sharding": {"strategy": "ddp"}}
    jobs += [("squeezebert", replace(FEATURES[f], changes=changes), tmp_path / f"{f}-by-ddp") for f in by_ddp]
    found = dict(zip([*asked, *by_ddp], all_judged(jobs), strict=True))
    for feature in ("by_block", "shared_rows"):
        said = found.pop((feature, "xlm"))
        assert outcome(said) == "refused"
        assert "XLMWithLMHeadModel" in said or "MultiHeadAttention fills a cache" in said
        assert not list((tmp_path / f"{feature}-xlm/run").glob("checkpoint*")), "before its first step"
    for feature in by_ddp:
        assert found.pop((feature, "squeezebert")) == (
            "refused: sharding.strategy: SqueezeBertModule is run by its forward and not by a call, so that no hook of "
            "FSDP2 gathers its weights; set sharding.strategy=ddp"
        )
    assert {name: said for name, said in found.items() if said != "right"} == {}


GATES = 0.01
"""Tolerance for gates, whose gradients are tiny: AdamW makes whole steps of them, and on some processors rounding moves
one weight by 0.004 of the largest change."""

LOOPED = {
    "zero2": {"strategy": "zero2"},
    "zero3": {},
    "checkpointed": CHECKPOINTED,
    "offload": {"offload": "optimizer"},
    "by block": {"accumulate": "by_block", **CHECKPOINTED},
    "by block, offload": {"accumulate": "by_block", "offload": "optimizer", **CHECKPOINTED},
}
"""Settings of `sharding` for blocks that a forward runs several times."""


def test_a_step_of_blocks_in_a_loop_is_the_plain_one_or_is_refused(tmp_path: Path) -> None:
    """One: float32 and float64 part in the next. Gates of Inkling's blocks have no part in their first pass."""
    jobs: list[Job] = []
    for kind, (name, fields), norm in product(("dory", "inkling2_loop_text"), LOOPED.items(), (1e9, None)):
        if norm or name == "offload":  # without clipping units are stepped in backward
            changes = {"sharding": {"strategy": "zero3"} | fields, "training": {"max_grad_norm": norm, "max_steps": 1}}
            jobs.append(
                (kind, Feature(num_ranks=2, changes=changes, tolerance=GATES), tmp_path / f"{kind} {name} {norm}")
            )
    found = {folder.name: said for (_, _, folder), said in zip(jobs, all_judged(jobs), strict=True)}
    refused = [found.pop(f"{kind} offload None") for kind in ("dory", "inkling2_loop_text")]
    assert all("got two gradients before one step" in said for said in refused)
    assert {name: said for name, said in found.items() if said != "right"} == {}


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
