"""The sharding backend: strategies, FSDP2 units, and the objects that stock Accelerate sees.

Names are imported on first use, so that a launcher can read a strategy or a config without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.sharding.blocks.checkpointing import Checkpointing, checkpoint_blocks
    from toolkit.sharding.blocks.compiling import Compilation, compile_blocks
    from toolkit.sharding.offload import OffloadSettings
    from toolkit.sharding.plan.units import plan_units
    from toolkit.sharding.plugin import ShardingMesh, ShardingPlugin, sharding_kwargs

_HOMES = {
    "Checkpointing": "blocks.checkpointing",
    "Compilation": "blocks.compiling",
    "OffloadSettings": "offload",
    "ShardingMesh": "plugin",
    "ShardingPlugin": "plugin",
    "checkpoint_blocks": "blocks.checkpointing",
    "compile_blocks": "blocks.compiling",
    "plan_units": "plan.units",
    "sharding_kwargs": "plugin",
}
"""Name -> its module in this package."""

__all__ = [
    "Checkpointing",
    "Compilation",
    "OffloadSettings",
    "ShardingMesh",
    "ShardingPlugin",
    "checkpoint_blocks",
    "compile_blocks",
    "plan_units",
    "sharding_kwargs",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
