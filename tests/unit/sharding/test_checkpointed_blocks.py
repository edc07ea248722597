"""Which blocks run again in backward."""

from __future__ import annotations

import pytest
from support.tiny import llama

from toolkit.sharding import Checkpointing, checkpoint_blocks, plan_units


@pytest.mark.parametrize(("every", "again"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3])])
def test_every_so_many_blocks_run_again_and_no_cache_is_filled_twice(every: int, again: list[int]) -> None:
    model = llama(num_hidden_layers=5, use_cache=True)
    checkpoint_blocks(model, plan_units(model), Checkpointing(every))
    assert [i for i, block in enumerate(model.model.layers) if "forward" in block.__dict__] == again
    assert not model.config.use_cache
