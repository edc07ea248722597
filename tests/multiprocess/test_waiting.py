"""While rank 0 works alone the others wait over the host, not inside a collective that gives up."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from support.ranks import alone, run_on_ranks

PATIENCE_SECONDS = 3
WORK_SECONDS = 6


@alone
def slow_on_rank_zero(meeting: str, folder: str) -> float:
    """Loads random weights and exports them, each of which takes rank 0 longer than a collective waits."""
    import torch
    import torch.distributed as dist
    from support.tiny import llama

    from toolkit import ranks
    from toolkit.checkpoint import export as exports
    from toolkit.model.weights.weights import Fit, RankZeroWeights

    rank = int(os.environ["RANK"])
    limit = timedelta(seconds=PATIENCE_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=limit)
    model = llama()

    def slowly(*args: Any) -> Any:
        time.sleep(WORK_SECONDS)
        return model

    weights = RankZeroWeights(slowly)
    found = weights.read("model.norm.weight", torch.empty(32), slice(0, 32))
    settings = exports.ExportSettings(torch.float32, 2**30, merge=False)
    tokenizer: Any = mock.Mock(pictures_of=None)
    with mock.patch.object(exports, "write_model_files", slowly):
        exports.write_export(exports.source_of_run(model, Fit(), tokenizer, settings), Path(folder), settings, "")
    kept = ranks.alone_on_first_rank(lambda: rank)
    assert kept == (0 if rank == 0 else None)
    dist.barrier()
    return float(found.sum())


def test_the_others_wait_while_rank_zero_loads_and_exports(tmp_path: Path) -> None:
    assert run_on_ranks(slow_on_rank_zero, 2, str(tmp_path / "meeting"), str(tmp_path / "export")) == [32.0, 32.0]
    assert (tmp_path / "export/model.safetensors").is_file()
