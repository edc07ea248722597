"""A run meets faults at any moment, the same command is started again, and it ends as if nothing had been."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from support import ranks
from support.disturbances import KINDS, LIMIT_SECONDS, Site, possible, small_disk
from support.runs import records_of
from support.stand_in import NUM_RANKS, attempt
from support.texts import make_texts
from support.tiny import recipe_values, save_llama
from support.two_hosts import Host, two_hosts

from toolkit.supervise.lock import LOCK
from toolkit.supervise.rank_status import FOLDER

GRACE_SECONDS = 1.5
STALL_SECONDS = 8.0
EARLY_SHARE = 0.6
"""Of a run's time in which the next fault comes."""
TOLD = ("split", "step", "samples", "tokens", "loss", "grad_norm", "learning_rate")


SHARDINGS = {
    "zero3": {"strategy": "zero3"},
    "ddp": {"strategy": "ddp"},
    "zero2+offload": {"strategy": "zero2", "offload": "optimizer", "offload_executor": "cpu_torch"},
}


def recipe_of(folder: str, output: str, sharding: str = "zero3") -> dict[str, Any]:
    home = Path(folder)
    training = {"max_steps": 40, "micro_batch_size": 2, "eval_every_steps": 10, "stall_minutes": STALL_SECONDS / 60}
    values = recipe_values(home / "model", home / "texts.jsonl", home / output, home / f"cache-{output}", **training)
    values["data"] |= {"shuffle": True, "validation_fraction": 0.2}
    values["checkpoint"] = {"every_steps": 2, "keep_last": 2, "asynchronous": sharding != "ddp"}
    values["sharding"] = SHARDINGS[sharding]
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
        writer.sync = at(writer.sync, lambda path: path.suffix == ".safetensors")  # type: ignore[assignment]
    elif point == "before the rename":
        writer.write_synced = at(writer.write_synced, lambda path, _: path.name == "manifest.json")  # type: ignore[assignment]
    elif point == "between rename and marker":
        writer.atomic_write = at(writer.atomic_write, lambda path, _: path.name == "COMPLETE")  # type: ignore[assignment]
    elif point == "deleting an old one":
        remove = writer.shutil.rmtree
        writer.shutil.rmtree = at(
            remove, lambda path, **_: str(path).endswith(("02.deleted", "04.deleted", "06.deleted"))
        )  # type: ignore[assignment]


def train(folder: str, output: str, point: str | None, sharding: str = "zero3") -> list[dict[str, Any]]:
    from toolkit import Recipe, finetune

    if point is not None and int(os.environ["RANK"]) == 0:
        arm(point)
    return finetune(Recipe.from_mapping(recipe_of(folder, output, sharding))).metrics


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
    records = records_of(folder)
    return [{k: r.get(k) for k in TOLD} for r in records], load_file(folder / "export" / "model.safetensors")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """A folder with a model and texts."""
    folder = tmp_path_factory.mktemp("faults")
    shutil.copy(text_file, folder / "texts.jsonl")
    save_llama(folder / "model", make_texts(60), tied=True)
    return folder


def arguments_of(workshop: Path, output: str, sharding: str) -> list[str]:
    path = workshop / f"{output}.yaml"
    path.write_text(yaml.safe_dump(recipe_of(str(workshop), output, sharding)))
    return ["--recipe", str(path)]


def undisturbed(workshop: Path, sharding: str) -> tuple[Path, float]:
    """The folder of a run that nobody disturbed, and how many seconds it took."""
    output, seconds = f"undisturbed-{sharding}", workshop / f"undisturbed-{sharding}.seconds"
    if not seconds.exists():
        ranks.run_on_ranks(ranks.meet, 1)  # the server of ranks imports before the time is taken
        clock, log = workshop / f"{output}.clock", workshop / f"{output}.log"
        clock.write_bytes(bytes(8))
        with attempt(arguments_of(workshop, output, sharding), log, [], clock) as found:
            assert found.wait(LIMIT_SECONDS)
            assert found.codes == [0] * NUM_RANKS, log.read_text()[-3000:]
            seconds.write_text(str(time.monotonic() - found.started))
    return workshop / output, float(seconds.read_text())


def require_undisturbed(workshop: Path, output: str, sharding: str = "zero3") -> None:
    """Ends the run, which must be the undisturbed one, bit for bit, with nothing left over."""
    # Of one that is done it does nothing.
    ranks.run_on_ranks(train, NUM_RANKS, str(workshop), output, None, sharding)
    folder, _ = undisturbed(workshop, sharding)
    (records, weights), (expected, expected_weights) = outcome(workshop / output), outcome(folder)
    assert records == expected
    assert weights.keys() == expected_weights.keys()
    assert all(weights[name].equal(expected_weights[name]) for name in expected_weights)
    assert not list((workshop / output / "checkpoints").glob(".*"))
    assert not [path.name for path in (workshop / output).glob(".*")]


@dataclass
class Endured:
    """What was done to runs, and how they took it."""

    faults: list[tuple[str, str, float]] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)
    runs: int = 0

    def __str__(self) -> str:
        """A row for each kind and outcome: how often, and the longest time to the end."""
        rows = Counter((kind, outcome) for kind, outcome, _ in self.faults)
        longest = {key: max(s for k, o, s in self.faults if (k, o) == key) for key in rows}
        lines = [f"{rows[key]:4d}  {longest[key]:6.1f} s  {key[0]}: {key[1]}" for key in sorted(rows)]
        end = f"{len(self.faults)} faults, {self.runs} runs equal to the undisturbed ones"
        return "\n".join([*lines, end, *self.surprises])


