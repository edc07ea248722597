"""Every causal language model of transformers in bf16: types, logits and gradients are those of its own loading."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.bf16_models import save_tiny
from support.every_model import causal_kinds
from support.ranks import run_on_ranks
from test_precision import compare, sharded

NUM_BATCHES = 6
"""Each of about 27 models, which share one spawn of the ranks."""

REFUSED = {"xlm": "MultiHeadAttention fills a cache although use_cache is off"}
"""With checkpoints, by name."""


def differing(folders: list[tuple[str, str]]) -> list[str]:
    """What is not as transformers has it, with and without checkpoints of all blocks."""
    found = []
    for kind, folder in folders:
        for checkpointed in (False, True):
            case = (kind, "zero3", 1, checkpointed, "by_micro_batch")
            try:
                compare(case, *sharded(folder, case))
            except Exception as error:  # the next models are tested all the same
                if checkpointed and kind in REFUSED and REFUSED[kind] in str(error):
                    continue
                found.append(f"{kind}{', checkpointed' * checkpointed}: {type(error).__name__}: {error}"[:400])
    return found


@pytest.mark.grid
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_every_causal_model_computes_in_bf16_as_transformers_does(batch: int, tmp_path: Path) -> None:
    kinds = causal_kinds()[batch::NUM_BATCHES]
    for kind in kinds:
        save_tiny(kind, tmp_path / kind)
    folders = [(kind, str(tmp_path / kind)) for kind in kinds]
    for found in run_on_ranks(differing, 2, folders):
        assert not found, "\n".join(found)
