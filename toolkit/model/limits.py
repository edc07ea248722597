"""Models that a configuration asks for and nobody could build: told before any memory is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PretrainedConfig

from toolkit.data.layer_limit import require_few_layers
from toolkit.data.time_limit import TimeLimitError, time_limit
from toolkit.errors import BadInputError

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
    require_few_layers(config.to_dict(), field, where)
    try:
        with time_limit(BUILD_SECONDS):
            yield
    except TimeLimitError:
        raise BadInputError(
            f"{field}: the model of type {config.model_type} that {where} asks for is not built after "
            f"{BUILD_SECONDS:g} s; correct its sizes"
        ) from None
