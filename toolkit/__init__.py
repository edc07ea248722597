"""Fine-tune Hugging Face models with Accelerate, from a laptop to many GPUs.

    from toolkit import Recipe, finetune
    result = finetune("quickstart", {"training.max_steps": 50})
    result = finetune(Recipe.load("quickstart", ["training.max_steps=50"]))     # the same
    export("outputs/notes", "notes-400", checkpoint=400)
    text = generate("outputs/notes", "The king", max_new_tokens=40)
    right = evaluate("outputs/notes", "questions.jsonl").accuracy

Names are loaded on first use: importing the package imports no torch.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.checkpoint.consolidate import export_run as export
    from toolkit.generation.api import evaluate, generate, sample
    from toolkit.planning.table import plan
    from toolkit.recipe.recipe import Recipe
    from toolkit.run.run import finetune
    from toolkit.run.shown.outcome import FinetuneResult
    from toolkit.sharding.plugin import ShardingMesh, ShardingPlugin, sharding_kwargs
    from toolkit.training.extension import Extension

__version__ = "0.3.0"

_NOISE = {
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",
    "torchao": "Failed to load ",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
}
"""Logger -> what it says when it is imported, by transformers or peft, and its library does not suit this machine."""


def _without(text: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: text not in record.getMessage()


for _logger, _text in _NOISE.items():
    logging.getLogger(_logger).addFilter(_without(_text))

_HOMES = {
    "Extension": "toolkit.training.extension",
    "FinetuneResult": "toolkit.run.shown.outcome",
    "Recipe": "toolkit.recipe.recipe",
    "ShardingMesh": "toolkit.sharding.plugin",
    "ShardingPlugin": "toolkit.sharding.plugin",
    "evaluate": "toolkit.generation.api",
    "export": "toolkit.checkpoint.consolidate:export_run",
    "finetune": "toolkit.run.run",
    "generate": "toolkit.generation.api",
    "plan": "toolkit.planning.table",
    "sample": "toolkit.generation.api",
    "sharding_kwargs": "toolkit.sharding.plugin",
}
"""Name -> its module, and its name there where that is another."""

__all__ = [
    "Extension",
    "FinetuneResult",
    "Recipe",
    "ShardingMesh",
    "ShardingPlugin",
    "__version__",
    "evaluate",
    "export",
    "finetune",
    "generate",
    "plan",
    "sample",
    "sharding_kwargs",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        module, _, own_name = _HOMES[name].partition(":")
        return getattr(importlib.import_module(module), own_name or name)
    raise AttributeError(f"module 'toolkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
