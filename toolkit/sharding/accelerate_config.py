"""An Accelerate config's file, as far as planning and verifying read it; both name it `--config`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import BadInputError, first_line

PRECISIONS = ("no", "bf16", "fp16")
"""Allowed values of `mixed_precision`. Their types are in `apply.py`, which imports torch; a launcher needs none."""


@dataclass(frozen=True)
class AccelerateConfig:
    """Values that have been read, checked as they are asked for: each raises BadInputError if it is not right.

    Attributes:
        origin: where they were read, for messages.
    """

    values: dict[str, Any]
    origin: str

    @property
    def num_processes(self) -> int | None:
        """None: it does not say."""
        return self._count("num_processes", self.values.get("num_processes"))

    @property
    def mixed_precision(self) -> str | None:
        """None: it does not say."""
        found = self.values.get("mixed_precision")
        # YAML reads an unquoted `no` as false.
        word = "no" if found is False else found
        if word is not None and word not in PRECISIONS:
            raise self.error(f"mixed_precision is {found!r}; allowed are {', '.join(PRECISIONS)}")
        return word

    @property
    def strategy(self) -> str | None:
        """The word as it stands; None: it does not say."""
        word = self._section("fsdp_config").get("fsdp_sharding_strategy")
        return None if word is None else str(word)

    @property
    def replicate_size(self) -> int | None:
        """Groups of ranks that each hold one copy of the model; None: it does not say."""
        return self._size("replicate")

    @property
    def shard_size(self) -> int | None:
        """Ranks among which one copy of the model is sharded; None: it does not say."""
        return self._size("shard")

    def error(self, problem: str) -> BadInputError:
        return BadInputError(f"--config: {self.origin}: {problem}")

    def _size(self, axis: str) -> int | None:
        key = f"parallelism_config_dp_{axis}_size"
        return self._count(f"parallelism_config.{key}", self._section("parallelism_config").get(key))

    def _count(self, name: str, found: Any) -> int | None:
        if found is not None and (not isinstance(found, int) or isinstance(found, bool) or found < 1):
            raise self.error(f"{name} is {found!r}; needs a number of at least 1")
        return found

    def _section(self, key: str) -> dict[str, Any]:
        section = self.values.get(key) or {}
        if not isinstance(section, dict):
            raise self.error(f"{key} is no mapping; needs keys below it")
        return section


def read_accelerate_config(path: Path) -> AccelerateConfig:
    """Raises BadInputError if there is no file, or where it holds no mapping, or a recipe."""
    if not path.is_file():
        raise BadInputError(f"--config: there is no file {str(path)!r}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInputError(
            f"--config: {path} is not readable as YAML: {first_line(error)}; correct it there"
        ) from error
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise BadInputError(f"--config: {path} holds no mapping but {found}; run `accelerate config` for one")
    if "data" in values and "distributed_type" not in values:
        raise BadInputError(f"--config: {path} is a recipe; leave --config out before it, or name an Accelerate config")
    return AccelerateConfig(values, str(path))
