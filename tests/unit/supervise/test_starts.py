"""A job that is started again and again without a new checkpoint ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.errors import BadInputError, ToolkitError, TrainingError
from toolkit.supervise.starts import FILE, MOST, counted_start, forget_starts, require_progress


def test_starts_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path
    assert place is not None
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for _ in range(2 * MOST):
        require_progress(place, 0)  # by hand
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for _ in range(2 * MOST):
        require_progress(place, 0)  # in an interactive allocation
    for attempt in range(1, MOST):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(attempt))
        require_progress(place, 0)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(MOST))
    with pytest.raises(BadInputError, match=r"5 starts of this job \(slurm 7\) from the first step brought no new"):
        require_progress(place, 0)
    require_progress(place, 4)
    for attempt in range(MOST + 1, 2 * MOST):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(attempt))
        require_progress(place, 4)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "99")
    with pytest.raises(BadInputError, match="after step 4"):
        require_progress(place, 4)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    require_progress(place, 4)
    forget_starts(place)
    assert not (place / FILE).exists()


@pytest.mark.parametrize(("error", "counts"), [(BadInputError, False), (TrainingError, True)])
def test_a_start_that_is_refused_leaves_nothing(
    error: type[ToolkitError], counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(error), counted_start(tmp_path, 0):
        raise error("no such file")
    assert (tmp_path / FILE).exists() is counts
