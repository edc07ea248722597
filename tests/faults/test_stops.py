"""Asked to stop, a run saves its state and says so; a rank that dies takes the others with it, by name."""

from __future__ import annotations

import os
import pty
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cases import cases
from support.launches import clean_environment
from support.ranks import LIMIT_SECONDS, alone, run_on_ranks
from support.runs import records_of
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama

from toolkit.checkpoint import latest, list_checkpoints

TABLES = cases(__file__)

ROOT = Path(__file__).parents[2]
STARTED: list[subprocess.Popen[str]] = []
LAUNCH = [str(Path(sys.executable).with_name("accelerate")), "launch", "--config_file", "accelerate_configs/cpu_2.yaml"]


def write_recipe(folder: Path, text_file: Path, **training: Any) -> Path:
    save_llama(folder / "model", make_texts(60), tied=True)
    values = recipe_values(folder / "model", text_file, folder / "run", folder / "cache", max_steps=100_000, **training)
    values["checkpoint"] = {"every_steps": 25}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def start(
    command: list[str], recipe: Path, *overrides: str, script: tuple[str, ...] = ("recipes/finetune.py",)
) -> subprocess.Popen[str]:
    process: subprocess.Popen[str] = subprocess.Popen(
        [*command, *script, *(["--recipe"] if script else []), str(recipe), *overrides],
        cwd=ROOT,
        env=clean_environment(OMP_NUM_THREADS="1"),
        text=True,
        **dict.fromkeys(("stdout", "stderr"), subprocess.PIPE),  # type: ignore[arg-type]
    )
    STARTED.append(process)
    return process


@pytest.fixture(autouse=True)
def left_by_no_test() -> Iterator[None]:
    """Ends what a failed test has left: ranks end with their launcher."""
    yield
    list(map(subprocess.Popen.kill, STARTED))


def wait_for_checkpoint(run: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while latest(run) is None:
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < until
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_launcher_that_is_terminated_and_a_rank_that_is_killed(tmp_path: Path, text_file: Path) -> None:
    recipe = write_recipe(tmp_path, text_file)
    process = start([str(Path(sys.executable).with_name("toolkit")), "train", "--cpu", "2"], recipe, script=())
    wait_for_checkpoint(tmp_path / "run", process)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 3, "accelerate launch itself has another"
    assert "SIGTERM; its state is saved; run the same command to resume there" in " ".join(told.split())
    stopped = latest(tmp_path / "run")
    assert stopped is not None
    assert all(checkpoint.problem is None for checkpoint in list_checkpoints(tmp_path / "run"))

    process = start(LAUNCH, recipe)
    until = time.monotonic() + LIMIT_SECONDS
    while (latest(tmp_path / "run") or stopped).step <= stopped.step:  # it goes on
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(sorted(children_of(process.pid))[-1], signal.SIGKILL)
    _, told = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 1
    assert "resumed: after step" in told
    assert "rank      : 1 (local_rank: 1)" in told, "the launcher names the rank"
    assert "exitcode  : -9" in told


def test_a_terminal_that_is_closed(tmp_path: Path, text_file: Path) -> None:
    """The kernel sends SIGHUP to launcher and ranks, and what they print has nowhere to go."""
    recipe = write_recipe(tmp_path, text_file)
    toolkit = str(Path(sys.executable).with_name("toolkit"))
    command = [toolkit, "train", str(recipe), "--cpu", "2", "checkpoint.every_steps=100000"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that `nohup` has started ignore it, and so would the run
        os.execvpe(command[0], command, clean_environment(OMP_NUM_THREADS="1"))
    until, records = time.monotonic() + LIMIT_SECONDS, tmp_path / "run/metrics.jsonl"
    while not records.exists() or len(records.read_text().splitlines()) < 3:
        assert time.monotonic() < until
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 10_000)
    os.close(terminal)
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        assert time.monotonic() < until
        time.sleep(0.1)
    saved = latest(tmp_path / "run")
    assert saved is not None, "nothing was saved before"
    assert saved.problem is None
    assert not (tmp_path / "run/report.html").exists() or "stopped" in (tmp_path / "run/report.html").read_text()


@pytest.mark.grid
def test_a_launcher_that_is_killed_alone(tmp_path: Path, text_file: Path) -> None:
    """A second start is refused while they live. The ranks end by themselves, and then the same command resumes."""
    recipe = write_recipe(tmp_path, text_file)
    process = start(LAUNCH, recipe)
    wait_for_checkpoint(tmp_path / "run", process)
    again = start([sys.executable], recipe)
    _, told = again.communicate(timeout=LIMIT_SECONDS)
    assert again.returncode == 2
    assert "another run is writing to" in " ".join(told.split())
    left = children_of(process.pid)
    process.kill()
    until = time.monotonic() + LIMIT_SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in left):
        assert time.monotonic() < until, "a rank outlived its launcher"
        time.sleep(0.1)
    reached = latest(tmp_path / "run")
    assert reached is not None
    _, told = start(LAUNCH, recipe, f"training.max_steps={reached.step + 5}").communicate(timeout=LIMIT_SECONDS)
    assert f"resumed: after step {reached.step}" in " ".join(told.split())
    assert (tmp_path / "run" / "report.html").exists()


