"""Jobs as `toolkit job` writes them, stopped in every way, and the same run at the end.

On a real Slurm of two nodes, skipped with a line where there is none (docs/CONTRIBUTING.md says how to install it). Of
SkyPilot the commands of docs/examples run here, and the signals of their ends are played.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from support import slurm as support_slurm
from support.launches import clean_environment, launch
from support.runs import losses_of, records_of
from support.slurm import NODES, Slurm, two_nodes, until
from support.texts import make_texts
from support.tiny import recipe_values, save_llama
from typer.testing import CliRunner

from toolkit.checkpoint import latest
from toolkit.cli.app import app
from toolkit.ranks import free_port

ROOT = Path(__file__).parents[2]
STEPS = 40
PACE = """
import time
from pathlib import Path

from toolkit import Extension


class Pace(Extension):
    def after_step(self, loop, step):
        time.sleep(float(Path(__file__).with_name("pace").read_text()))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows, and an extension with which a step takes as long as the file `pace` says."""
    folder = tmp_path_factory.mktemp("slurm")
    texts = make_texts(60)
    save_llama(folder / "model", texts, tied=True)
    (folder / "texts.txt").write_text("\n".join(texts))
    (folder / "pace.py").write_text(PACE)
    (folder / "pace").write_text("0")
    return folder


@pytest.fixture(scope="module")
def slurm(place: Path) -> Iterator[Slurm]:
    if (why := support_slurm.missing()) is not None:
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - clean_environment().keys():
            patch.delenv(name)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(ROOT))
        with two_nodes(place / "daemons") as made:
            yield made


def recipe_of(place: Path, name: str, output: Path | None = None, **checkpoint: Any) -> Path:
    output = output or place / name
    values = recipe_values(place / "model", place / "texts.txt", output, place / "cache", max_steps=STEPS)
    values["training"] |= {"micro_batch_size": 1, "extensions": [f"{place / 'pace.py'}:Pace"]}
    values["checkpoint"] = {"every_steps": 4, **checkpoint}
    path = place / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="module")
def untouched(place: Path) -> Path:
    """The run that nobody touches: two ranks of one host."""
    recipe = recipe_of(place, "untouched")
    script = ROOT / "recipes/finetune.py"
    launch(ROOT / "accelerate_configs/cpu_2.yaml", script, "--recipe", str(recipe), folder=ROOT)
    return place / "untouched"


def job_of(place: Path, recipe: Path, *options: str) -> str:
    """The job's file, as the command writes it from the folder of the recipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr("toolkit.cluster.checks.OWN_DISKS", ())  # pytest's folders are in /tmp
        done = CliRunner().invoke(app, ["job", recipe.name, "--cpu", "1", *options, "--to", f"{recipe.stem}.sh"])
    assert done.exit_code == 0, (done.output, done.exception)
    return str(place / f"{recipe.stem}.sh")


def records(run: Path) -> list[dict[str, Any]]:
    try:
        return records_of(run)
    except (OSError, ValueError):
        return []


def printed(place: Path, number: str) -> str:
    return "\n".join(path.read_text() for path in place.glob(f"*-{number}.txt"))


def wait_for_step(run: Path, step: int, told: Callable[[], str] = str, seconds: float = 120.0) -> None:
    until(lambda: [each for each in records(run) if each["step"] >= step], seconds, told)


def losses(run: Path) -> list[float]:
    return losses_of(records(run))


def digest(run: Path) -> str:
    return hashlib.sha256((run / "export/model.safetensors").read_bytes()).hexdigest()


def assert_nothing_is_left(place: Path, *runs: Path, kept: frozenset[str] = frozenset()) -> None:
    def alive() -> list[list[str]]:
        words = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        return [each for each in words if any(str(place) in word for word in each) and "slurm" not in " ".join(each)]

    until(
        lambda: not [each for each in alive() if "finetune" in " ".join(each) or "train" in each],
        30,
        lambda: f"{alive()}",
    )
    for run in runs:
        left = {path.name for path in run.iterdir() if path.name.startswith(".")}
        assert left == kept, left


def saved_step(run: Path) -> int:
    found = latest(run)
    return -1 if found is None else found.step


