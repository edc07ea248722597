"""Reads runs to compare from their folders, finished or not, whole or not, on this machine or in a store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import METRICS, Checkpoint, Place, latest, place_named, read_file
from toolkit.checkpoint.store import StorePath
from toolkit.compare.compared import ComparedRun, short_names
from toolkit.errors import BadInputError, first_line
from toolkit.pages.parts.run_metrics import Metrics, damage_in_words, parse_metrics
from toolkit.pages.parts.side_by_side import SideBySide
from toolkit.pages.status import Status, status_in
from toolkit.paths import ORIGIN, SAMPLES_FILE, parse_json
from toolkit.recipe.load import dotted
from toolkit.recipe.yaml_values import NOT_YAML, yaml_value
from toolkit.run.folder.finished import is_finished
from toolkit.supervise.rank_status import GONE_SECONDS, REPORT, read_statuses

RECIPE = "recipe.yaml"


def read_runs(names: Sequence[str]) -> list[ComparedRun]:
    """Reads runs that are to be compared.

    Args:
        names: folders, or addresses in a store; of a single folder that is not a run, the runs in it.

    Raises:
        BadInputError: if there are fewer than two, one is named twice, or one is not a run; before anything is read.
        StoreError: if a store cannot be reached.
    """
    if len(names) == 1:
        names = _runs_in(names[0])
    places = [place if isinstance(place, StorePath) else place.resolve() for place in map(place_named, names)]
    full = [str(place) for place in places]
    if twice := [name for name in full if full.count(name) > 1]:
        raise BadInputError(f"{twice[0]!r} is named twice; name each run once")
    found = [_require_run(place) for place in places]
    return [
        read_run(name, place, checkpoint)
        for name, place, checkpoint in zip(short_names(full), places, found, strict=True)
    ]


def _runs_in(name: str) -> list[str]:
    """Returns the runs in a folder. Raises BadInputError if there are fewer than two."""
    place = place_named(name)
    found = sorted(place.glob(f"*/{RECIPE}")) if isinstance(place, Path) and not (place / RECIPE).exists() else []
    if len(found) < 2:
        raise BadInputError(
            f"{name!r}: one run has nothing to be compared with; name two or more, or a folder that holds several"
        )
    return [str(path.parent) for path in found]


def _require_run(place: Place) -> Checkpoint | None:
    """Returns the last whole checkpoint; raises BadInputError if the folder is not a run."""
    if not place.is_dir():
        raise BadInputError(f"{str(place)!r}: no such folder; name the training.output_dir or the store of a run")
    checkpoint = latest(place)
    if checkpoint is None and not any((place / name).exists() for name in (RECIPE, METRICS)):
        raise BadInputError(
            f"{str(place)!r} is not a run: it has no {RECIPE}, no {METRICS} and no whole checkpoint; name the "
            "training.output_dir or the store of a run"
        )
    return checkpoint


def read_run(name: str, place: Place, checkpoint: Checkpoint | None) -> ComparedRun:
    """Reads what there is of a run.

    Args:
        name: a short name for it.
        place: its folder, or its address in a store.
        checkpoint: its last whole checkpoint, if it has one.
    """
    problems: list[str] = []
    state, status = _read_state(place)
    recipe = _read_recipe(place, checkpoint, problems)
    num_steps = recipe.get("training.max_steps") if status is None else status.num_steps
    metrics = _read_metrics(place, checkpoint, state, problems)
    return ComparedRun(
        name,
        str(place),
        state,
        metrics,
        recipe,
        _read_environment(place, checkpoint),
        num_steps if isinstance(num_steps, int) else None,
        "" if status is None or state == "running" else status.problem,
        problems,
        None if checkpoint is None else checkpoint.step,
        _pace(status) if state == "running" else None,
        _read_answers(place),
    )


def _read_answers(place: Place) -> dict[str, tuple[str, str]]:
    """Returns the last answers to held-out prompts; none if the run has not written any that can be read."""
    try:
        samples = [SideBySide(**sample) for sample in parse_json(read_file(place / SAMPLES_FILE))]
    except (OSError, ValueError, TypeError):
        return {}
    last = {one.prompt: one.after if one.after is not None else one.before for one in samples}
    return {one.prompt: (text, one.expected) for one in samples if (text := last[one.prompt]) is not None}


def _read_state(place: Place) -> tuple[str, Status | None]:
    """Returns a run's state, and what its report says of a run that is not finished."""
    if is_finished(place):
        return "finished", None
    try:
        status = status_in(read_file(place / REPORT).decode("utf-8", errors="replace"))
    except OSError:
        status = None
    state = "unfinished" if status is None else status.state
    if isinstance(place, Path):
        ranks = read_statuses(place, time.time())
        is_live = bool(ranks) and min(rank.silent_seconds for rank in ranks) <= GONE_SECONDS
        state = "running" if is_live else "killed" if state == "running" else state
    return state, status


def _pace(status: Status | None) -> float | None:
    """Returns the seconds per step that a running run's report expects, evaluations and saves included."""
    if status is None or status.seconds_left is None or status.num_steps <= status.step:
        return None
    return status.seconds_left / (status.num_steps - status.step)


def _read_recipe(place: Place, checkpoint: Checkpoint | None, problems: list[str]) -> dict[str, Any]:
    """Returns the recipe's settings, from its file or else from the checkpoint; null is not set."""
    values: Any = None
    try:
        values = yaml_value(read_file(place / RECIPE).decode("utf-8"))
        if not isinstance(values, dict):
            problems.append(f"{RECIPE} is not a mapping of sections")
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
        return _parse(read_file(own), state, problems)
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"{METRICS} cannot be read: {first_line(error)}")
    if checkpoint is None:
        if state != "running":  # it writes the first line after its first evaluation or step
            problems.append(f"there is no {METRICS}, so that nothing is known of its steps")
        return []
    problems.append(
        f"its own {METRICS} is not there; what is shown ends with the checkpoint of step {checkpoint.step:,}"
    )
    try:
        return _parse(read_file(checkpoint.folder / METRICS), state, problems)
    except OSError as error:
        problems.append(f"{METRICS} of that checkpoint cannot be read: {first_line(error)}")
        return []


def _parse(content: bytes, state: str, problems: list[str]) -> Metrics:
    if state == "running":
        content = content[: content.rfind(b"\n") + 1]  # the last line is being written; of an ended run it was cut off
    found, damaged = parse_metrics(content)
    if damaged:
        problems.append(damage_in_words(damaged))
    elif not found and state != "running":
        problems.append(f"{METRICS} is empty: no step is done yet")
    return found


def _read_environment(place: Place, checkpoint: Checkpoint | None) -> dict[str, str]:
    """Returns ranks, strategy, precision and versions from the export, or else from the last checkpoint."""
    try:
        origin: Any = parse_json(read_file(place / "export" / ORIGIN))
        named = {key: str(origin[key]) for key in ("ranks", "device", "strategy", "precision")}
        return named | {str(name): str(version) for name, version in origin["versions"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    manifest = None if checkpoint is None else checkpoint.manifest
    if manifest is None:
        return {}
    named = {"ranks": str(manifest.world_size), "strategy": manifest.strategy, "precision": manifest.precision}
    return named | manifest.versions
