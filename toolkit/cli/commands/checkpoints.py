"""`toolkit checkpoints`: list a run's checkpoints, and check them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.shared.arguments import AsJson, RunPlace
from toolkit.cli.shared.console import print_table
from toolkit.errors import BadInputError
from toolkit.terminal import Terminal, format_bytes

if TYPE_CHECKING:
    from toolkit.checkpoint.manifest import Checkpoint

COLUMNS = ("step", "samples", "ranks", "strategy", "precision", "eval_loss", "bytes", "date", "problem")
"""Of `--json`; the table has `size` and `state` in place of `bytes` and `problem`."""


def checkpoints(
    run: RunPlace,
    check: Annotated[bool, typer.Option("--verify", help="Read every file and compare its checksum.")] = False,
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints. Exit code 1 if a finished one is damaged or holds non-finite weights."""
    from toolkit.checkpoint.manifest import best_of, list_checkpoints, place_named
    from toolkit.pages.parts.story import with_limits

    place = place_named(run)
    if not place.is_dir():
        raise BadInputError(f"{run!r}: no such folder; name the training.output_dir or the checkpoint.to of a run")
    found = list_checkpoints(place)
    rows = [_checkpoint_fields(checkpoint, check) for checkpoint in found]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        Terminal().print(f"{run}: no checkpoints", markup=False)
    else:
        cells = [[_cell_text(column, row.get(column)) for column in COLUMNS] for row in rows]
        print_table([{"bytes": "size", "problem": "state"}.get(column, column) for column in COLUMNS], cells)
        for limit in dict.fromkeys(limit for row in rows for limit in row.get("limits", [])):
            print(with_limits("eval_loss", [limit]))
        if (best := best_of(found)) is not None:
            print(f"best: step {best[1].step:,}, by {best[1].recipe['training'].get('best_by', 'loss')}")
    # One without a marker is not damage: it may be being written.
    if any(row["problem"] is not None and not c.unfinished for row, c in zip(rows, found, strict=True)):
        raise typer.Exit(1)


def _checkpoint_fields(found: Checkpoint, check: bool) -> dict[str, Any]:
    """Returns what is shown of one checkpoint; without a manifest only its step, folder and problem."""
    from toolkit.checkpoint.manifest import check_files
    from toolkit.pages.parts.story import story_of

    problem, manifest = found.problem, found.manifest
    if check and manifest is not None and problem is None:
        problem = check_files(found.folder, manifest, manifest.files)
    row: dict[str, Any] = {"step": found.step, "folder": str(found.folder), "problem": problem}
    if manifest is None:
        return row
    return row | {
        "samples": manifest.samples,
        "ranks": manifest.world_size,
        "strategy": manifest.strategy,
        "bytes": sum(entry.bytes for entry in manifest.files.values()),
        "precision": manifest.precision,
        "eval_loss": manifest.eval_loss,
        "limits": story_of(manifest.story or {}).limits,
        "date": manifest.date,
    }


def _cell_text(column: str, value: Any) -> str:
    if value is None:
        return "whole" if column == "problem" else ""
    if column == "bytes":
        return format_bytes(value)
    if column == "date":
        return str(value)[:16].replace("T", " ")  # the seconds and the time zone are in --json
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
