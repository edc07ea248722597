"""Reads a configuration of axolotl, LLaMA-Factory or TRL, and converts it by that tool's table."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import BadInputError
from toolkit.recipe.load import tool_of
from toolkit.recipe.yaml_values import NOT_YAML, yaml_problem, yaml_value
from toolkit.suggest.from_tools import axolotl, llamafactory, trl
from toolkit.suggest.from_tools.conversion import Conversion

CONVERTERS = {"axolotl": axolotl.convert, "llamafactory": llamafactory.convert, "trl": trl.convert}


def convert_file(path: Path) -> Conversion:
    """Returns the recipe of another tool's configuration, YAML or JSON. The tool is found from its keys.

    Raises:
        BadInputError: if the file cannot be read, or is of none of these tools.
    """
    try:
        values = yaml_value(path.read_text(encoding="utf-8"), booleans_as_words=True)
    except OSError as error:
        raise BadInputError(f"--from: {str(path)!r} cannot be read: {error.strerror}; name another file") from error
    except NOT_YAML as error:
        raise BadInputError(f"--from: {str(path)!r}: {yaml_problem(error)}") from error
    tool = tool_of(values) if isinstance(values, dict) else None
    if tool is None:
        raise BadInputError(
            f"--from: {str(path)!r} does not look like a configuration of axolotl, LLaMA-Factory or TRL: name a file "
            "with their keys (base_model and datasets; model_name_or_path and dataset, or dataset_name)"
        )
    return CONVERTERS[tool](values)
