"""Records that a run is done in a file of its own, written last, when everything else is on the disk."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import Place, latest, read_file
from toolkit.data.rows.cache import digest
from toolkit.paths import atomic_write, fingerprint_of, parse_json, sync
from toolkit.supervise.rank_status import REPORT

FINISHED = "finished.json"
WEIGHTS = "*.safetensors"


def write_finished(output_dir: Path, export_dir: Path | None) -> None:
    """Records that the run is done, and the identity of its export, durably: whole or not at all."""
    for path in (output_dir / REPORT, output_dir / "metrics.jsonl"):
        if path.exists():
            sync(path)
    statement = {"export": None if export_dir is None else export_identity(export_dir)}
    atomic_write(output_dir / FINISHED, json.dumps(statement))
    sync(output_dir)


def is_finished(output_dir: Place) -> bool:
    """Returns whether the run of this folder is done, even if it was copied into a store."""
    return _read_statement(output_dir) is not None


def changed_export(output_dir: Path) -> str | None:
    """Says what is wrong with the export of a run that is done, and how to make it, or None if it is unchanged."""
    statement = _read_statement(output_dir)
    if statement is None or statement["export"] is None:
        return None
    export_dir = output_dir / "export"
    if (is_there := export_dir.is_dir()) and export_identity(export_dir) == statement["export"]:
        return None
    what = "the export was changed since" if is_there else "the run wrote an export, which is no longer there"
    if latest(output_dir) is None:
        return f"{what}; it has no checkpoint to make it from: to train it again, name another training.output_dir"
    command = shlex.join(["toolkit", "export", str(output_dir), "--to", "FOLDER"])
    return f"{what}; `{command}` makes it from the last checkpoint"


def export_identity(export_dir: Path) -> str:
    """Returns a digest of an export's weights: names and sizes of their files, and samples of their content."""
    sizes = {path.name: path.stat().st_size for path in sorted(export_dir.glob(WEIGHTS))}
    return digest(sizes, fingerprint_of(export_dir, WEIGHTS))


def _read_statement(output_dir: Place) -> dict[str, Any] | None:
    try:
        found = parse_json(read_file(output_dir / FINISHED))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "export" in found else None
