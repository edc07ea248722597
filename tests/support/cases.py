"""Tables of tests that are plain data: in a YAML file next to the test, of its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def cases(test: str) -> dict[str, Any]:
    """The tables of a test file, by their names."""
    tables: dict[str, Any] = yaml.safe_load(Path(test).with_suffix(".yaml").read_text(encoding="utf-8"))
    assert all(tables.values()), "an empty table tries nothing"
    return tables