def test_preempted_requeued_and_out_of_time(slurm: Slurm, place: Path, untouched: Path) -> None:
    recipe, run = recipe_of(place, "first"), place / "first"
    file = job_of(place, recipe, "--nodes", "2", "--time", "1m")
    (place / "pace").write_text("0.5")
    number = slurm.submit("--time=10", file)
    wait_for_step(run, 2)
    seconds: dict[str, float] = {}

    # A job of a partition with a higher priority takes the nodes.
    begun = time.monotonic()
    urgent = slurm.submit(
        "--partition=urgent", "--nodes=2", "--exclusive", f"--output={place}/urgent.txt", "--wrap=sleep 1"
    )
    slurm.wait_for(number, "PENDING")
    seconds["preempted"] = time.monotonic() - begun
    lost = {"preempted": records(run)[-1]["step"] - saved_step(run)}
    slurm.wait_for(urgent, "COMPLETED")
    job = slurm.wait_for(number, "RUNNING")
    assert job["Restarts"] == "1"

    step = saved_step(run)
    wait_for_step(run, step + 2)
    begun = time.monotonic()
    slurm.run("scontrol", "requeue", number)
    slurm.wait_for(number, "PENDING")
    seconds["requeued"] = time.monotonic() - begun
    lost["requeued"] = records(run)[-1]["step"] - saved_step(run)

    # Its limit, of two minutes from its start on, is over: the file itself asks for the next start.
    (place / "pace").write_text("6")
    slurm.run("scontrol", "update", f"JobId={number}", "TimeLimit=2")
    job = slurm.wait_for(number, "RUNNING")
    assert job["Restarts"] == "2"
    until(lambda: "the allocation ends in" in printed(place, number), 200, lambda: printed(place, number))
    slurm.wait_for(number, "PENDING", seconds=200)
    lost["out of time"] = records(run)[-1]["step"] - saved_step(run)
    assert "TIMEOUT" not in slurm.job(number)["JobState"]

    (place / "pace").write_text("0")
    slurm.run("scontrol", "update", f"JobId={number}", "TimeLimit=10")
    job = slurm.wait_for(number, "COMPLETED", "FAILED", seconds=180)
    assert job["ExitCode"] == "0:0", printed(place, number)
    assert job["Restarts"] == "3"
    assert lost == {"preempted": 0, "requeued": 0, "out of time": 0}
    assert losses(run) == losses(untouched)
    assert digest(run) == digest(untouched)
    assert_nothing_is_left(place, run)
    print(f"seconds from the signal to the end: {seconds}; steps lost: {lost}")


def test_a_lost_node(slurm: Slurm, place: Path, untouched: Path) -> None:
    """The run goes on with one node, then with two again; a step keeps its samples."""
    recipe, run = recipe_of(place, "second"), place / "second"
    file = job_of(place, recipe, "--nodes", "1-2")
    (place / "pace").write_text("0.3")
    slurm.wait_until_idle()
    number = slurm.submit("--time=10", file)
    slurm.wait_for(number, "RUNNING", nodes=2)
    wait_for_step(run, 5)
    slurm.kill_node(NODES[1])
    slurm.wait_for(number, "PENDING", "REQUEUED")
    job = slurm.wait_for(number, "RUNNING", nodes=1)
    assert job["NodeList"] == NODES[0]
    step = saved_step(run)
    assert step >= 4
    wait_for_step(run, step + 3)
    assert "1 rank now: the same samples in the same order, as many samples a step" in _words(place, number)

    slurm.start_node(NODES[1])
    until(lambda: slurm.run("sinfo", "--noheader", "--format", "%T", "--nodes", NODES[1]).startswith("idle"), 60)
    slurm.run("scontrol", "requeue", number)
    slurm.wait_for(number, "PENDING")
    (place / "pace").write_text("0")
    slurm.wait_until_idle()
    slurm.wait_for(number, "RUNNING", nodes=2)
    job = slurm.wait_for(number, "COMPLETED", "FAILED", seconds=180)
    assert job["ExitCode"] == "0:0", printed(place, number)
    assert "2 ranks now: the same samples" in _words(place, number)
    assert losses(run) == pytest.approx(losses(untouched), abs=1e-5)
    assert len(losses(run)) == STEPS
    assert_nothing_is_left(place, run)


