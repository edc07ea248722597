"""Reads runs to compare from their folders, finished or not, whole or not, on this machine or in a store."""

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
"""Above this, floats cannot represent every whole number; no run has so many steps."""


def read_runs(names: Sequence[str]) -> list[ComparedRun]:
    """Reads runs that are to be compared.

    Args:
        names: folders, or addresses in a store.

    Raises:
        BadInputError: if there are fewer than two, one is named twice, or one is not a run; before anything is read.
        StoreError: if a store cannot be reached.
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
    """Returns the last whole checkpoint; raises BadInputError if the folder is not a run."""
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
    state, num_steps, why = _read_state(place)
    if why:
        problems.append(f"{state}: {why}")
    recipe = _read_recipe(place, checkpoint, problems)
    if num_steps is None and isinstance(recipe.get("training.max_steps"), int):
        num_steps = recipe["training.max_steps"]
    metrics = _read_metrics(place, checkpoint, state, problems)
    made_with = _read_environment(place, checkpoint)
    return ComparedRun(name, str(place), state, metrics, recipe, made_with, num_steps, problems)


def _read_state(place: Place) -> tuple[str, int | None, str]:
    """Returns a run's state, its number of steps, and why it ended, as far as they are known."""
    if is_finished(place):
        return "finished", None, ""
    try:
        text = _read_bytes(place / REPORT).decode("utf-8", errors="replace")
    except OSError:
        text = ""
    told, (num_steps, why) = state_in(text) or "unfinished", told_in(text)
    if isinstance(place, Path):
        ranks = read_statuses(place, time.time())
        is_live = bool(ranks) and min(rank.silent_seconds for rank in ranks) <= GONE_SECONDS
        told = "running" if is_live else "killed" if told == "running" else told
    return told, num_steps, "" if told == "running" else why


def _read_recipe(place: Place, checkpoint: Checkpoint | None, problems: list[str]) -> dict[str, Any]:
    """Returns the recipe's settings, from its file or else from the checkpoint; null is not set."""
    values: Any = None
    try:
        values = yaml_value(_read_bytes(place / RECIPE).decode("utf-8"))
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


def _read_metrics(place: Place, checkpoint: Checkpoint | None, state: str, problems: list[str]) -> Metrics:
    """Returns the lines of the run's metrics, or else those of its last checkpoint."""
    own = place / METRICS
    try:
        return _parse_metrics(_read_bytes(own), state, problems)
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
        return _parse_metrics(_read_bytes(checkpoint.folder / METRICS), state, problems)
    except OSError as error:
        problems.append(f"{METRICS} of that checkpoint cannot be read: {first_line(error)}")
        return []


def _parse_metrics(content: bytes, state: str, problems: list[str]) -> Metrics:
    lines = content.split(b"\n")
    # A last line without an end is being written; in a run that has ended, it was cut off.
    if lines[-1] and state == "running":
        lines[-1] = b""
    found, damaged = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _parse_record(line)
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


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """Returns a line of metrics, or None if it is not one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("split") not in ("train", "eval"):
        return None
    step = record.get("step")
    whole = [value for value in record.values() if isinstance(value, int)]
    # JSON allows whole numbers of any length, which floats cannot hold.
    is_step = isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= LARGEST_STEP
    return record if is_step and all(abs(value) < 2**1000 for value in whole) else None


def _read_environment(place: Place, checkpoint: Checkpoint | None) -> dict[str, str]:
    """Returns ranks, strategy, precision and versions from the export, or else from the last checkpoint."""
    try:
        told: Any = json.loads(_read_bytes(place / "export" / ORIGIN))
        named = {key: str(told[key]) for key in ("ranks", "device", "strategy", "precision")}
        return named | {str(name): str(version) for name, version in told["versions"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    manifest = None if checkpoint is None else checkpoint.manifest
    if manifest is None:
        return {}
    named = {"ranks": str(manifest.world_size), "strategy": manifest.strategy, "precision": manifest.precision}
    return named | manifest.versions


def _read_bytes(path: Place) -> bytes:
    return path.read_bytes()
