"""One rank fails: its own error is what the user reads, with the rank and the step, and at once.

A launcher ends the other ranks as soon as one has ended; here the test does that, and looks at what they had said.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support import ranks
from support.texts import write_rows
from support.tiny import recipe_values, save_llama

from toolkit.checkpoint.manifest import list_checkpoints
from toolkit.ranks import free_port

TEXTS = ["a king and a queen walked by the river", "the moon was high"]
POINTS = ("parts", "data", "forward", "backward", "optimizer", "saving", "export", "memory")

OWN = """
import os, toolkit

class Broken(toolkit.Extension):
    def before_step(self, step):
        if step == 2 and os.environ["RANK"] == "1":
            raise ValueError("no such thing")
"""


class BrokenError(Exception):
    pass


def fail(*_: Any, **__: Any) -> Any:
    raise BrokenError("this rank is broken")


def eat_memory(*_: Any, **__: Any) -> Any:
    """Takes more than the process may have, as a micro-batch that is too large does."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
    return torch.ones(2**31)


def arm(point: str) -> None:
    """Breaks this rank at `point`; in training, in its third optimizer step."""
    from toolkit.checkpoint import session
    from toolkit.data.samples import samples
    from toolkit.objectives.causal_lm import CausalLM
    from toolkit.run import run
    from toolkit.run.stages import sharded_model
    from toolkit.training.trainer import Trainer

    if point == "data":
        samples.TextSamples.batch = fail  # type: ignore[method-assign]
        return
    if point == "parts":  # the other rank goes on into `prepare`, and waits there
        sharded_model.build_optimizer = fail
        return
    if point == "export":
        run.export_model = fail
        return
    train_step = Trainer.train_step

    def third(self: Any, window: Any) -> Any:
        if self.global_step == 2:
            if point == "backward":
                self.accelerator.backward = fail
            elif point == "optimizer":
                self.optimizer.step = fail
            elif point == "saving":  # the other rank waits in the save
                session.named_tensors = fail
            else:
                CausalLM.loss_sum = fail if point == "forward" else eat_memory  # type: ignore[method-assign]
        return train_step(self, window)

    Trainer.train_step = third  # type: ignore[method-assign]


@ranks.alone
def run_recipe(recipe: str, point: str, folder: str, address: str) -> None:
    from toolkit.cli.ranks.finetune import finetune_command
    from toolkit.cli.shared import console

    rank = int(os.environ["RANK"])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": address}
    sys.stderr = open(f"{folder}/{point}-{rank}.txt", "w", buffering=1)  # noqa: SIM115 (it stays open to the end)
    arguments = ["sharding.strategy=zero3", f"training.output_dir={folder}/out-{point}"]
    if point == "own":
        console.PATIENCE_SECONDS = 0.5
        arguments.append(f"training.extensions=[{folder}/mine.py:Broken]")
    elif rank == 1:
        arm(point)
    finetune_command(["--recipe", recipe, *arguments])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failing")
    save_llama(folder / "model", TEXTS, tied=True)
    write_rows(folder / "rows.jsonl", ({"text": text} for text in TEXTS * 40))
    values = recipe_values(folder / "model", folder / "rows.jsonl", folder / "out", folder / "cache", max_steps=4)
    values["checkpoint"] = {"every_steps": 1}
    (folder / "mine.py").write_text(OWN)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize("point", POINTS)
def test_the_error_of_the_rank_that_fails_is_told(recipe: Path, point: str) -> None:
    folder = recipe.parent
    started = time.monotonic()
    with ranks.started(run_recipe, 2, str(recipe), point, str(folder), str(free_port())) as processes:
        processes[1].join(ranks.LIMIT_SECONDS)
        seconds = time.monotonic() - started
        code = processes[1].exitcode
        time.sleep(1)  # the launcher looks every 0.1 s
        for process in processes:
            process.kill()
    told = [(folder / f"{point}-{rank}.txt").read_text() for rank in (0, 1)]
    assert code == 1, told
    assert seconds < 300, "torch waits ten minutes for the other rank, if it is asked to take the group down"
    line = told[1].strip().splitlines()[-1]
    assert line.startswith("error: rank 1 of 2 on "), told[1]
    if point == "memory":
        assert " ran out of memory, in optimizer step 3: " in line
        assert "Traceback" not in told[1]
    else:
        assert line.endswith("BrokenError: this rank is broken")
        assert "Traceback" in told[1]
        assert (", in optimizer step 3: " in line) == (point in ("forward", "backward", "optimizer"))
    assert "error" not in told[0], "the other rank's broken connection is not what the user reads"
    saved = sorted(path.name for path in (folder / f"out-{point}/checkpoints").glob("step_*"))
    assert saved[-1:] == {"parts": [], "data": [], "export": ["step_00000004"]}.get(point, ["step_00000002"])
    usable = [c.folder.name for c in list_checkpoints(folder / f"out-{point}") if c.problem is None]
    assert usable == saved, "what was saved before is whole"


def test_code_of_the_users_that_fails_on_another_rank_than_the_first_is_told(recipe: Path) -> None:
    """Rank 0 waits in a collective for ever, and nothing on this rank takes the group down before it has told."""
    folder = recipe.parent
    with ranks.started(run_recipe, 2, str(recipe), "own", str(folder), str(free_port())) as processes:
        processes[1].join(ranks.LIMIT_SECONDS)
        assert (processes[0].exitcode, processes[1].exitcode) == (None, 2)
        for process in processes:
            process.kill()
    told = [(folder / f"own-{rank}.txt").read_text() for rank in (0, 1)]
    assert "error: rank 1: training.extensions.Broken: before_step failed: ValueError: no such thing" in told[1]
    assert "error" not in told[0]


def met_and_lost(folder: str) -> None:
    """Rank 1 is killed when all have met, before the ranks have made the group for long waits."""
    from toolkit import Recipe, finetune
    from toolkit.run.stages import accelerator
    from toolkit.supervise import launched_ranks

    build = accelerator.build_accelerator

    def built(*arguments: Any) -> Any:
        accelerator = build(*arguments)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return accelerator

    accelerator.build_accelerator, launched_ranks.SHORTEST_SECONDS = built, 3.0
    home = Path(folder)
    values = recipe_values(home / "model", home / "rows.jsonl", home / "out", home / "cache", stall_minutes=0.01)
    finetune(Recipe.from_mapping(values))


def test_a_rank_that_ends_before_the_first_group_is_waited_for_no_longer_than_one_that_never_came(
    tmp_path: Path,
) -> None:
    """torch waits in `new_group` as long as the group may wait, which is seven days for preparations."""
    with ranks.started(met_and_lost, 2, str(tmp_path)) as processes:
        for process in processes:
            process.join(ranks.LIMIT_SECONDS)
        assert [process.exitcode for process in processes] == [4, -signal.SIGKILL]
