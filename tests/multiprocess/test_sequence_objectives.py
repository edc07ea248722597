"""The check before the first step of rows that ranks share finds numbers of documents that are not exchanged.

test_all_pairs.py compares the steps and evaluations of every objective on shared rows with a plain loop.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_on_ranks
from transformers import AutoModelForSequenceClassification, LlamaConfig

from toolkit.data.samples.sequence_parts import Part
from toolkit.errors import BadInputError
from toolkit.model.attention.attention import attend_by_heads
from toolkit.objectives.classification import SequenceClassification
from toolkit.objectives.losses import scores
from toolkit.objectives.reward import Reward
from toolkit.run.checks.whole_check import check_parts
from toolkit.sharding.parallel.sequence_parallel import form_groups, own_part

SIZES: dict[str, Any] = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
KINDS = {"reward": "numbers of documents differ by", "classification": "logits differ by"}
"""Objective -> what the check says."""


class Samples:
    """What the check asks of samples: pairs of documents in a row, or padded rows with a class each."""

    has_images = False

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def few(self, tokens: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(3)
        if self._kind == "classification":
            lengths = torch.tensor([31, 20])
            mask = (torch.arange(31) < lengths[:, None]).long()
            ids = torch.randint(1, 131, (2, 31), generator=draw) * mask
            return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([2, 0]), "lengths": lengths}
        lengths = torch.tensor([7, 16, 5, 19])
        ids = torch.randint(1, 131, (1, 47), generator=draw)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        return {
            "input_ids": ids,
            "labels": ids.masked_fill(positions < 3, -100),
            "position_ids": positions,
            "segments": torch.arange(4).repeat_interleave(lengths)[None],
            "lengths": torch.tensor([47]),
            "reference": torch.zeros(2, 2),
            "margin": torch.zeros(2),
        }


def checked(kind: str) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_labels=1 if kind == "reward" else 3)
    model = AutoModelForSequenceClassification.from_config(config).float().train()
    attend_by_heads(model)
    objective: Any = Reward(model, 0.05) if kind == "reward" else SequenceClassification(model, 3, None)
    part = Part(own_part(), dist.get_world_size())
    try:
        check_parts(model, objective, Samples(kind), part, torch.device("cpu"), False)
    except BadInputError as error:
        return str(error)
    return ""


def whole_and_broken() -> list[tuple[str, str]]:
    form_groups(dist.get_world_size())
    with pytest.MonkeyPatch.context() as patch:
        right = [checked(kind) for kind in KINDS]
        patch.setattr(scores, "summed_over_group", lambda mine: mine)
        return list(zip(right, map(checked, KINDS), strict=True))


def test_the_check_finds_numbers_of_documents_that_are_not_exchanged() -> None:
    first, second = run_on_ranks(whole_and_broken, 2)
    assert first == second
    for (right, broken), told in zip(first, KINDS.values(), strict=True):
        assert right == ""
        assert told in broken
