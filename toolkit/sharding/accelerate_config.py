"""Reads the keys of an Accelerate config file that `toolkit plan` and `toolkit verify` need (`--config`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import BadInputError
from toolkit.recipe.yaml_values import NOT_YAML, yaml_problem, yaml_value

PRECISIONS = ("no", "bf16", "fp16")
"""Allowed values of `mixed_precision`. Their types are in `apply.py`, which imports torch; a launcher needs none."""


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
        found = self.values.get("mixed_precision")
        # YAML reads an unquoted `no` as false.
        word = "no" if found is False else found
        if word is not None and word not in PRECISIONS:
            raise self.error(f"mixed_precision is {found!r}; allowed are {', '.join(PRECISIONS)}")
        return word

    @property
    def strategy(self) -> str | None:
        """Returns the strategy's word, unchecked, or None if the file does not set it.

        Raises:
            BadInputError: if `fsdp_config` is not a mapping.
        """
        word = self._section("fsdp_config").get("fsdp_sharding_strategy")
        return None if word is None else str(word)

    @property
    def replicate_size(self) -> int | None:
        """Returns the number of replicas of the model, or None if the file does not set it.

        Raises:
            BadInputError: if it is not a positive integer, or `parallelism_config` is not a mapping.
        """
        return self._parallelism_size("replicate")

    @property
    def shard_size(self) -> int | None:
        """Returns the number of ranks that shard one replica, or None if the file does not set it.

        Raises:
            BadInputError: if it is not a positive integer, or `parallelism_config` is not a mapping.
        """
        return self._parallelism_size("shard")

    def error(self, problem: str) -> BadInputError:
        """Returns an error that names the option, the file and the problem."""
        return BadInputError(f"--config: {self.origin}: {problem}")

    def _parallelism_size(self, axis: str) -> int | None:
        key = f"parallelism_config_dp_{axis}_size"
        return self._positive_int(f"parallelism_config.{key}", self._section("parallelism_config").get(key))

    def _positive_int(self, name: str, found: Any) -> int | None:
        if found is not None and (not isinstance(found, int) or isinstance(found, bool) or found < 1):
            raise self.error(f"{name} is {found!r}; needs a number of at least 1")
        return found

    def _section(self, key: str) -> dict[str, Any]:
        section = self.values.get(key) or {}
        if not isinstance(section, dict):
            raise self.error(f"{key} is no mapping; needs keys below it")
        return section


def read_accelerate_config(path: Path) -> AccelerateConfig:
    """Reads an Accelerate config from a YAML file.

    Raises:
        BadInputError: if the file is missing, is not YAML, does not hold a mapping, or is a recipe.
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
    return AccelerateConfig(values, str(path))
