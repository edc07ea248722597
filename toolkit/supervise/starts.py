"""Ends a job that a batch system starts again and again although no start brings a new checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit import ranks
from toolkit.errors import BadInputError
from toolkit.paths import parse_json

FILE = ".starts.json"
MOST = 5
"""Starts of a job from the same step. A busy queue may preempt some of them before their first step."""


def job_attempt() -> tuple[str | None, int]:
    """Returns the job that started this process, or None, and the number of the attempt."""
    if "SLURM_JOB_ID" in os.environ:
        job, count = f"slurm {os.environ['SLURM_JOB_ID']}", int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        return job, 1000 * count + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return (None if run == "none" else run), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def require_progress(place: Path, step: int) -> None:
    """Notes this start of a job in the run's folder. Does nothing for a start by hand.

    Args:
        step: the step after which the run resumes, or 0.

    Raises:
        BadInputError: if `MOST` starts of the same job came before from this step. Its exit code asks for no other.
    """
    job, attempt = job_attempt()
    if job is None:
        return
    path = place / FILE
    attempts = _earlier_attempts(path, job, step) - {attempt}
    if len(attempts) >= MOST:
        raise BadInputError(
            f"{MOST} starts of this job ({job}) {f'after step {step}' if step else 'from the first step'} brought no "
            "new checkpoint, and this one would not either: look at how they ended, then start the job anew. A time "
            "limit may be too short for a start and a step"
        )
    text = json.dumps({"job": job, "step": step, "attempts": sorted({*attempts, attempt})})
    with contextlib.suppress(OSError):  # a run does not end for this
        path.write_bytes(text.encode())


@contextmanager
def counted_start(place: Path, step: int) -> Iterator[None]:
    """Notes this start, as `require_progress` does; not one that the block refuses, which no batch system repeats.

    Raises:
        BadInputError: on every rank; see `require_progress`.
    """
    ranks.on_first_rank(lambda: require_progress(place, step))
    try:
        yield
    except BadInputError:
        if ranks.rank() == 0:
            forget_starts(place)
        raise


def forget_starts(place: Path) -> None:
    """Removes the note of a run that is done."""
    with contextlib.suppress(OSError):
        (place / FILE).unlink()


def _earlier_attempts(path: Path, job: str, step: int) -> set[int]:
    """Returns the attempts of this job that began at this step, as far as they can be read."""
    try:
        found = parse_json(path.read_bytes())
        is_same = (found["job"], found["step"]) == (job, step)
        return {int(attempt) for attempt in found["attempts"]} if is_same else set()
    except (OSError, ValueError, TypeError, KeyError):
        return set()
