"""`toolkit status`: where the ranks of a run are that is under way."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import typer

from toolkit.cli.arguments import AsJson, RunFolder
from toolkit.cli.console import print_table
from toolkit.errors import BadInputError, ToolkitError

STANDING_SECONDS = 30.0
"""From then on a rank counts as late here; the run itself waits for `training.stall_minutes`."""


def status(run: RunFolder, as_json: AsJson = False) -> None:
    """Show where each rank of a run is that is under way, and who waits for whom. Exit code 1 if none is."""
    from toolkit.run.status import COLUMNS, cells, read_statuses, verdict

    if not run.is_dir():
        raise BadInputError(f"{str(run)!r}: no such folder; name the training.output_dir of a run")
    ranks = read_statuses(run, time.time())
    late = [rank.rank for rank in ranks if rank.is_late(STANDING_SECONDS)]
    told = verdict(ranks, STANDING_SECONDS) if late else None
    if as_json:
        print(json.dumps({"ranks": [asdict(rank) for rank in ranks], "late": late, "verdict": told}, indent=2))
        raise typer.Exit(0 if ranks else 1)
    if not ranks:
        last = run / "stall.txt"
        hint = f"; the last one stood still: {last}" if last.exists() else ""
        raise ToolkitError(f"{str(run)!r}: no run is under way{hint}")
    print_table(list(COLUMNS), cells(ranks))
    if told is not None:
        print(f"\n{told}")
