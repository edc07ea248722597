"""Reading an Accelerate config: what it says, and what cannot be right in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import BadInputError
from toolkit.sharding.accelerate_config import AccelerateConfig, read_accelerate_config


def test_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "num_processes: 8\nmixed_precision: no\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID\n"
        "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4\n"
    )
    config = read_accelerate_config(path)
    assert (config.num_processes, config.mixed_precision, config.strategy) == (8, "no", "HYBRID")
    assert (config.replicate_size, config.shard_size, config.origin) == (2, 4, str(path))


def test_what_it_does_not_say() -> None:
    config = AccelerateConfig({"fsdp_config": None}, "here")
    found = config.num_processes, config.mixed_precision, config.strategy, config.replicate_size, config.shard_size
    assert found == (None,) * 5


@pytest.mark.parametrize(
    ("values", "asked", "message"),
    [
        ({"num_processes": "two"}, "num_processes", "num_processes is 'two'; needs a number of at least 1"),
        ({"num_processes": 0}, "num_processes", "num_processes is 0"),
        ({"num_processes": True}, "num_processes", "num_processes is True"),
        ({"mixed_precision": "fp8"}, "mixed_precision", "mixed_precision is 'fp8'; allowed are no, bf16, fp16"),
        ({"mixed_precision": True}, "mixed_precision", "mixed_precision is True"),
        ({"fsdp_config": ["zero3"]}, "strategy", "fsdp_config is no mapping"),
        ({"parallelism_config": 4}, "shard_size", "parallelism_config is no mapping"),
        (
            {"parallelism_config": {"parallelism_config_dp_shard_size": "all"}},
            "shard_size",
            "parallelism_config.parallelism_config_dp_shard_size is 'all'",
        ),
    ],
)
def test_what_cannot_be_right(values: dict[str, Any], asked: str, message: str) -> None:
    with pytest.raises(BadInputError, match="--config: here: ") as found:
        getattr(AccelerateConfig(values, "here"), asked)
    assert message in str(found.value)
