"""The sharding backend: strategy, units, and what Accelerate sees of them."""

from toolkit.sharding.plugin import ShardingMesh, ShardingPlugin, sharding_kwargs
from toolkit.sharding.units import plan_units

__all__ = ["ShardingMesh", "ShardingPlugin", "plan_units", "sharding_kwargs"]
