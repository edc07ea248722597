"""Refuses configurations by which transformers would fetch code from the hub that the recipe does not name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from toolkit.errors import BadInputError

ATTENTION = "attn_implementation"
"""Ending of the keys under which transformers reads an attention from a configuration."""


def require_no_hub_code(values: Any, field: str, where: str) -> None:
    """Checks a configuration, and those inside it, before transformers reads them.

    Args:
        field: field of the recipe, for errors.
        where: place of the configuration, for errors.

    Raises:
        BadInputError: if an attention is a repository, whose code transformers would fetch and run.
    """
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if str(key).endswith(ATTENTION) and "/" in str(value):
            raise BadInputError(
                f"{field}: {where} asks for code from the hub ({key}: {value!r}), which runs only if the recipe says "
                f"so; remove {key} there, and choose in model.attention"
            )
        require_no_hub_code(value, field, where)


def require_no_stored_hub_code(name: str, revision: str | None, field: str) -> None:
    """Checks the config.json of a folder or repository, if it has one that can be read.

    Raises:
        BadInputError: see `require_no_hub_code`.
    """
    try:
        values, _ = PretrainedConfig.get_config_dict(name, revision=revision)
    except Exception:  # the next reader reports better what is wrong with it
        return
    require_no_hub_code(values, field, f"config.json of {name!r}")
