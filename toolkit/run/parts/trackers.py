"""Accelerate's trackers of a run: what they are given, how a resumed run goes on in them, and that none ends it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from PIL import Image

from toolkit import ranks
from toolkit.errors import BadInputError, first_line, in_words
from toolkit.pages.card import published
from toolkit.pages.parts.side_by_side import SideBySide
from toolkit.pages.parts.story import RUN_JSON
from toolkit.paths import GIB, atomic_write
from toolkit.planning.check import Planned
from toolkit.recipe.recipe import Recipe, dotted
from toolkit.run.stages.part import RunPart
from toolkit.run.stages.stages import PreparedRun

FILE = "trackers.json"
"""File of a run's folder with the identity of its run in each tracker."""

MOST_FAILURES = 3
"""Failures in a row after which a tracker is given no more: each may take minutes."""

RESUMED: dict[str, Callable[[str], dict[str, Any]]] = {
    "wandb": lambda name: {"id": name, "resume": "allow"},
    "trackio": lambda name: {"name": name, "resume": "allow"},
    "mlflow": lambda name: {"run_id": name},
    "tensorboard": lambda name: {},  # it goes on in the same folder
}
"""Tracker -> what makes a start go on as the run of this identity. In others a resumed run is a new one."""

TOLD_ONCE = ("mlflow", "tensorboard")
"""Trackers that refuse another configuration of a run, or would add a second one."""


def _identity(tracker: GeneralTracker) -> str:
    run: Any = tracker.tracker
    if tracker.name == "mlflow":
        return str(run.info.run_id)
    return str(getattr(run, {"wandb": "id", "trackio": "name"}.get(tracker.name, ""), tracker.name))


class Trackers:
    """The trackers of a run. Only rank 0 has any.

    Args:
        accelerator: gets the trackers that could be started, so that `get_tracker` finds them.
        recipe: names them, and their settings.
        output_dir: the run's folder.
        warn: shows a warning.
    """

    def __init__(self, accelerator: Accelerator, recipe: Recipe, output_dir: Path, warn: Callable[[str], None]) -> None:
        self._accelerator, self._recipe, self._output_dir, self._warn = accelerator, recipe, output_dir, warn
        self._names = recipe.logging.trackers if accelerator.is_main_process else []
        self._sent: dict[str, dict[str, int]] = {}
        self._failures: dict[str, int] = {}

    def start(self, config: Mapping[str, Any], is_resumed: bool) -> None:
        """Starts each tracker, or warns of one that cannot be.

        Args:
            config: plain values that describe the run.
            is_resumed: whether the run goes on from a checkpoint, and so as the same run in its trackers.

        Raises:
            BadInputError: if a tracker does not take its settings.
        """
        known = self._known() if is_resumed else {}
        sent = last_steps(self._output_dir / "metrics.jsonl") if is_resumed else {}
        for name in self._names:
            settings = dict(self._recipe.logging.tracker_settings.get(name, {}))
            goes_on = name in known and name in RESUMED
            if goes_on:
                settings |= RESUMED[name](known[name])
                self._sent[name] = sent
            try:
                self._start(name, settings, None if goes_on and name in TOLD_ONCE else config)
            except TypeError as error:
                raise BadInputError(
                    f"logging.tracker_settings.{name}: {first_line(error)}; name what its start takes, see its own page"
                ) from error
            except Exception as error:
                self._warn(f"{name} could not be started, and gets nothing of this run: {in_words(error)}")
        if self._names:
            found = {tracker.name: _identity(tracker) for tracker in self._accelerator.trackers}
            atomic_write(self._output_dir / FILE, json.dumps(known | found, indent=1) + "\n")

    def _start(self, name: str, settings: dict[str, Any], config: Mapping[str, Any] | None) -> None:
        made: Any = LOGGER_TYPE_TO_CLASS[name]
        place = [self._accelerator.logging_dir] if made.requires_logging_directory else []
        tracker = made(self._recipe.logging.project_name, *place, **settings)
        tracker.start()
        if config is not None:
            tracker.store_init_configuration(dict(config))
        self._accelerator.trackers.append(tracker)

    def _known(self) -> dict[str, str]:
        """Returns the identity of the run in each tracker, as an earlier start wrote them."""
        try:
            found = json.loads((self._output_dir / FILE).read_text(encoding="utf-8"))
            return {str(name): value for name, value in found.items() if isinstance(value, str)}
        except (OSError, ValueError, AttributeError):
            return {}

    def log(self, split: str, values: Mapping[str, float], step: int) -> None:
        """Gives a record to each tracker, unless an earlier start has given it that step."""
        named = {f"{split}/{key}": value for key, value in values.items() if key != "step"}
        for tracker in list(self._accelerator.trackers):
            if step > self._sent.get(tracker.name, {}).get(split, -1):
                self._try(tracker, partial(tracker.log, named, step=step))

    def show(self, samples: Sequence[SideBySide], report: Path) -> None:
        """Gives each tracker the report, the record of the run and what the model wrote after held-out prompts."""
        for tracker in list(self._accelerator.trackers):
            if (give := SHOWN.get(tracker.name)) is not None:
                self._try(tracker, partial(give, tracker, samples, report))

    def _try(self, tracker: GeneralTracker, action: Callable[[], None]) -> None:
        try:
            action()
            self._failures[tracker.name] = 0
        except Exception as error:
            failures = self._failures[tracker.name] = self._failures.get(tracker.name, 0) + 1
            if failures == 1:
                self._warn(f"{tracker.name} lacks records; metrics.jsonl has them: {in_words(error)}")
            if failures == MOST_FAILURES:
                self._warn(f"{tracker.name} failed {failures} times in a row, and gets nothing more of this run")
                self._accelerator.trackers.remove(tracker)


