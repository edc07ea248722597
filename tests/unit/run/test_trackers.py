"""Trackers: none ends a run, a resumed run is the same one there, and no step is given twice."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from toolkit.errors import BadInputError, RecipeError
from toolkit.recipe.recipe import Recipe
from toolkit.run.parts import trackers as module
from toolkit.run.parts.trackers import Trackers, config_of, last_steps
from toolkit.run.stages.accelerator import finish_trackers


class Fake:
    """Takes what wandb takes, and fails where a test wants it to."""

    requires_logging_directory = False
    name = "wandb"
    fails: tuple[str, ...] = ()

    def __init__(self, project: str, **settings: Any) -> None:
        if unknown := settings.keys() - {"name", "id", "resume"}:
            raise TypeError(f"init() got an unexpected keyword argument {sorted(unknown)[0]!r}")
        self.project, self.settings = project, settings
        self.tracker = SimpleNamespace(id=settings.get("id", "new"))
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.config: dict[str, Any] | None = None

    def _fail(self, where: str) -> None:
        if where in self.fails:
            raise ConnectionError("no route to host\nat all")

    def start(self) -> None:
        self._fail("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, float], step: int) -> None:
        self._fail("log")
        self.logged.append((step, values))

    def finish(self) -> None:
        self._fail("finish")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    made = type("Made", (Fake,), {})
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", made)
    return made


def started(folder: Path, is_resumed: bool = False, **settings: Any) -> tuple[Any, Trackers, list[str]]:
    accelerator: Any = SimpleNamespace(is_main_process=True, trackers=[], logging_dir=str(folder))
    recipe = Recipe.load("quickstart", {"logging.trackers": ["wandb"], "logging.tracker_settings": {"wandb": settings}})
    told: list[str] = []
    trackers = Trackers(accelerator, recipe, folder, told.append)
    trackers.start({"a": 1}, is_resumed)
    return accelerator, trackers, told


def test_a_resumed_run_is_the_same_one_there_and_gives_no_step_twice(tmp_path: Path, fake: type[Fake]) -> None:
    accelerator, trackers, _ = started(tmp_path, name="first")
    [first] = accelerator.trackers
    assert (first.settings, first.project, first.config) == ({"name": "first"}, "finetune", {"a": 1})
    records = [("eval", 0), *(("train", step) for step in (1, 2, 3))]
    for split, step in records:
        trackers.log(split, {"loss": float(step)}, step)
    assert [step for step, _ in first.logged] == [0, 1, 2, 3]
    assert first.logged[1][1] == {"train/loss": 1.0}
    lines = [json.dumps({"split": split, "step": step}) for split, step in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"split": "tr')  # killed in a line
    accelerator, trackers, told = started(tmp_path, True, name="first")
    [second] = accelerator.trackers
    assert second.settings == {"name": "first", "id": "new", "resume": "allow"}
    assert second.config == {"a": 1}
    for split, step in (("train", 2), ("train", 3), ("eval", 2), ("train", 4)):  # from the checkpoint of step 1 on
        trackers.log(split, {"loss": 1.0}, step)
    assert [step for step, _ in second.logged] == [2, 4], "the evaluation is new"
    assert told == []
    (tmp_path / "trackers.json").write_text("[1]")
    assert started(tmp_path, True)[0].trackers[0].settings == {}, "nothing known is a new run"
    assert last_steps(tmp_path / "none") == {}


def test_a_tracker_that_cannot_be_reached_ends_no_run(tmp_path: Path, fake: type[Fake]) -> None:
    fake.fails = ("start",)
    accelerator, trackers, told = started(tmp_path)
    assert accelerator.trackers == []
    assert told == ["wandb could not be started, and gets nothing of this run: ConnectionError: no route to host"]
    trackers.log("train", {"loss": 1.0}, 1)
    fake.fails = ("log", "finish")
    accelerator, trackers, told = started(tmp_path)
    for step in range(1, 5):
        trackers.log("train", {"loss": 1.0}, step)
    assert told == [
        "wandb lacks records; metrics.jsonl has them: ConnectionError: no route to host",
        "wandb failed 3 times in a row, and gets nothing more of this run",
    ]
    assert accelerator.trackers == []
    accelerator, trackers, told = started(tmp_path)
    trackers.show([], tmp_path / "report.html")  # which is not there
    assert [line.partition(";")[0] for line in told] == ["wandb lacks records"]
    finish_trackers(accelerator)
    assert accelerator.trackers == []


def test_settings_that_a_tracker_does_not_take_are_refused(tmp_path: Path, fake: type[Fake]) -> None:
    with pytest.raises(BadInputError, match=r"logging\.tracker_settings\.wandb: init\(\) got an unexpected .* 'nmae'"):
        started(tmp_path, nmae="first")
    with pytest.raises(RecipeError, match=r"logging\.tracker_settings\.mlflow has no effect without mlflow"):
        Recipe.load("quickstart", {"logging.tracker_settings.mlflow.run_name": "a"})
    with pytest.raises(RecipeError, match=r"logging\.tracker_settings"):
        Recipe.load("quickstart", {"logging.trackers": ["wandb"], "logging.tracker_settings.wandB.name": "a"})


def test_they_are_told_the_recipe_and_the_plan() -> None:
    recipe = Recipe.load("quickstart")
    planned: Any = SimpleNamespace(room=4 * 2**30, peak_bytes=2**29)
    found = config_of(recipe, planned, {"strategy": "zero3"})
    assert (found["plan/room_gib"], found["plan/peak_gib"], found["run/strategy"]) == (4.0, 0.5, "zero3")
    assert found["training.seed"] == recipe.training.seed
    assert "data.validation" not in found
    assert module.images_of([]) == []