MOMENTS = TABLES["MOMENTS"]
"""Calls (of a step) at which SIGTERM comes, the exit code, and what is said. In the last one finished.json is there."""


@alone
def terminated_at(told: Path, arguments: list[str], place: str, step: int | None) -> int:
    """Exit code of `toolkit train` if its launcher has SIGTERM as the first rank comes to a call. `told` is stderr."""
    import importlib

    os.dup2(os.open(told, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)

    from toolkit.cli.app import main
    from toolkit.run.parts import answers

    answers.NEW_TOKENS = 4  # for the small model
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)

    def signalled(*given: Any, **named: Any) -> Any:
        at = next((each.global_step for each in given if hasattr(each, "global_step")), None)
        if os.environ["RANK"] == "0" and at == step:
            setattr(owner, name, original)
            came: list[int] = []
            before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
            os.kill(os.getppid(), signal.SIGTERM)
            while not came:  # until the launcher hands it on
                time.sleep(0.01)
            signal.signal(signal.SIGTERM, before)
            signal.raise_signal(signal.SIGTERM)
        return original(*given, **named)

    setattr(owner, name, signalled)
    sys.argv = ["toolkit", "train", "--cpu", "2", *arguments]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_terminated_at_every_moment(tmp_path: Path, text_file: Path) -> None:
    """The same command goes on, and ends as the run that nobody stopped. After finished.json nothing waits."""
    held_out = tmp_path / "held_out.jsonl"
    rows = [{"prompt": text[:9], "completion": text[9:20]} for text in make_texts(12)]
    write_rows(held_out, rows)
    recipe = write_recipe(tmp_path, text_file, eval_every_steps=2)
    common = [str(recipe), "training.max_steps=4", f"data.validation={held_out}", "data.max_length=64"]
    common += ["logging.held_out_samples=2", "checkpoint.every_steps=100"]
    told = tmp_path / "told.txt"
    for place, step, expected, sentence in MOMENTS:
        [code] = run_on_ranks(terminated_at, 1, told, common, place, step)
        said = " ".join(told.read_text().split())
        assert (code, sentence in said) == (expected, True), (place, code, said)
        assert (tmp_path / "run/finished.json").exists() == (expected == 0), place
    whole = [*common, f"training.output_dir={tmp_path / 'whole'}"]
    assert run_on_ranks(terminated_at, 1, told, whole, "toolkit.run.run:fit", "never") == [0]
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def outcome(run: Path) -> tuple[bytes, list[tuple[Any, ...]]]:
    """The weights and the losses of a run."""
    records = records_of(run)
    return (run / "export/model.safetensors").read_bytes(), [(r["split"], r["step"], r["loss"]) for r in records]


def test_ctrl_c_and_the_time_limit(tmp_path: Path, text_file: Path) -> None:
    recipe = write_recipe(tmp_path, text_file)
    process = start([sys.executable], recipe)
    wait_for_checkpoint(tmp_path / "run", process)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 3
    assert "SIGINT; its state is saved" in told
    assert "error:" not in told
    step = latest(tmp_path / "run").step  # type: ignore[union-attr]
    process = start([sys.executable], recipe, "checkpoint.time_limit_minutes=0.02")
    _, told = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 3
    assert "time_limit_minutes (0.02) is over; its state is saved" in told
    assert latest(tmp_path / "run").step > step  # type: ignore[union-attr]


def run_with_a_full_disk(folder: str, asynchronous: bool) -> dict[str, Any]:
    """From step 5 on no file of this process may be longer than 100 kB."""
    from toolkit import Recipe, finetune
    from toolkit.checkpoint import session
    from toolkit.training.metrics import Metrics

    warnings: list[str] = []
    Metrics.warn = lambda self, message: warnings.append(message)  # type: ignore[method-assign]
    save = session.RunCheckpoints.save

    def limited(self: Any, trainer: Any, wait: bool = False) -> bool:
        if trainer.global_step >= 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        return save(self, trainer, wait)

    session.RunCheckpoints.save = limited  # type: ignore[method-assign]
    home = Path(folder)
    training = {"max_steps": 12, "micro_batch_size": 2}
    output = home / f"run-{asynchronous}"
    values = recipe_values(home / "model", home / "texts.jsonl", output, home / "cache", **training)
    values["checkpoint"] = {"every_steps": 4, "asynchronous": asynchronous}
    values["export"] = {"enabled": False}
    try:
        metrics = finetune(Recipe.from_mapping(values)).metrics
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {"steps": len(metrics), "warnings": warnings}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_is_full_stops_nothing_and_is_told(tmp_path: Path, text_file: Path, asynchronous: bool) -> None:
    save_llama(tmp_path / "model", make_texts(60), tied=True)
    shutil.copy(text_file, tmp_path / "texts.jsonl")
    for rank in run_on_ranks(run_with_a_full_disk, 2, str(tmp_path), asynchronous):
        assert rank["steps"] == 12
        assert [warning.partition(" was not saved")[0] for warning in rank["warnings"]] == [
            "the checkpoint of step 8",
            "the checkpoint of step 12",
        ]
        assert all("the last complete one stays" in warning for warning in rank["warnings"])
    run = tmp_path / f"run-{asynchronous}"
    assert [(found.step, found.problem) for found in list_checkpoints(run)] == [(4, None)]
    assert not list((run / "checkpoints").glob(".*"))