def last_steps(records: Path) -> dict[str, int]:
    """Returns the last step of each split in metrics.jsonl, which trackers have been given."""
    found: dict[str, int] = {}
    try:
        for line in records.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            found[record["split"]] = max(record["step"], found.get(record["split"], -1))
    except (OSError, ValueError, KeyError, TypeError):  # half a line at the end of a run that was killed
        pass
    return found


def config_of(recipe: Recipe, planned: Planned, facts: Mapping[str, str]) -> dict[str, Any]:
    """Returns the recipe as it may be published, the plan's figures and a run's facts, as the values of trackers."""
    values = dotted(published(recipe))
    values |= {f"run/{name}": fact for name, fact in facts.items()}
    values["plan/room_gib"] = planned.room / GIB
    if planned.peak_bytes is not None:
        values["plan/peak_gib"] = planned.peak_bytes / GIB
    return {key: value if isinstance(value, int | float | str | bool) else str(value) for key, value in values.items()}


class Tracked(RunPart):
    """Gives the run's trackers its facts, its records, and at the end its report."""

    def start(self, run: PreparedRun) -> None:
        self._trackers = Trackers(
            self.opened.accelerator, self.recipe, self.opened.output_dir, self.opened.console.warn
        )
        config = config_of(self.recipe, run.planned, self.opened.facts)
        ranks.on_first_rank(lambda: self._trackers.start(config, self.opened.resumed is not None))

    def recorded(self, split: str, values: Mapping[str, float], step: int) -> None:
        self._trackers.log(split, values, step)

    def finish(self, run: PreparedRun, report: Path) -> None:
        self._trackers.show(self.opened.shown.side_by_side, report)


# ---- what each tracker shows at the end ----

COLUMNS = ["prompt", "before training", "during training", "after training", "in the data"]


def rows_of(samples: Sequence[SideBySide]) -> list[list[str]]:
    """Returns a row of `COLUMNS` for each held-out prompt."""
    return [
        [
            sample.prompt,
            sample.before or "",
            "\n".join(f"{step}: {text}" for step, text in sample.between),
            sample.after or "",
            sample.expected,
        ]
        for sample in samples
    ]


def images_of(samples: Sequence[SideBySide]) -> list[tuple[int, Image.Image]]:
    """Returns the images of the prompts, each with the number of its prompt."""
    return [
        (number, Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB"))
        for number, sample in enumerate(samples)
        for uri in sample.images
    ]


def _rich(module: Any, samples: Sequence[SideBySide], report: Path) -> dict[str, Any]:
    """Returns what is shown, in the classes of `wandb`, or of `trackio`, which has the same."""
    shown: dict[str, Any] = {"report": module.Html(str(report))}
    if samples:
        shown["held_out"] = module.Table(columns=COLUMNS, data=rows_of(samples))
    for number, (row, image) in enumerate(images_of(samples)):
        shown[f"held_out_image/{number}"] = module.Image(image, caption=samples[row].prompt)
    return shown


def _to_wandb(tracker: Any, samples: Sequence[SideBySide], report: Path) -> None:
    import wandb

    tracker.tracker.log(_rich(wandb, samples, report))
    for path in (report, report.with_name(RUN_JSON)):
        tracker.tracker.save(str(path), base_path=str(report.parent), policy="now")


def _to_trackio(tracker: Any, samples: Sequence[SideBySide], report: Path) -> None:
    import trackio

    tracker.tracker.log(_rich(trackio, samples, report))
    for path in (report, report.with_name(RUN_JSON)):
        trackio.log_artifact(path)


def _to_mlflow(tracker: Any, samples: Sequence[SideBySide], report: Path) -> None:
    import mlflow

    for path in (report, report.with_name(RUN_JSON)):
        tracker.log_artifact(str(path))
    if samples:
        columns = zip(*rows_of(samples), strict=True)
        mlflow.log_table(dict(zip(COLUMNS, map(list, columns), strict=True)), "held_out.json")
    for place, (_, image) in enumerate(images_of(samples)):
        mlflow.log_image(image, f"held_out_images/{place}.png")


def _to_tensorboard(tracker: Any, samples: Sequence[SideBySide], report: Path) -> None:
    import numpy as np

    writer: Any = tracker.tracker
    writer.add_text("report", str(report))
    writer.add_text("record", f"```\n{report.with_name(RUN_JSON).read_text(encoding='utf-8')}\n```")
    for number, row in enumerate(rows_of(samples)):
        text = "\n\n".join(f"**{name}**\n\n```\n{value}\n```" for name, value in zip(COLUMNS, row, strict=True))
        writer.add_text(f"held_out/{number}", text)
    for place, (_, image) in enumerate(images_of(samples)):
        writer.add_image(f"held_out_images/{place}", np.asarray(image), dataformats="HWC")
    writer.flush()


SHOWN: dict[str, Callable[[Any, Sequence[SideBySide], Path], None]] = {
    "wandb": _to_wandb,
    "trackio": _to_trackio,
    "mlflow": _to_mlflow,
    "tensorboard": _to_tensorboard,
}
