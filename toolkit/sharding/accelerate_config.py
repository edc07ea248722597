"""Reads the keys of an Accelerate config file that `toolkit plan` and `toolkit verify` need (`--config`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import BadInputError
from toolkit.recipe.yaml_values import NOT_YAML, yaml_problem, yaml_value
from toolkit.sharding.plan.strategy import parse_strategy

PRECISIONS = ("no", "bf16", "fp16")
"""Allowed values of `mixed_precision`. Their types are in `apply.py`, which imports torch; a launcher needs none."""

DISTRIBUTED_TYPES = ("FSDP", "MULTI_GPU", "MULTI_CPU", "NO")
"""Values of `distributed_type` under whose launchers the sharding backend runs."""

OFFLOADED_PARAMS = (
    "fsdp_config.fsdp_offload_params: not supported by the sharding backend; set it to false. In a recipe, "
    "sharding.offload=optimizer keeps the optimizer's state on the host"
)

_LONG_ROWS = "In a recipe, sharding.sequence shares long rows among ranks"

OTHER_AXES = {
    "cp": ("context parallelism", _LONG_ROWS),
    "sp": ("sequence parallelism of DeepSpeed", _LONG_ROWS),
}
"""Axes of Accelerate's `ParallelismConfig` that the backend does not run, each with what to use instead."""


def refuse_other_axes(sizes: Mapping[str, int | None], spelling: str) -> None:
    """Refuses sizes of axes that the backend does not run.

    Args:
        sizes: the size of each axis of `OTHER_AXES`; None and 1 are not set.
        spelling: how the user writes the size of an axis, with `{}` for its name.

    Raises:
        BadInputError: if one is larger than 1.
    """
    for axis, size in sizes.items():
        if size not in (None, 1):
            what, instead = OTHER_AXES[axis]
            raise BadInputError(
                f"{spelling.format(axis)} is {size}, but the sharding backend has no {what}; remove it. {instead}"
            )


def refuse_dynamo(backend: object, where: str) -> None:
    """Refuses that Accelerate compiles the model: it wraps the whole of it, and what is wrapped cannot be exported.

    Args:
        backend: the value of `dynamo_backend`; None and `no` are not set.

    Raises:
        BadInputError: if it is set.
    """
    if backend not in (None, False) and str(backend).lower() != "no":
        raise BadInputError(
            f"{where} is {backend!r}, but Accelerate would compile the whole model, which then cannot be exported; "
            "remove it. In a recipe, training.compile=true compiles the blocks"
        )


STRATEGY_KEYS = ("fsdp_sharding_strategy", "fsdp_version", "fsdp_reshard_after_forward")
"""Keys of `fsdp_config` that say the strategy. The launcher hands them on in capitals."""


def strategy_word(found: Mapping[str, Any]) -> str | None:
    """Returns the strategy that an Accelerate config asks for, unchecked, or None if it leaves that to the recipe.

    Args:
        found: values by `STRATEGY_KEYS`; None is not set.
    """
    word = found.get("fsdp_sharding_strategy")
    # The launcher hands this on if its config says nothing, as under version 2, where another key says it.
    if word not in (None, "FULL_SHARD"):
        return str(word)
    version, reshards = (str(found.get(key)).lower() for key in STRATEGY_KEYS[1:])
    return "zero2" if (version, reshards) == ("2", "false") else None


def hybrid_options(replicate: int, shard: int) -> list[str]:
    """Returns options of `accelerate launch` that form `replicate` replicas of `shard` ranks each.

    Without the switch the launcher hands sizes on only if its config has some, too. With it, it needs to know of
    FSDP 2 before it has read its config.
    """
    sizes = ["--parallelism_config_dp_replicate_size", str(replicate), "--parallelism_config_dp_shard_size", str(shard)]
    return ["--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config", *sizes]


