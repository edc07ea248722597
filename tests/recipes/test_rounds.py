"""docs/examples/rejection_sampling.py: a model's own right answers make it answer more of them right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.launches import clean_environment

ROOT = Path(__file__).parents[2]


@pytest.mark.grid
def test_accuracy_rises_with_rounds(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "docs/examples/rejection_sampling.py"), "--output", str(tmp_path / "rounds")]
    done = subprocess.run(script, cwd=tmp_path, env=clean_environment(), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "rounds/rounds.json").read_text())
    accuracies = [each["accuracy"] for each in found]
    assert 0.2 <= accuracies[0] <= 0.6, "it has something to learn, and something to learn from"
    assert accuracies[1] > accuracies[0] + 0.1
    assert min(accuracies[2:]) > accuracies[1], "of 100 rows one more may be luck, so the third round is not compared"
    shares = [each["right samples"] for each in found[1:]]
    assert shares == sorted(shares)
