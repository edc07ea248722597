"""Reads what `accelerate launch` put into the environment; checks it against the arguments, and this host's address.

accelerate_config.py reads the same settings from an Accelerate config's file.
"""

from __future__ import annotations

import ipaddress
import os
import socket

from accelerate.utils import GradientAccumulationPlugin

from toolkit.errors import BadInputError
from toolkit.sharding.accelerate_config import (
    OFFLOADED_PARAMS,
    OTHER_AXES,
    STRATEGY_KEYS,
    refuse_other_axes,
    strategy_word,
)
from toolkit.sharding.offload import OffloadSettings, parse_offload
from toolkit.sharding.plan.strategy import (
    DEFAULT_STRATEGY,
    OFFLOAD,
    Strategy,
    agreed_tensor,
    asks_for_offload,
    parse_strategy,
)

STRATEGY_VARIABLE = "FSDP_SHARDING_STRATEGY"
"""Holds `fsdp_config.fsdp_sharding_strategy` of the Accelerate config. Accelerate ignores it with FSDP version 2."""

THREADS_VARIABLE = "OMP_NUM_THREADS"

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


def settle_threads() -> None:
    """Makes OMP_NUM_THREADS one number, as Accelerate reads it; OpenMP takes a list, and ignores what is none."""
    text = os.environ.get(THREADS_VARIABLE)
    if text is None:
        return
    outermost = text.partition(",")[0].strip()
    if outermost.isdecimal() and int(outermost) > 0:
        os.environ[THREADS_VARIABLE] = outermost
    else:
        del os.environ[THREADS_VARIABLE]


def resolve_strategy(asked: str | None) -> Strategy:
    """Returns the strategy of the argument, of the Accelerate config, or else the default.

    Raises:
        BadInputError: if a strategy is unknown, or the argument and the Accelerate config contradict each other.
    """
    variables = {key: os.environ.get(key.upper()) for key in STRATEGY_KEYS}
    configured = strategy_word(variables)
    if asked is None:
        return parse_strategy(configured or DEFAULT_STRATEGY, "fsdp_config.fsdp_sharding_strategy")
    strategy = parse_strategy(asked, "sharding.strategy")
    if configured is not None:
        other = parse_strategy(configured, "fsdp_config.fsdp_sharding_strategy")
        if other != strategy:
            word, _, reshards = STRATEGY_KEYS
            key = f"{word} ({word.upper()})" if variables[word] == configured else f"{reshards}: false"
            raise BadInputError(
                f"sharding.strategy is {strategy.name}, but the Accelerate config's fsdp_config.{key} is {other.name}; "
                "remove one of them or make them agree"
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


def resolve_tensor(asked: int | None) -> int:
    """Returns the ranks of a tensor group, of the argument or of the Accelerate config, or else 1.

    Args:
        asked: as the recipe's `sharding.tensor`; None and 1 leave it to the Accelerate config.

    Raises:
        BadInputError: if the argument and the Accelerate config contradict each other.
    """
    return agreed_tensor(asked, configured_size("tp"))


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
    variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    configured = os.environ.get(variable)
    if configured not in (None, "1", "auto", str(steps)):
        raise BadInputError(
            f"training.gradient_accumulation_steps is {steps}, but {variable} of the environment is {configured}: an "
            f"Accelerate config's gradient_accumulation_steps, or left over; remove it from the config, or unset it"
        )
    # Every optimizer step has all its micro-batches, so Accelerate need not know where the data ends.
    return GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=False)


def refuse_stock_settings() -> None:
    """Refuses settings of the Accelerate config that the sharding backend would ignore.

    Raises:
        BadInputError: if the Accelerate config sets `fsdp_offload_params`, or is for another backend.
    """
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise BadInputError(OFFLOADED_PARAMS)
    for backend in ("DEEPSPEED", "MEGATRON_LM"):
        variable = f"ACCELERATE_USE_{backend}"
        if (found := os.environ.get(variable, "false")).lower() == "true":
            raise BadInputError(
                f"{variable} of the environment is {found}, but the sharding backend runs under FSDP: an Accelerate "
                f"config's distributed_type {backend}, or left over; start with another config "
                "(`toolkit recipes configs` lists some), or unset it"
            )


def require_launcher() -> None:
    """Raises BadInputError for a number of ranks that no launcher has set, but another program has left behind."""
    if (size := os.environ.get("WORLD_SIZE", "1")) != "1" and "RANK" not in os.environ:
        raise BadInputError(
            f"WORLD_SIZE is {size}, but without RANK: no launcher has started this process; remove it from the "
            "environment, or start by `toolkit train`, `accelerate launch` or torchrun"
        )


def require_reachable_host() -> None:
    """Checks that the other hosts of a run can reach this one by its name.

    gloo announces the address of this host's name. Debian and Ubuntu set it to 127.0.1.1 in /etc/hosts. Another host
    then looks for the rank on itself, and the run hangs until it fails with "connection refused".

    Raises:
        BadInputError: if the run has several hosts and the name has no address or a loopback address.
    """
    if not _spans_hosts() or os.environ.get(INTERFACE_VARIABLE):
        return
    name = socket.gethostname()
    address = _address_of(name)
    if address is not None and not ipaddress.ip_address(address).is_loopback:
        return
    found = "to no address" if address is None else f"to {address}, which is this host alone"
    raise BadInputError(
        f"the name of this host, {name}, leads {found}, so that the other hosts cannot reach its ranks; set "
        f"{INTERFACE_VARIABLE} to the interface that joins the hosts (`ip -brief address` lists them), on GPUs "
        "NCCL_SOCKET_IFNAME as well, or give the name its own address in /etc/hosts"
    )


def _spans_hosts() -> bool:
    """Returns whether the launcher has started ranks on other hosts."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    # Two launchers on one host meet there, as a rehearsal does.
    return world_size > on_host and not _is_loopback(os.environ.get("MASTER_ADDR", "localhost"))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _address_of(name: str) -> str | None:
    """Returns the address that gloo would announce, or None if the name does not resolve."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None
