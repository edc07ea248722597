"""Reads the settings that `accelerate launch` put into the environment, and checks them against the arguments.

accelerate_config.py reads the same settings from an Accelerate config's file.
"""

from __future__ import annotations

import os

from accelerate.utils import GradientAccumulationPlugin

from toolkit.errors import BadInputError
from toolkit.sharding.accelerate_config import OTHER_AXES, refuse_other_axes
from toolkit.sharding.offload import OffloadSettings, parse_offload
from toolkit.sharding.plan.strategy import DEFAULT_STRATEGY, OFFLOAD, Strategy, asks_for_offload, parse_strategy

STRATEGY_VARIABLE = "FSDP_SHARDING_STRATEGY"
"""Holds `fsdp_config.fsdp_sharding_strategy` of the Accelerate config. Accelerate ignores it with FSDP version 2."""


def resolve_strategy(asked: str | None) -> Strategy:
    """Returns the strategy of the argument, of the Accelerate config, or else the default.

    Raises:
        BadInputError: if a strategy is unknown, or the argument and the Accelerate config contradict each other.
    """
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
    """Returns the offload settings of the arguments and the Accelerate config, or None without offload.

    Args:
        strategy: the strategy's text, which may end with `+offload`.
        offload: `optimizer`, `none` or the settings. None leaves it to `strategy` and the Accelerate config.

    Raises:
        BadInputError: if one asks for offload and the other refuses it, or the word is unknown.
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
    """Returns the size of a mesh axis (`dp_shard`) in the Accelerate config, or None if it is not set.

    Raises:
        BadInputError: if it is not a positive integer.
    """
    size = os.environ.get(f"PARALLELISM_CONFIG_{axis.upper()}_SIZE")
    if size is not None and not (size.isdecimal() and int(size) > 0):
        raise BadInputError(f"parallelism_config_{axis}_size is {size!r}; needs a number of at least 1")
    return None if size is None else int(size)


def refuse_configured_axes() -> None:
    """Refuses axes of the Accelerate config that the backend does not run.

    Raises:
        BadInputError: if one has a size.
    """
    refuse_other_axes({axis: configured_size(axis) for axis in OTHER_AXES}, "parallelism_config_{}_size")


def accumulation_plugin(steps: int) -> GradientAccumulationPlugin:
    """Returns Accelerate's plugin for accumulation over `steps` micro-batches.

    Raises:
        BadInputError: if the Accelerate config asks for another number.
    """
    configured = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    if configured not in (None, "1", "auto", str(steps)):
        raise BadInputError(
            f"training.gradient_accumulation_steps is {steps}, but the Accelerate config's gradient_accumulation_steps "
            f"is {configured}; remove it from the Accelerate config"
        )
    # Every optimizer step has all its micro-batches, so Accelerate need not know where the data ends.
    return GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=False)


def refuse_stock_settings() -> None:
    """Refuses keys of `fsdp_config` that the sharding backend would ignore.

    Raises:
        BadInputError: if the Accelerate config sets `fsdp_offload_params`.
    """
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise BadInputError("fsdp_config.fsdp_offload_params: not supported by the sharding backend; set it to false")
