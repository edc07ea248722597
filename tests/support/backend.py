"""A stock `Accelerator` with the toolkit's two arguments, in a process that may have had others."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin

from support.ranks import meet
from toolkit.sharding import sharding_kwargs
from toolkit.sharding.launched import accumulation_plugin
from toolkit.sharding.plugin import reset_accelerate


def accelerated(
    strategy: str,
    accumulation: int = 1,
    precision: str = "no",
    dynamo: TorchDynamoPlugin | None = None,
    **settings: Any,
) -> Any:
    """After the ranks have met, if the last run has taken their group down.

    Args:
        accumulation: micro-batches of a step, as `accelerator.accumulate` counts them.
        settings: other arguments of `sharding_kwargs`. By default a replica of `hybrid` has two ranks.
    """
    meet()
    reset_accelerate()
    sizes = {"shard_size": 2} if strategy == "hybrid" and "replicate_size" not in settings else {}
    return Accelerator(
        mixed_precision=precision,
        gradient_accumulation_plugin=accumulation_plugin(accumulation),
        dynamo_plugin=dynamo,
        **sharding_kwargs(strategy, **{**sizes, **settings}),
    )


def close(accelerator: Any) -> None:
    """Ends what `accelerated` began, the offload's thread with it."""
    if (plugin := accelerator.state.fsdp_plugin) is not None:
        plugin.close()
    accelerator.end_training()
