"""`toolkit train --retries`: starts ranks again after a loss, as long as they make progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from toolkit.errors import BadInputError, RankLostError, StalledError
from toolkit.recipe.recipe import Recipe

FRUITLESS = 2
"""Restarts in a row without a new checkpoint, after which there are no more."""

SHORTEST_PAUSE, LONGEST_PAUSE = 5.0, 300.0
"""Seconds before a restart; twice as long after each that was fruitless."""


def require_useful(recipe: Recipe, retries: int, dry_run: bool, num_machines: int = 1) -> None:
    """Checks that restarts can have an effect.

    Raises:
        BadInputError: if they cannot, or would begin at the first step.
    """
    if retries and dry_run:
        raise BadInputError("--retries has no effect with --dry-run; leave one of them out")
    if retries and num_machines > 1:
        raise BadInputError(
            "--retries restarts the ranks of one machine, and those of the others would not be there; leave it out, "
            "and let the batch system start all again (toolkit job)"
        )
    if retries and recipe.checkpoint.every_steps is None and recipe.checkpoint.minutes is None:
        raise BadInputError(
            "--retries needs checkpoints to resume from, and checkpoint.every_minutes is never; set it, for example "
            "checkpoint.every_minutes=10"
        )
    if retries and recipe.checkpoint.resume == "never":
        raise BadInputError("--retries needs checkpoint.resume=auto: with never each restart begins at the first step")


def with_retries(
    launch: Callable[[], int],
    retries: int,
    saved_step: Callable[[], int],
    pause: Callable[[float], None] = lambda seconds: time.sleep(seconds),
) -> int:
    """Repeats `launch` after a lost rank and after a stall. Returns the exit code of the last one.

    Args:
        launch: starts the ranks; returns their exit code, or raises RankLostError.
        saved_step: returns the step of the newest checkpoint, or -1 without one.

    Raises:
        RankLostError: of the last `launch`, if no more restarts follow.
    """
    fruitless, step = 0, saved_step()
    for number in range(retries + 1):
        code, lost = _launch_once(launch)
        if lost is None and code != StalledError.exit_code:
            return code
        reached = saved_step()
        fruitless = fruitless + 1 if number and reached <= step else 0
        step = reached
        if number == retries or fruitless == FRUITLESS:
            break
        seconds = min(LONGEST_PAUSE, SHORTEST_PAUSE * 2**fruitless)
        where = f"resumes after step {step}" if step >= 0 else "begins at the first step"
        _print_now(f"{lost or 'a rank stalled'}; restart {number + 1} of {retries} in {seconds:.0f} s {where}")
        pause(seconds)
    if fruitless == FRUITLESS:
        _print_now(f"no more restarts: {FRUITLESS} in a row ended without a new checkpoint")
    if lost is not None:
        raise lost
    return code


def _launch_once(launch: Callable[[], int]) -> tuple[int, RankLostError | None]:
    try:
        return launch(), None
    except RankLostError as error:
        return error.exit_code, error


def _print_now(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
