"""A run's folder may come from anybody: exporting it runs none of its code, and asks nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from toolkit.checkpoint.consolidate import _load_configuration
from toolkit.checkpoint.export import _rename
from toolkit.errors import BadInputError


def test_code_of_the_folder_is_neither_run_nor_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = {"model_type": "stranger", "auto_map": {"AutoConfig": "stranger.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInputError, match="without running code of the folder"):
        _load_configuration(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_two_exports_to_one_place(tmp_path: Path) -> None:
    """The second one says so, and leaves the first alone."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    _rename(tmp_path / "first", tmp_path / "to")
    with pytest.raises(BadInputError, match="was made meanwhile"):
        _rename(tmp_path / "second", tmp_path / "to")
    assert (tmp_path / "to" / "config.json").read_text() == "first"
