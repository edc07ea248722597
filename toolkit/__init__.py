"""Fine-tune Hugging Face models with Accelerate, from a laptop to many GPUs.

    from toolkit import Recipe, finetune
    result = finetune(Recipe.load("quickstart", ["training.max_steps=50"]))

Names are loaded on first use: importing the package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.planning.table import plan
    from toolkit.recipe.recipe import Recipe
    from toolkit.run.outcome import FinetuneResult
    from toolkit.run.run import finetune
    from toolkit.sharding.plugin import ShardingMesh, ShardingPlugin, sharding_kwargs

__version__ = "0.1.0"

_HOMES = {
    "Recipe": "toolkit.recipe.recipe",
    "finetune": "toolkit.run.run",
    "FinetuneResult": "toolkit.run.outcome",
    "plan": "toolkit.planning.table",
    "ShardingMesh": "toolkit.sharding.plugin",
    "ShardingPlugin": "toolkit.sharding.plugin",
    "sharding_kwargs": "toolkit.sharding.plugin",
}

__all__ = [
    "FinetuneResult",
    "Recipe",
    "ShardingMesh",
    "ShardingPlugin",
    "__version__",
    "finetune",
    "plan",
    "sharding_kwargs",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