def disturb(workshop: Path, seed: int, num_faults: int) -> Endured:
    """Disturbs runs until there were so many faults; every run must end as the undisturbed one of its sharding."""
    chance, endured = random.Random(seed), Endured()
    with two_hosts() as hosts:
        while len(endured.faults) < num_faults:
            sharding = chance.choice(list(SHARDINGS))
            output = f"disturbed-{seed}-{endured.runs}"
            with small_disk(workshop / output) as has_disk:
                on_hosts = hosts if chance.random() < 0.4 else []
                endure(workshop, output, sharding, on_hosts, bool(has_disk), chance, endured, num_faults)
                try:
                    require_undisturbed(workshop, output, sharding)
                except AssertionError as error:
                    endured.surprises.append(f"{output} is not the undisturbed run: {error}")
                    print(endured.surprises[-1], flush=True)
            endured.runs += 1
    return endured


def endure(
    workshop: Path,
    output: str,
    sharding: str,
    hosts: list[Host],
    has_disk: bool,
    chance: random.Random,
    endured: Endured,
    num_faults: int,
) -> None:
    """One run, started until it is done."""
    arguments = arguments_of(workshop, output, sharding)
    clock, log = workshop / f"{output}.clock", workshop / f"{output}.log"
    clock.write_bytes(bytes(8))
    _, longest = undisturbed(workshop, sharding)
    saved, codes = 0, [1]
    damaged: dict[str, bool] = {}
    while any(codes):
        before_log = log.stat().st_size if log.exists() else 0
        with attempt(arguments, log, hosts, clock) as found:
            site = Site(found, arguments, workshop / output, log, clock, hosts, has_disk, chance, damaged)
            ended = None
            while ended is None:
                if found.wait(chance.uniform(0.0, EARLY_SHARE * longest)) or len(endured.faults) >= num_faults:
                    assert found.wait(LIMIT_SECONDS), "the run hangs"
                    break
                ended = one_fault(site, endured)
            codes = found.codes or [1]
        if ended is None and any(codes) and not site.excused & set(codes):
            endured.surprises.append(f"{output} ended with {codes} by itself:\n{log.read_text()[-3000:]}")
            print(endured.surprises[-1], flush=True)
        elif ended is None and any(codes):  # an error is told, and not how Python came to it
            told = log.read_bytes()[before_log:].decode()
            print("ended", *codes, next(line for line in told.splitlines() if line.startswith("error: ")), flush=True)
        before, saved = saved, saved_step(workshop / output)
        assert saved >= before or site.damaged, "what was saved is lost"
    aside = [workshop / output / "checkpoints" / f"{name}.set_aside" for name, marked in damaged.items() if marked]
    assert all(path.exists() for path in aside)


def one_fault(site: Site, endured: Endured) -> str | None:
    weights = possible(site)
    kind = site.chance.choices(list(weights), list(weights.values()))[0]
    started = time.monotonic()
    try:
        ended = KINDS[kind][0](site)
    except AssertionError as error:
        ended = f"WRONG: {error}"
        endured.surprises.append(f"{site.folder.name}, {kind}: {ended}\n{site.log.read_text()[-3000:]}")
        site.attempt.kill()
    endured.faults.append((kind, ended or "went on", time.monotonic() - started))
    print(len(endured.faults), *endured.faults[-1], flush=True)
    return ended


@pytest.mark.grid
def test_two_hundred_faults_of_all_kinds(workshop: Path) -> None:
    endured = disturb(workshop, int(os.environ.get("FAULTS_SEED", "2")), int(os.environ.get("FAULTS", "200")))
    print(endured)
    assert not endured.surprises


@pytest.mark.parametrize(
    "point", ["writing tensors", "before the rename", "between rename and marker", "deleting an old one"]
)
def test_killed_at_the_worst_moments(workshop: Path, point: str) -> None:
    output = point.replace(" ", "-")
    with ranks.started(train, NUM_RANKS, str(workshop), output, point) as processes:
        processes[0].join(LIMIT_SECONDS)
        end_as_the_launcher_does(processes)
        assert processes[0].exitcode == -signal.SIGKILL
    assert saved_step(workshop / output) == (10 if point == "deleting an old one" else 4)
    require_undisturbed(workshop, output)


def ended_three_times(folder: str) -> list[str]:
    """A run that ends in its first step, one that ends while it is built, and one that is left alone.

    And one that was killed behind its report, by what that leaves.
    """
    from toolkit import Recipe, finetune
    from toolkit.run import run as runs
    from toolkit.training.trainer import Trainer

    class PeerLostError(Exception):
        pass

    def lose(*_: Any, **__: Any) -> Any:
        raise PeerLostError

    recipe = Recipe.from_mapping(recipe_of(folder, "three-times"))
    for place, name in ((Trainer, "train_step"), (runs, "prepare_run")):
        original = getattr(place, name)
        setattr(place, name, lose)
        ranks.meet()
        with pytest.raises(PeerLostError):
            finetune(recipe)
        setattr(place, name, original)
    ranks.meet()
    (Path(recipe.training.output_dir) / ".report.html.1.tmp").touch()  # of a process that was killed as it wrote
    finetune(recipe)
    output_dir = Path(recipe.training.output_dir)
    return sorted(path.name for path in output_dir.iterdir())


def test_ended_again_while_it_is_built(workshop: Path) -> None:
    """What the first run has left is known again by its recipe, which the second must not take away."""
    left = ranks.run_on_ranks(ended_three_times, 1, str(workshop))[0]
    assert {"recipe.yaml", "report.html", "export"} <= set(left)
    assert not [name for name in left if name.endswith(".tmp") or name in (LOCK, FOLDER)]
