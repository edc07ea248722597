"""Makes an overflow of fp16 that one rank finds an overflow of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def share_overflows(scaler: Any) -> None:
    """Makes the ranks skip the same steps and keep the same loss scale.

    torch's `GradScaler` asks the ranks among which the first gradient is sharded: one replica of `hybrid`, under `ddp`
    no other rank. A replica whose reduced gradient alone is not finite would leave out its step and lower its scale,
    while the others go on: from then on their weights differ.

    Args:
        scaler: a `torch.amp.GradScaler`, or None without fp16.
    """
    if scaler is None or not dist.is_initialized() or dist.get_world_size() == 1 or "_unscale_grads_" in vars(scaler):
        return
    unscale = scaler._unscale_grads_

    def unscale_for_all(*args: Any) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = unscale(*args)
        for found_inf in found.values():
            dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return found

    scaler._unscale_grads_ = unscale_for_all
