"""Small models and rows that several files train; tests write nothing into these folders but runs of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import plain_objectives


@pytest.fixture(scope="session")
def with_objectives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model and a mixture of experts for each objective, and its rows; see support/plain_objectives.py."""
    folder = tmp_path_factory.mktemp("objectives")
    plain_objectives.save_models(folder)
    return folder
