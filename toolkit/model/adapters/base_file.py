"""Owns base.json: the file of an exported adapter that says on which base it was trained, and how that was quantised.

peft's own file has the name of the base alone, and other weights may stand under a name later.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import BadInputError, first_line
from toolkit.paths import BASE_FILE, configuration_digest, parse_json, read_foreign


@dataclass(frozen=True)
class Base:
    """What base.json says.

    Attributes:
        fingerprint: that of the base's weights, or None if they were drawn.
        configuration: digest of its config.json; None if it had none, or an older version wrote the file.
        quantization: settings of transformers' BitsAndBytesConfig, or None for a base that its own files describe.
    """

    fingerprint: str | None
    configuration: str | None
    quantization: dict[str, Any] | None

    def write(self, folder: Path) -> None:
        """Writes the file into an adapter's folder."""
        (folder / BASE_FILE).write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")

    def difference(self, folder: Path, fingerprint: str | None) -> str | None:
        """Tells how a base differs from the one that the adapter was trained on, or returns None if it does not.

        Args:
            folder: the folder of the base at hand.
            fingerprint: that of its weights.
        """
        if self.fingerprint != fingerprint:
            return "its weights differ"
        if self.configuration is not None and self.configuration != configuration_digest(folder):
            return "its config.json says something else, so that the same weights are another model"
        return None


def read_base(adapter: Path, field: str) -> Base | None:
    """Reads the file of an adapter's folder; None if there is none, as another program writes none.

    Raises:
        BadInputError: if it cannot be read; `field` names the adapter.
    """
    file = adapter / BASE_FILE
    if not os.path.lexists(file):
        return None
    try:
        told = parse_json(read_foreign(file))
        if not isinstance(told, dict) or not told.keys() >= {"fingerprint", "quantization"}:
            raise ValueError("it is not an object with fingerprint and quantization")
        found = Base(told["fingerprint"], told.get("configuration"), told["quantization"])
        for name, kind in (("fingerprint", str), ("configuration", str), ("quantization", dict)):
            if not isinstance(getattr(found, name), kind | None):
                raise ValueError(f"{name} is {json.dumps(getattr(found, name))}")
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"{field}: {BASE_FILE} cannot be read: {first_line(error)}; save the adapter again, or remove it"
        ) from error
    return found
