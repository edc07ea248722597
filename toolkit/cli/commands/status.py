"""`toolkit status`: how far a run is and where its ranks are, or how it ended. It imports no torch."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from toolkit.cli.shared.arguments import AsJson, RunFolder
from toolkit.cli.shared.console import print_table
from toolkit.errors import BadInputError, ToolkitError, counted
from toolkit.terminal import Terminal, clock, format_time

if TYPE_CHECKING:
    from toolkit.run.folder.read_run import RunState

STANDING_SECONDS = 30.0
"""From then on a rank counts as late here; the run itself waits for `training.stall_minutes`."""


def status(run: RunFolder, as_json: AsJson = False) -> None:
    """Show how far a live run is, where its ranks are and who waits for whom; or the result of a run that is done.

    Exit code 1 if it is neither: it says how the run ended, and where the same command resumes.
    """
    from toolkit.pages.parts.story import read_story
    from toolkit.run.folder.read_run import read_run
    from toolkit.supervise.rank_status import COLUMNS, GONE_SECONDS, cells, late_ranks, read_statuses, verdict

    if not run.is_dir():
        raise BadInputError(f"{str(run)!r}: no such folder; name the training.output_dir of a run")
    ranks = read_statuses(run, time.time())
    found = read_run(run)
    silent, gone = min((rank.silent_seconds for rank in ranks), default=0.0), None
    if silent > GONE_SECONDS and found.state == "finished":
        ranks = []  # killed after its report: the run is done, and the next start clears these away
    elif silent > GONE_SECONDS:
        gone = _killed_since(run, silent)
    late = [rank.rank for rank in late_ranks(ranks, STANDING_SECONDS)]
    told = verdict(ranks, STANDING_SECONDS) if late else None
    if as_json:
        values = {**_progress(found), "ranks": [asdict(rank) for rank in ranks], "late": late, "verdict": gone or told}
        values["record"] = asdict(read_story(run))
        print(json.dumps(values, indent=2))
        raise typer.Exit(1 if gone or not ranks else 0)
    if gone is not None:
        raise ToolkitError(f"{str(run)!r}: {gone}: the run was killed{_after(found)}; {_next_start(found)}")
    if not ranks and found.state != "finished":
        raise ToolkitError(f"{str(run)!r}: {_how_it_ended(run, found)}")
    for problem in found.problems:
        Terminal().warn(problem)
    if not ranks:
        _print_result(run, found)
        return
    if found.state == "running":
        _print_progress(run, found)
    print_table(list(COLUMNS), cells(ranks))
    if told is not None:
        print(f"\n{told}")


def _progress(found: RunState) -> dict[str, Any]:
    """Returns how far a run is, as JSON values; null is unknown."""
    step, pace = found.step, found.seconds_per_step
    return {
        "state": found.state,
        "step": step,
        "num_steps": found.num_steps,
        "loss": found.train[-1]["loss"] if found.train else None,
        **({"reward": found.train[-1]["reward"]} if found.train and "reward" in found.train[-1] else {}),
        "held_out_loss": found.evals[-1].get("loss") if found.evals else None,
        "seconds_left": None if pace is None or found.num_steps is None else pace * max(0, found.num_steps - step),
        "saved_step": found.saved_step,
        "why": found.why,
        "problems": list(found.problems),
    }


def _print_progress(run: Path, found: RunState) -> None:
    from toolkit.pages.parts.story import read_story
    from toolkit.pages.run_page import progress_of

    left = _progress(found)["seconds_left"]
    total = "" if found.num_steps is None else f" of {found.num_steps:,}"
    parts = [f"running: step {found.step:,}{total}" if found.metrics else "running: before the first step"]
    parts += progress_of(found.metrics, read_story(run).limits, str(found.recipe.get("training.best_by", "loss")))
    parts += [f"{clock(left)} left"] if left is not None else []
    print(", ".join(parts))


def _print_result(run: Path, found: RunState) -> None:
    """Prints the result of a run that is done, its folder, and what to do next."""
    from toolkit.pages.parts.story import read_story

    story = read_story(run)
    told = story.limited(story.outcome)
    print(", ".join(filter(None, [f"finished: {counted(found.step, 'step')}", told])))
    for name, told in (story.facts() if story.starts else {}).items():
        print(f"{name}: {told}")
    for doubt in story.told():
        print(f"beware: {doubt}")
    print(f"report: {run / 'report.html'}")
    if (run / "export").is_dir():
        print(f"model: {run / 'export'}")
    if (command := _next_command(run, found)) is not None:
        print(f"next: {shlex.join(command)}")


def _next_command(run: Path, found: RunState) -> list[str] | None:
    """Returns what to do with a run that is done: to use its model, or to make one of a checkpoint, if there is one."""
    from toolkit.recipe.objectives.registry import SPECS

    if (run / "export").is_dir():
        spec = SPECS.get(str(found.recipe.get("objective.kind")))
        is_asked = spec is None or spec.writes_text
        return ["toolkit", "generate", str(run), "--prompt", "TEXT"] if is_asked else None
    place = run if found.saved_step is not None else found.recipe.get("checkpoint.to")
    return None if place is None else ["toolkit", "export", str(place), "--to", "FOLDER"]


def _how_it_ended(run: Path, found: RunState) -> str:
    """Says how a run ended that is neither under way nor done, and what the same command does."""
    stalled = f"; see where it stalled in {run / 'stall.txt'}" if (run / "stall.txt").exists() else ""
    if found.state == "unfinished" and not found.recipe:
        return (
            f"no run is under way, and there is no recipe.yaml of one{stalled}; name the training.output_dir of a run"
        )
    why = f": {found.why.rstrip('.')}" if found.why else ""
    ended = f"{_ENDED[found.state]}{_after(found)}{why}{stalled}"
    return f"no run is under way; the last one {ended}; {_next_start(found)}"


_ENDED = {
    "stopped": "was stopped",
    "failed": "failed",
    "killed": "was killed",
    "stalled": "stalled",
    "unfinished": "was not finished",
}
"""State of a run that is neither under way nor done -> what happened."""


def _after(found: RunState) -> str:
    values = _progress(found)
    return f" after step {values['step']:,}" + ("" if found.num_steps is None else f" of {found.num_steps:,}")


def _next_start(found: RunState) -> str:
    """Says where the same command resumes."""
    if found.recipe.get("checkpoint.to") is not None:
        return f"run the same command to resume from the last checkpoint here or in {found.recipe['checkpoint.to']}"
    if found.saved_step is None:
        return "it left no checkpoint, so the same command begins at step 0"
    return f"run the same command to resume from the checkpoint of step {found.saved_step:,}"


def _killed_since(run: Path, silent_seconds: float) -> str:
    """Returns since when a killed run is silent, and writes that into its report."""
    from toolkit.pages.status import mark_ended
    from toolkit.supervise.rank_status import REPORT

    told = f"nothing was heard from any rank since {format_time(time.time() - silent_seconds)}"
    mark_ended(run / REPORT, "killed", f"{told[0].upper()}{told[1:]}.")
    return told
