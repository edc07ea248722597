"""docs/examples: rejection_sampling.py makes a model answer more right by its own answers; optuna_sweep.py sweeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.launches import clean_environment
from support.runs import losses_of, records_of

ROOT = Path(__file__).parents[2]


@pytest.mark.grid
def test_accuracy_rises_with_rounds(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "docs/examples/rejection_sampling.py"), "--to", str(tmp_path / "rounds")]
    done = subprocess.run(script, cwd=tmp_path, env=clean_environment(), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "rounds/rounds.json").read_text())
    accuracies = [each["accuracy"] for each in found]
    assert 0.2 <= accuracies[0] <= 0.6, "it has something to learn, and something to learn from"
    assert accuracies[1] > accuracies[0] + 0.1
    assert min(accuracies[2:]) > accuracies[1], "of 100 rows one more may be luck, so the third round is not compared"
    shares = [each["right samples"] for each in found[1:]]
    assert shares == sorted(shares)


def test_a_sweep_finds_its_best_run_and_goes_on(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    script = [sys.executable, str(ROOT / "docs/examples/optuna_sweep.py"), "--to", str(tmp_path), "--steps", "3"]
    for trials in ("1", "2"):
        done = subprocess.run([*script, "--trials", trials], env=clean_environment(), text=True, capture_output=True)
        assert done.returncode == 0, done.stderr[-3000:]
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/study.db")
    assert len(study.trials) == 2, "the second command only adds what is missing"
    for trial in study.trials:
        records = records_of(tmp_path / str(trial.number))
        assert trial.value == losses_of(records, "eval")[-1]
    assert f"run {tmp_path}/{study.best_trial.number}" in done.stdout
