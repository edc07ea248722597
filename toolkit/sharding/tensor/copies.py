"""Compares, bit for bit, what several ranks of a tensor group hold whole: norms, and whatever else is not cut.

Their gradients are sums over the group, and each rank steps its own copy. Nothing else would notice if a sum was
lacking or a device computed wrongly: each rank would go on with a model of its own, and a save writes one rank's copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from toolkit import ranks
from toolkit.errors import TrainingError, counted
from toolkit.sharding.fsdp2.shards import local_tensor, tensor_dim, tensor_group

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as an element has."""

AT_ONCE = 2**20
"""Elements that are made integers of 64 bits at once."""


def require_alike(tensors: Mapping[str, torch.Tensor], when: str) -> None:
    """Compares the copies of whole tensors on the ranks of each tensor group. Collective over all ranks.

    Args:
        tensors: by name, of any shapes, in the same order on all ranks. Only DTensors that a group does not cut count.
        when: for the message, such as "after step 12".

    Raises:
        TrainingError: on every rank, if some differ. It names the first one and the ranks that hold it.
    """
    copies = {name: tensor for name, tensor in tensors.items() if _is_copied(tensor)}
    if not copies:  # on all ranks alike
        return
    digests, group = _digests(copies), _ranks_of_group(next(iter(copies.values())))
    # A short digest of all, and those of each only if a group has two.
    every = ranks.gather_objects((group, hashlib.sha256(repr(digests).encode()).hexdigest()))
    if any(digest != every[group[0]][1] for group, digest in every):
        _raise_difference(ranks.gather_objects((group, digests)), list(copies), when)


def _is_copied(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and tensor_group(tensor) is not None and tensor_dim(tensor) is None


def _ranks_of_group(tensor: torch.Tensor) -> tuple[int, ...]:
    assert isinstance(tensor, DTensor)
    group = tensor_group(tensor)
    assert group is not None
    return tuple(dist.get_process_group_ranks(group))


def _raise_difference(every: list[tuple[tuple[int, ...], list[int]]], names: list[str], when: str) -> None:
    found: dict[str, tuple[int, ...]] = {}
    for group, digests in every:
        for name, own, first in zip(names, digests, every[group[0]][1], strict=True):
            if own != first:
                found.setdefault(name, group)
    name = next(name for name in names if name in found)
    others = f", and {counted(len(found) - 1, 'other tensor')}" if len(found) > 1 else ""
    raise TrainingError(
        f"{name}{others}: ranks {', '.join(map(str, found[name]))} of a tensor group (sharding.tensor) hold different "
        f"copies {when}, which began alike, so they no longer train one model. Nothing was written; earlier "
        "checkpoints stay. Check these devices, or code of your own that changes weights on one rank, and start the "
        "same command: it goes on from the last checkpoint, if there is one"
    )


def _digests(copies: Mapping[str, torch.Tensor]) -> list[int]:
    """Returns 64 bits for each tensor. A single element that differs always changes them."""
    found = [_digest(local_tensor(tensor).detach()) for tensor in copies.values()]
    on_devices = {total.device for total in found}
    # One wait for each device, and not for each tensor.
    told = {device: iter(torch.stack([t for t in found if t.device == device]).tolist()) for device in on_devices}
    return [next(told[total.device]) for total in found]


def _digest(local: torch.Tensor) -> torch.Tensor:
    """Returns the sum over elements of their bits times 2 i + 1, modulo 2^64, for a tensor of any shape."""
    words = local.contiguous().view(-1).view(WORDS[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for start in range(0, len(words), AT_ONCE):
        part = words[start : start + AT_ONCE].long()
        odd = torch.arange(2 * start + 1, 2 * (start + len(part)), 2, device=local.device)
        total += (part * odd).sum()
    return total
