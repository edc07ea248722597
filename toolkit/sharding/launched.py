"""What `accelerate launch` put into this process's environment, and how it agrees with the arguments.

accelerate_config.py reads the same settings from an Accelerate config's file.
"""

from __future__ import annotations

import os

from accelerate.utils import GradientAccumulationPlugin

from toolkit.errors import BadInputError
from toolkit.sharding.offload import OffloadSettings, parse_offload
from toolkit.sharding.strategy import DEFAULT_STRATEGY, OFFLOAD, Strategy, asks_for_offload, parse_strategy

STRATEGY_VARIABLE = "FSDP_SHARDING_STRATEGY"
"""Carries `fsdp_config.fsdp_sharding_strategy` of the Accelerate config, unread, under FSDP version 2."""


def resolve_strategy(asked: str | None) -> Strategy:
    """The strategy of the argument and of the Accelerate config, which must not contradict each other."""
    configured = os.environ.get(STRATEGY_VARIABLE)
    if asked is None:
        return parse_strategy(configured or DEFAULT_STRATEGY, "fsdp_config.fsdp_sharding_strategy")
    strategy = parse_strategy(asked, "sharding.strategy")
    if configured is not None:
        other = parse_strategy(configured, "fsdp_config.fsdp_sharding_strategy")
        if other != strategy:
            raise BadInputError(
                f"sharding.strategy is {strategy.name}, but the Accelerate config's fsdp_config.fsdp_sharding_strategy "
                f"is {other.name}; remove one of them or make them agree"
            )
    return strategy


def resolve_offload(strategy: str | None, offload: str | OffloadSettings | None) -> OffloadSettings | None:
    """The offload of the arguments and of the Accelerate config; None: optimizer state stays on the device.

    Raises BadInputError if one asks for offload and the other refuses it.
    """
    configured = os.environ.get(STRATEGY_VARIABLE)
    in_text = asks_for_offload(strategy) or asks_for_offload(configured)
    settings = parse_offload(offload)
    if offload is not None and settings is None and in_text:
        place = "sharding.strategy" if asks_for_offload(strategy) else "fsdp_config.fsdp_sharding_strategy"
        raise BadInputError(f"sharding.offload is none, but {place} ends with {OFFLOAD}; make them agree")
    if settings is None and in_text:
        settings = OffloadSettings()
    return settings


def configured_size(axis: str) -> int | None:
    """Size of a mesh axis in the Accelerate config's `parallelism_config`; None: it does not say."""
    size = os.environ.get(f"PARALLELISM_CONFIG_DP_{axis}_SIZE")
    return int(size) if size is not None else None


def accumulation_plugin(steps: int) -> GradientAccumulationPlugin:
    """Accumulation over `steps` micro-batches, whatever the launcher's environment says.

    Raises BadInputError if the Accelerate config asks for another number.
    """
    configured = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if configured not in (None, "1", "auto", str(steps)):
        raise BadInputError(
            f"training.gradient_accumulation_steps is {steps}, but the Accelerate config's gradient_accumulation_steps "
            f"is {configured}; remove it from the Accelerate config"
        )
    # Windows are whole, and no loader of Accelerate's is asked where the data ends.
    return GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=False)


def refuse_stock_settings() -> None:
    """Raises BadInputError for keys of `fsdp_config` that would do something else than they say."""
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise BadInputError("fsdp_config.fsdp_offload_params: not supported by the sharding backend; set it to false")
