from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "expects_misuse: uses the pretended device in a wrong way, to see it told")