@dataclass(frozen=True)
class AccelerateConfig:
    """The values of a config file. Each property checks its value when it is read.

    Attributes:
        values: the parsed YAML mapping.
        origin: the path of the file, for error messages.
    """

    values: dict[str, Any]
    origin: str

    @property
    def num_processes(self) -> int | None:
        """Returns the number of processes, or None if the file does not set it.

        Raises:
            BadInputError: if it is not a positive integer.
        """
        return self._positive_int("num_processes", self.values.get("num_processes"))

    @property
    def mixed_precision(self) -> str | None:
        """Returns one of `PRECISIONS`, or None if the file does not set it.

        Raises:
            BadInputError: if the value is not one of `PRECISIONS`.
        """
        word = self.values.get("mixed_precision")
        if word is False:
            raise self.error("mixed_precision is no without quotes, which YAML takes for false; write 'no'")
        if word is not None and word not in PRECISIONS:
            raise self.error(f"mixed_precision is {word!r}; allowed are {', '.join(PRECISIONS)}")
        return word

    @property
    def strategy(self) -> str | None:
        """Returns the strategy's word, unchecked, or None if the file leaves it to the recipe.

        Raises:
            BadInputError: if `fsdp_config` is not a mapping.
        """
        return strategy_word(self._section("fsdp_config"))

    def size(self, axis: str) -> int | None:
        """Returns the ranks along an axis of the mesh (`dp_replicate`, `dp_shard`, `tp`), or None if it is not set.

        Raises:
            BadInputError: if it is not a positive integer, or `parallelism_config` is not a mapping.
        """
        key = f"parallelism_config_{axis}_size"
        return self._positive_int(f"parallelism_config.{key}", self._section("parallelism_config").get(key))

    def asks_for(self, key: str) -> bool:
        """Returns whether a key of `fsdp_config` is true, as a value or as text.

        Raises:
            BadInputError: if `fsdp_config` is not a mapping.
        """
        return str(self._section("fsdp_config").get(key)).lower() == "true"

    def check(self) -> None:
        """Checks every value that a run reads.

        Raises:
            BadInputError: if no run can have one of them.
        """
        _ = self.num_processes, self.mixed_precision, *map(self.size, ("dp_replicate", "dp_shard", "tp"))
        found = {**self.values, **self._section("dynamo_config")}
        refuse_dynamo(found.get("dynamo_backend", found.get("backend")), f"--config: {self.origin}: dynamo_backend")
        if self.strategy is not None:
            parse_strategy(self.strategy, f"--config: {self.origin}: fsdp_config.fsdp_sharding_strategy")

    def refuse_other_backends(self) -> None:
        """Refuses configs for another backend than FSDP, and sizes of axes that ours does not run.

        Raises:
            BadInputError: if the launcher would start another backend, or an axis is larger than 1 or no number.
        """
        for key, allowed in (("distributed_type", DISTRIBUTED_TYPES), ("compute_environment", ("LOCAL_MACHINE",))):
            found = self.values.get(key)
            # YAML reads an unquoted NO as false.
            if found not in (None, False, *allowed):
                raise self.error(
                    f"{key} is {found!r}, but the sharding backend runs under {', '.join(allowed)} alone; "
                    "`toolkit recipes configs` lists some to copy (`toolkit help coming_from/deepspeed` has its keys)"
                )
        if self.asks_for("fsdp_offload_params"):
            raise self.error(OFFLOADED_PARAMS)
        sizes = {axis: self.size(axis) for axis in OTHER_AXES}
        refuse_other_axes(sizes, f"--config: {self.origin}: parallelism_config.parallelism_config_{{}}_size")

    def error(self, problem: str) -> BadInputError:
        """Returns an error that names the option, the file and the problem."""
        return BadInputError(f"--config: {self.origin}: {problem}")

    def _positive_int(self, name: str, found: Any) -> int | None:
        if found is not None and (not isinstance(found, int) or isinstance(found, bool) or found < 1):
            raise self.error(f"{name} is {found!r}; needs a number of at least 1")
        return found

    def _section(self, key: str) -> dict[str, Any]:
        section = self.values.get(key) or {}
        if not isinstance(section, dict):
            raise self.error(f"{key} is not a mapping; needs keys below it")
        return section


def read_accelerate_config(path: Path) -> AccelerateConfig:
    """Reads an Accelerate config from a YAML file.

    Raises:
        BadInputError: if the file is missing, is not YAML, does not hold a mapping, is a recipe, is for another
            backend, or sizes an axis that ours does not run.
    """
    if not path.is_file():
        raise BadInputError(f"--config: there is no file {str(path)!r}")
    try:
        values = yaml_value(path.read_text(encoding="utf-8"), booleans_as_words=True)
    except NOT_YAML as error:
        raise BadInputError(f"--config: {path} is {yaml_problem(error)}") from error
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise BadInputError(f"--config: {path} holds no mapping but {found}; run `accelerate config` for one")
    if "data" in values and "distributed_type" not in values:
        raise BadInputError(f"--config: {path} is a recipe; leave --config out before it, or name an Accelerate config")
    config = AccelerateConfig(values, str(path))
    config.refuse_other_backends()
    return config
