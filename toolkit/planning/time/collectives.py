"""Times an all-gather among ranks on this machine; `calibrate` starts it once per rank.

python -m toolkit.planning.time.collectives cpu 2 FOLDER RANK
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

GATHERED_BYTES = {"cuda": 2**28, "cpu": 2**24}
"""Bytes of the whole tensor, as of a large unit."""


def all_gather_rate(device_type: str, ranks: int, folder: Path, rank: int) -> float:
    """Returns the bytes that this rank sends per second.

    Args:
        device_type: `cuda` over NCCL, a GPU for each rank; `cpu` over gloo.
        folder: folder of the file at which the ranks meet.
    """
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=(folder / "meeting").as_uri(), rank=rank, world_size=ranks)
    # One buffer for all timings: allocation is not part of a collective.
    mine = torch.empty(GATHERED_BYTES[device_type] // ranks, dtype=torch.uint8, device=device_type)
    whole = torch.empty(mine.numel() * ranks, dtype=torch.uint8, device=device_type)
    timer = Timer("run()", globals={"run": lambda: dist.all_gather_into_tensor(whole, mine)})
    # The first call builds the communicator.
    timer.timeit(2)
    best = min(timer.timeit(1).mean for _ in range(5))
    dist.destroy_process_group()
    return mine.numel() * (ranks - 1) / best


if __name__ == "__main__":
    print(all_gather_rate(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])))
