"""Models that a configuration asks for and nobody could build: told before any memory is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PretrainedConfig

from toolkit.data.time_limit import TimeLimitError, time_limit
from toolkit.errors import BadInputError

MAX_LAYERS = 10_000
"""Ten times as many as any model has. Each costs about 4 ms and 100 kB of Python, before it has weights."""

BUILD_SECONDS = 300.0
"""Time limit of a model without weights, for all that is not called a layer; 126 layers take half a second."""


@contextmanager
def within_limits(config: PretrainedConfig, field: str, where: str) -> Iterator[None]:
    """A model is built inside, without weights.

    Args:
        field: of the recipe, for errors.
        where: the configuration stands.

    Raises:
        BadInputError: the configuration asks for too many layers, or the model takes too long.
    """
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    layers = max(
        (found for part in parts if isinstance(found := getattr(part, "num_hidden_layers", 0), int)), default=0
    )
    if layers > MAX_LAYERS:
        raise BadInputError(
            f"{field}: num_hidden_layers is {layers:,} in {where}; at most {MAX_LAYERS:,} layers are built. Correct it"
        )
    try:
        with time_limit(BUILD_SECONDS):
            yield
    except TimeLimitError:
        raise BadInputError(
            f"{field}: the model of type {config.model_type} that {where} asks for is not built after "
            f"{BUILD_SECONDS:g} s; correct its sizes"
        ) from None
