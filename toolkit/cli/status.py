"""`toolkit status`: where the ranks of a live run are."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import asdict
from pathlib import Path

import typer

from toolkit.cli.arguments import AsJson, RunFolder
from toolkit.cli.console import print_table
from toolkit.errors import BadInputError, ToolkitError, counted
from toolkit.terminal import format_time

STANDING_SECONDS = 30.0
"""From then on a rank counts as late here; the run itself waits for `training.stall_minutes`."""


def status(run: RunFolder, as_json: AsJson = False) -> None:
    """Show where each rank of a live run is, and who waits for whom; or the result of a run that is done.

    Exit code 1 if it is neither.
    """
    from toolkit.run.finished import is_finished
    from toolkit.supervise.rank_status import COLUMNS, GONE_SECONDS, cells, late_ranks, read_statuses, verdict

    if not run.is_dir():
        raise BadInputError(f"{str(run)!r}: no such folder; name the training.output_dir of a run")
    ranks = read_statuses(run, time.time())
    if is_finished(run) and min((rank.silent_seconds for rank in ranks), default=0.0) > GONE_SECONDS:
        ranks = []  # killed behind its report: the run is done, and the next start clears these away
    gone = _killed_since(run, [rank.silent_seconds for rank in ranks])
    late = [rank.rank for rank in late_ranks(ranks, STANDING_SECONDS)]
    told = verdict(ranks, STANDING_SECONDS) if late else None
    if as_json:
        found = {"ranks": [asdict(rank) for rank in ranks], "late": late, "verdict": gone or told}
        print(json.dumps(found, indent=2))
        raise typer.Exit(1 if gone or not ranks else 0)
    if gone is not None:
        raise ToolkitError(f"{str(run)!r}: {gone}")
    if not ranks and is_finished(run) and (run / "metrics.jsonl").is_file():
        _print_result(run)
        return
    if not ranks:
        last = run / "stall.txt"
        hint = f"; the last one stalled: {last}" if last.exists() else ""
        raise ToolkitError(f"{str(run)!r}: no run is under way{hint}")
    print_table(list(COLUMNS), cells(ranks))
    if told is not None:
        print(f"\n{told}")


def _print_result(run: Path) -> None:
    """Prints the result of a run that is done, its folder, and what to do next."""
    from toolkit.run.outcome import finished_before

    result = finished_before(run)
    steps = max((record["step"] for record in result.metrics), default=0)
    losses = [f"{loss:.4f}" for loss in (result.initial_eval_loss, result.final_eval_loss) if loss is not None]
    held_out = f", held-out loss {' -> '.join(losses)}" if losses else ""
    print(f"finished: {counted(steps, 'step')}{held_out}")
    for doubt in result.doubts:
        print(f"beware: {doubt}")
    print(f"report: {run / 'report.html'}")
    if result.export_dir is not None:
        print(f"model: {result.export_dir}")
        print(f"next: {shlex.join(['toolkit', 'generate', str(run), '--prompt', 'TEXT'])}")
    else:
        print(f"next: {shlex.join(['toolkit', 'export', str(run), '--to', 'FOLDER'])}")


def _killed_since(run: Path, silent: list[float]) -> str | None:
    """Returns since when a killed run is silent, and writes that into its report; None for other runs."""
    from toolkit.pages.status import mark_ended
    from toolkit.supervise.rank_status import GONE_SECONDS, REPORT

    if not silent or min(silent) <= GONE_SECONDS:
        return None
    since = format_time(time.time() - min(silent))
    told = f"nothing was heard from any rank since {since}"
    mark_ended(run / REPORT, "killed", f"{told[0].upper()}{told[1:]}.")
    return f"{told}: the run was killed; the same command resumes from its last checkpoint"