def _words(place: Path, number: str) -> str:
    return " ".join(printed(place, number).split())


def test_cancelled_and_two_jobs_on_one_folder(slurm: Slurm, place: Path, untouched: Path) -> None:
    recipe, run = recipe_of(place, "third"), place / "third"
    file = job_of(place, recipe, "--nodes", "2")
    (place / "pace").write_text("3")
    first = slurm.submit("--time=10", file)
    wait_for_step(run, 2)
    second = slurm.submit("--time=10", file)
    job = slurm.wait_for(second, "FAILED", "COMPLETED")
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0")
    assert "another run is writing to" in _words(place, second)

    begun = time.monotonic()
    slurm.run("scancel", first)
    until(lambda: slurm.run("squeue", "--noheader", "--jobs", first) == "", 60)
    seconds = time.monotonic() - begun
    assert slurm.job(first)["JobState"] == "CANCELLED", "it is not queued again"
    assert records(run)[-1]["step"] == saved_step(run), "nothing is lost"
    assert_nothing_is_left(place, run, kept=frozenset({".starts.json"}))

    (place / "pace").write_text("0")
    third = slurm.submit("--time=10", file)
    job = slurm.wait_for(third, "COMPLETED", "FAILED", seconds=180)
    assert job["ExitCode"] == "0:0", printed(place, third)
    assert losses(run) == losses(untouched)
    assert digest(run) == digest(untouched)
    print(f"seconds from scancel to the end: {seconds:.1f}")


def commands_of(recipe: Path) -> list[tuple[str, dict[str, str]]]:
    """What each of two machines would run, and its environment, with both on this host."""
    run = yaml.safe_load((ROOT / "docs/examples/skypilot.yaml").read_text())["run"]
    given = "mine.yaml checkpoint.to=s3://bucket/runs/mine --gpus 8"
    assert given in run
    run = run.replace("29500", str(free_port())).replace(given, f"{recipe} --cpu 1")
    shared = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_TASK_ID": "7"}
    return [(run, {**shared, "SKYPILOT_NODE_RANK": str(rank)}) for rank in range(2)]


@pytest.mark.parametrize("taken", [1, 0])
def test_a_machine_is_taken_away(taken: int, place: Path, untouched: Path) -> None:
    """Only one of the two has SIGTERM. All ranks save the step under way, and both end with exit code 3."""
    store = {} if taken else {"to": f"file://{place / 'store-sky'}"}
    name = f"taken-{taken}"
    recipe, run = recipe_of(place, name, **store), place / name

    def start() -> list[subprocess.Popen[bytes]]:
        bin_folder = str(Path(sys.executable).parent)
        base = clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), PATH=f"{bin_folder}:{os.environ['PATH']}")
        with (place / f"{name}.log").open("ab") as log:
            return [
                subprocess.Popen(["bash", "-c", command], cwd=place, env=base | own, stdout=log, stderr=log)
                for command, own in commands_of(recipe)
            ]

    def told() -> str:
        return (place / f"{name}.log").read_text()[-3000:]

    (place / "pace").write_text("0.5")
    pods = start()
    try:
        wait_for_step(run, 2, told)
        pods[taken].send_signal(signal.SIGTERM)
        assert [pod.wait(120) for pod in pods] == [3, 3], told()
        last = records(run)[-1]["step"]
        assert last == (saved_step_of(place / "store-sky") if store else saved_step(run)), "nothing is lost"
        (place / "pace").write_text("0")
        pods = start()
        assert [pod.wait(180) for pod in pods] == [0, 0], told()
    finally:
        for pod in pods:
            pod.kill()
    assert f"resumed: after step {last}," in (place / f"{name}.log").read_text()
    assert losses(run) == losses(untouched)
    assert digest(run) == digest(untouched)
    assert_nothing_is_left(place, run)


def saved_step_of(store: Path) -> int:
    steps = [int(path.parent.name.removeprefix("step_")) for path in store.glob("checkpoints/step_*/COMPLETE")]
    return max(steps, default=-1)
