"""Ranks die of SIGKILL at any moment, the same command is started again, and the run ends as if nothing had been."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
from conftest import make_texts
from safetensors.torch import load_file
from tiny import recipe_values, save_llama

NUM_RANKS = 2
GRACE_SECONDS = 1.5
TOLD = ("split", "step", "samples", "tokens", "loss", "grad_norm", "learning_rate")


def recipe_of(folder: str, output: str) -> dict[str, Any]:
    home = Path(folder)
    training = {"max_steps": 28, "micro_batch_size": 2, "eval_every_steps": 10}
    values = recipe_values(home / "model", home / "texts.jsonl", home / output, home / "cache", **training)
    values["data"] |= {"shuffle": True, "validation_fraction": 0.2}
    values["checkpoint"] = {"every_steps": 2, "keep_last": 2}
    return values


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str) -> None:
    """Rank 0 dies when its third save comes to this point."""
    from toolkit.checkpoint import writer

    passed = {"times": 0}

    def at(function: Any, here: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if here(*args):
                passed["times"] += 1
                if passed["times"] == 3:
                    die()
            return function(*args, **kwargs)

        return watched

    if point == "writing tensors":
        writer.require_same = at(writer.require_same, lambda *_: True)  # type: ignore[assignment]
    elif point == "before the rename":
        writer.write_synced = at(writer.write_synced, lambda path, _: path.name == "manifest.json")  # type: ignore[assignment]
    elif point == "between rename and marker":
        writer.write_synced = at(writer.write_synced, lambda path, _: path.name == "COMPLETE")  # type: ignore[assignment]
    elif point == "deleting an old one":
        remove = writer.shutil.rmtree
        writer.shutil.rmtree = at(
            remove, lambda path, **_: str(path).endswith(("02.deleted", "04.deleted", "06.deleted"))
        )  # type: ignore[assignment]


def train(folder: str, output: str, point: str | None) -> list[dict[str, Any]]:
    from toolkit import Recipe, finetune

    if point is not None and int(os.environ["RANK"]) == 0:
        arm(point)
    return finetune(Recipe.from_mapping(recipe_of(folder, output))).metrics


def start_and_kill(folder: str, output: str, victim: int, after: float) -> bool:
    """Whether the run was killed before it ended."""
    with ranks.started(train, NUM_RANKS, folder, output, None) as processes:
        deadline = time.monotonic() + after
        while time.monotonic() < deadline and all(process.is_alive() for process in processes):
            time.sleep(0.005)
        killed = processes[victim].is_alive()
        if killed:
            processes[victim].kill()
        end_as_the_launcher_does(processes)
        return killed


def end_as_the_launcher_does(processes: list[Any]) -> None:
    """Ranks whose peer is gone mostly end by themselves; what waits in a rendezvous is asked to, and then made to."""
    for end in (lambda process: None, lambda process: process.terminate(), lambda process: process.kill()):
        for process in processes:
            end(process)
            process.join(GRACE_SECONDS)


def saved_step(folder: Path) -> int:
    from toolkit.checkpoint import latest

    found = latest(folder)
    return found.step if found is not None else 0


def outcome(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The records and weights of a run that is done."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: r.get(k) for k in TOLD} for r in records], load_file(folder / "export" / "model.safetensors")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """A folder with a model, texts, and a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("faults")
    shutil.copy(text_file, folder / "texts.jsonl")
    save_llama(folder / "model", make_texts(60), tied=True)
    ranks.run_on_ranks(train, NUM_RANKS, str(folder), "undisturbed", None)
    return folder


def require_undisturbed(workshop: Path, output: str) -> None:
    """Ends the run, which must be the undisturbed one, bit for bit, with nothing left over."""
    ranks.run_on_ranks(train, NUM_RANKS, str(workshop), output, None)  # of one that is done it does nothing
    (records, weights), (expected, expected_weights) = (outcome(workshop / name) for name in (output, "undisturbed"))
    assert records == expected
    assert all(weights[name].equal(expected_weights[name]) for name in expected_weights)
    assert not list((workshop / output / "checkpoints").glob(".*"))


def kill_often(workshop: Path, output: str, kills: int, seed: int) -> None:
    """Starts the run again after every kill; when it ends in between, another run begins."""
    chance = random.Random(seed)
    run, killed, saved = 0, 0, 0
    while killed < kills:
        name = f"{output}-{run}"
        if start_and_kill(str(workshop), name, chance.randrange(NUM_RANKS), chance.uniform(0.1, 3.5)):
            killed += 1
            assert saved_step(workshop / name) >= saved, "what was saved is lost"
            saved = saved_step(workshop / name)
        else:
            require_undisturbed(workshop, name)
            run, saved = run + 1, 0
    require_undisturbed(workshop, f"{output}-{run}")


def test_killed_at_random_moments(workshop: Path) -> None:
    kill_often(workshop, "short", kills=4, seed=1)


@pytest.mark.slow
def test_killed_at_sixty_random_moments(workshop: Path) -> None:
    kill_often(workshop, "long", kills=60, seed=2)


@pytest.mark.parametrize(
    "point", ["writing tensors", "before the rename", "between rename and marker", "deleting an old one"]
)
def test_killed_at_the_worst_moments(workshop: Path, point: str) -> None:
    output = point.replace(" ", "-")
    with ranks.started(train, NUM_RANKS, str(workshop), output, point) as processes:
        processes[0].join(60)
        end_as_the_launcher_does(processes)
        assert processes[0].exitcode == -signal.SIGKILL
    assert saved_step(workshop / output) == (10 if point == "deleting an old one" else 4)
    require_undisturbed(workshop, output)


def ended_three_times(folder: str) -> list[str]:
    """A run that ends in its first step, one that ends while it is built, and one that is left alone."""
    from toolkit import Recipe, finetune
    from toolkit.run import run as runs

    class PeerLostError(Exception):
        pass

    def lose(*_: Any, **__: Any) -> Any:
        raise PeerLostError

    recipe = Recipe.from_mapping(recipe_of(folder, "three-times"))
    for place, name in ((runs.Trainer, "train_step"), (runs, "build_parts")):
        original = getattr(place, name)
        setattr(place, name, lose)
        ranks.meet()
        with pytest.raises(PeerLostError):
            finetune(recipe)
        setattr(place, name, original)
    ranks.meet()
    finetune(recipe)
    return sorted(path.name for path in Path(recipe.training.output_dir).iterdir())


def test_ended_again_while_it_is_built(workshop: Path) -> None:
    """What the first run has left is known again by its recipe, which the second must not take away."""
    left = ranks.run_on_ranks(ended_three_times, 1, str(workshop))[0]
    assert {"recipe.yaml", "report.html", "export"} <= set(left)
