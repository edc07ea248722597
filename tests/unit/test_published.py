"""What may leave this machine."""

from __future__ import annotations

import pytest
from support.cases import cases

from toolkit.published import for_readers, settings_for_readers

TABLES = cases(__file__)


def test_neither_folders_nor_secrets_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TABLES["environment"].items():
        monkeypatch.setenv(name, value)
    assert {text: for_readers(text) for text in TABLES["texts"]} == TABLES["texts"]
    assert settings_for_readers(TABLES["settings"]) == TABLES["published"]
