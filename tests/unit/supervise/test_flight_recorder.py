"""What the flight recorder says, from a dump that was recorded, and from a recorder that does not answer."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from toolkit.supervise import flight_recorder

RECORDED = {
    "version": "2.10",
    "entries": [
        {"process_group": ["0", "default_pg"], "profiling_name": "nccl:all_gather", "input_sizes": [[3]],
         "collective_seq_id": 5, "state": "completed"},
        {"process_group": ["1", "shards"], "profiling_name": "nccl:reduce_scatter", "input_sizes": [[8, 2]],
         "collective_seq_id": 41, "state": "started"},
        {"process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", "input_sizes": [[]],
         "collective_seq_id": 6, "state": "scheduled"},
    ],
}  # fmt: skip
"""As torch 2.13 gives it, without what is not read."""


class Recorder:
    def __init__(self, answer: Any) -> None:
        setattr(self, flight_recorder.DUMPS[0], answer)


def test_the_last_collective_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_distributed_c10d", Recorder(lambda *_: json.dumps(RECORDED).encode()))
    assert flight_recorder.last_collectives().splitlines() == [
        "Last collectives, by torch's flight recorder:",
        "  ['0', 'default_pg']: nccl:all_reduce of [[]], number 6 of its group, scheduled",
        "  ['1', 'shards']: nccl:reduce_scatter of [[8, 2]], number 41 of its group, started",
    ]


def test_a_recorder_that_has_nothing_fails_or_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "DUMP_SECONDS", 0.1)

    def fail(*_: Any) -> bytes:
        raise RuntimeError("no backend")

    for answer in (lambda *_: b"{}", fail, lambda *_: time.sleep(1.0)):
        monkeypatch.setattr(torch._C, "_distributed_c10d", Recorder(answer))
        assert flight_recorder.last_collectives() == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_records_by_itself() -> None:
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3, device="cuda"))
        torch.cuda.synchronize()
        assert "nccl:all_reduce of [[3]], number 1 of its group" in flight_recorder.last_collectives()
    finally:
        dist.destroy_process_group()
