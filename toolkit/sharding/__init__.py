"""The sharding backend: strategy, units, and what Accelerate sees of them."""

from toolkit.sharding.checkpointing import Checkpointing, checkpoint_blocks
from toolkit.sharding.compiling import Compilation, compile_blocks
from toolkit.sharding.memory import MemoryReport, memory_report
from toolkit.sharding.offload import OffloadSettings
from toolkit.sharding.plugin import ShardingMesh, ShardingPlugin, sharding_kwargs
from toolkit.sharding.units import plan_units

__all__ = [
    "Checkpointing",
    "Compilation",
    "MemoryReport",
    "OffloadSettings",
    "ShardingMesh",
    "ShardingPlugin",
    "checkpoint_blocks",
    "compile_blocks",
    "memory_report",
    "plan_units",
    "sharding_kwargs",
]
