"""Positions that models of three axes are given: of text rows that share a sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.texts import make_texts
from support.tiny_multimodal import save_multimodal
from transformers import AutoModelForImageTextToText

from toolkit.data.samples.samples import sample_of, stack
from toolkit.objectives.causal_lm import CausalLM

ROWS = [list(range(10, 19)), list(range(30, 35)), list(range(50, 63))]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "glm4v", "qwen3_vl"])
def test_rows_that_share_a_sample_have_the_logits_of_each_alone(kind: str, tmp_path: Path) -> None:
    model: Any = AutoModelForImageTextToText.from_pretrained(save_multimodal(kind, tmp_path, make_texts(20)))
    model.eval()
    batch = stack([sample_of([(row, [True] * len(row)) for row in ROWS], 32, 0)])
    objective = CausalLM(model, packed=True)
    with torch.no_grad():
        together = objective.logits(model, objective.on_host(batch))[0]
        alone = torch.cat([model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in ROWS])
    torch.testing.assert_close(together[: len(alone)], alone, rtol=1e-5, atol=1e-6)
