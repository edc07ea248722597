"""What a run's folder tells of it, finished or not, whole or not; here or in a store."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import METRICS, Checkpoint, Place, latest, place_named
from toolkit.checkpoint.store import StorePath
from toolkit.errors import BadInputError, counted, first_line
from toolkit.pages.compared import ComparedRun, short_names
from toolkit.pages.run_metrics import Metrics
from toolkit.pages.status import state_in, told_in
from toolkit.paths import ORIGIN
from toolkit.recipe.load import NOT_YAML, dotted, yaml_value
from toolkit.run.finished import is_finished
from toolkit.supervise.rank_status import GONE_SECONDS, REPORT, read_statuses

RECIPE = "recipe.yaml"
LARGEST_STEP = 2**53
"""Beyond it a float has no exact whole numbers, and no run has so many steps."""


def read_runs(names: Sequence[str]) -> list[ComparedRun]:
    """Reads runs that stand beside each other.

    Args:
        names: folders, or addresses in a store.

    Raises:
        BadInputError: there are fewer than two, one is named twice, or one is no run; before anything else is read.
        StoreError: a store cannot be reached.
    """
    if len(names) < 2:
        raise BadInputError("one run has nothing to be compared with; name two or more")
    places = [place if isinstance(place, StorePath) else place.resolve() for place in map(place_named, names)]
    full = [str(place) for place in places]
    if twice := [name for name in full if full.count(name) > 1]:
        raise BadInputError(f"{twice[0]!r} is named twice; name each run once")
    found = [_require_run(place) for place in places]
    return [
        _read_run(name, place, checkpoint)
        for name, place, checkpoint in zip(short_names(full), places, found, strict=True)
    ]


def _require_run(place: Place) -> Checkpoint | None:
    """The last whole checkpoint. Raises BadInputError for what is no run."""
    if not place.is_dir():
        raise BadInputError(f"{str(place)!r}: no such folder; name the training.output_dir or the store of a run")
    checkpoint = latest(place)
    if checkpoint is None and not any((place / name).exists() for name in (RECIPE, METRICS)):
        raise BadInputError(
            f"{str(place)!r} is no run: it has no {RECIPE}, no {METRICS} and no whole checkpoint; name the "
            "training.output_dir or the store of a run"
        )
    return checkpoint


def _read_run(name: str, place: Place, checkpoint: Checkpoint | None) -> ComparedRun:
    problems: list[str] = []
    state, num_steps, why = _state(place)
    if why:
        problems.append(f"{state}: {why}")
    recipe = _recipe(place, checkpoint, problems)
    if num_steps is None and isinstance(recipe.get("training.max_steps"), int):
        num_steps = recipe["training.max_steps"]
    metrics = _metrics(place, checkpoint, state, problems)
    made_with = _made_with(place, checkpoint)
    return ComparedRun(name, str(place), state, metrics, recipe, made_with, num_steps, problems)


def _state(place: Place) -> tuple[str, int | None, str]:
    """How it stands with a run, the steps of the whole, and why it ended, as far as they are told."""
    if is_finished(place):
        return "finished", None, ""
    try:
        text = _bytes(place / REPORT).decode("utf-8", errors="replace")
    except OSError:
        text = ""
    told, (num_steps, why) = state_in(text) or "unfinished", told_in(text)
    if isinstance(place, Path):
        ranks = read_statuses(place, time.time())
        is_live = bool(ranks) and min(rank.silent_seconds for rank in ranks) <= GONE_SECONDS
        told = "running" if is_live else "killed" if told == "running" else told
    return told, num_steps, "" if told == "running" else why


def _recipe(place: Place, checkpoint: Checkpoint | None, problems: list[str]) -> dict[str, Any]:
    """What the recipe sets, from its file or else from the checkpoint; what is null is not set."""
    values: Any = None
    try:
        values = yaml_value(_bytes(place / RECIPE).decode("utf-8"))
        if not isinstance(values, dict):
            problems.append(f"{RECIPE} is no mapping of sections")
    except FileNotFoundError:
        if checkpoint is None:
            problems.append(f"{RECIPE} is missing")
    except OSError as error:
        problems.append(f"{RECIPE} cannot be read: {first_line(error)}")
    except NOT_YAML:
        problems.append(f"{RECIPE} is damaged: it is not readable as YAML")
    if not isinstance(values, dict):
        values = checkpoint.manifest.recipe if checkpoint is not None and checkpoint.manifest is not None else {}
    found = dotted({str(key): value for key, value in values.items()})
    return {key: value for key, value in found.items() if value is not None}


def _metrics(place: Place, checkpoint: Checkpoint | None, state: str, problems: list[str]) -> Metrics:
    """The lines of the run's metrics, or else those of its last checkpoint."""
    own = place / METRICS
    try:
        return _lines(_bytes(own), state, problems)
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{METRICS} cannot be read: {first_line(error)}")
    if checkpoint is None:
        problems.append(f"there is no {METRICS}, so that nothing is known of its steps")
        return []
    problems.append(
        f"its own {METRICS} is not there; what is shown ends with the checkpoint of step {checkpoint.step:,}"
    )
    try:
        return _lines(_bytes(checkpoint.folder / METRICS), state, problems)
    except OSError as error:
        problems.append(f"{METRICS} of that checkpoint cannot be read: {first_line(error)}")
        return []


def _lines(content: bytes, state: str, problems: list[str]) -> Metrics:
    lines = content.split(b"\n")
    # What has no end yet is being written; of a run that is over, it was cut off.
    if lines[-1] and state == "running":
        lines[-1] = b""
    found, damaged = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _record(line)
        if record is None:
            damaged.append(number)
        else:
            found.append(record)
    if damaged:
        which = (
            f"line {damaged[0]}" if len(damaged) == 1 else f"{counted(len(damaged), 'line')}, first line {damaged[0]},"
        )
        problems.append(
            f"{METRICS} is damaged: {which} cannot be read and {'is' if len(damaged) == 1 else 'are'} left out"
        )
    if not found and not damaged:
        problems.append(f"{METRICS} is empty: no step is done yet")
    return found


def _record(line: bytes) -> dict[str, Any] | None:
    """A line of metrics; None for what is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("split") not in ("train", "eval"):
        return None
    step = record.get("step")
    whole = [value for value in record.values() if isinstance(value, int)]
    # A whole number of any length is JSON, and no float.
    is_step = isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= LARGEST_STEP
    return record if is_step and all(abs(value) < 2**1000 for value in whole) else None


def _made_with(place: Place, checkpoint: Checkpoint | None) -> dict[str, str]:
    """Ranks, strategy, precision and versions: what the export says of its run, or else the last checkpoint."""
    try:
        told: Any = json.loads(_bytes(place / "export" / ORIGIN))
        named = {key: str(told[key]) for key in ("ranks", "device", "strategy", "precision")}
        return named | {str(name): str(version) for name, version in told["versions"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    manifest = None if checkpoint is None else checkpoint.manifest
    if manifest is None:
        return {}
    named = {"ranks": str(manifest.world_size), "strategy": manifest.strategy, "precision": manifest.precision}
    return named | manifest.versions


def _bytes(path: Place) -> bytes:
    return path.read_bytes()
