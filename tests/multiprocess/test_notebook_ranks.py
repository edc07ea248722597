"""`finetune(recipe, num_processes=2)` gives back the result or the error of its ranks, whatever was done before."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from support.ranks import alone, run_on_ranks
from support.runs import records_of
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama


class Nested(torch.autograd.Function):
    """A backward inside a backward. The 61st starts a thread of torch's, after which no forked process can train."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, depth: int) -> torch.Tensor:
        context.depth = depth
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if context.depth:
            with torch.enable_grad():
                start_thread_of_autograd(context.depth - 1)
        return gradient, None


def start_thread_of_autograd(depth: int = 70) -> None:
    Nested.apply(torch.ones(1, requires_grad=True), depth).sum().backward()  # type: ignore[no-untyped-call]


def values_of(folder: Path, name: str, **training: Any) -> dict[str, Any]:
    values = recipe_values(folder / "model", folder / "texts.jsonl", folder / name, folder / "cache", max_steps=2)
    values["training"] |= training
    return {**values, "export": {"enabled": False}}


def stop_when_it_trains(run: Path) -> None:
    """Interrupts this process, as the button of a notebook does, as soon as the run has made a step."""
    while not (run / "metrics.jsonl").is_file():
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)


@alone
def after_all_that(folder: Path) -> dict[str, Any]:
    from toolkit import Recipe, finetune
    from toolkit.errors import BadInputError, StoppedError

    os.environ.pop("ACCELERATE_USE_CPU", None)
    (folder / "temporary").mkdir()
    os.environ["TMPDIR"], tempfile.tempdir = str(folder / "temporary"), None
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # as in a notebook
        del os.environ[name]
    sys.modules.setdefault("bitsandbytes", type(sys)("bitsandbytes"))  # after which Accelerate's launcher starts none
    kept = torch.nn.Linear(1000, 1000)
    finetune(Recipe.from_mapping(values_of(folder, "before")))
    start_thread_of_autograd()
    found: dict[str, Any] = {"kept": kept.in_features}
    bad = values_of(folder, "other")
    bad["data"]["train"] = str(folder / "none.jsonl")
    try:
        finetune(Recipe.from_mapping(bad), num_processes=2)
    except BadInputError as error:
        found["failed"] = str(error)
    handler = signal.getsignal(signal.SIGINT)
    threading.Thread(target=stop_when_it_trains, args=(folder / "stopped",), daemon=True).start()
    try:
        finetune(Recipe.from_mapping(values_of(folder, "stopped", max_steps=100_000)), num_processes=2)
    except StoppedError as error:
        found["stopped"] = str(error)
    found["handler"] = signal.getsignal(signal.SIGINT) == handler
    found["result"] = finetune(Recipe.from_mapping(values_of(folder, "run")), num_processes=2)
    return found


@alone
def in_a_fork(folder: Path) -> str:
    """What a run says in a process that `notebook_launcher` has forked from one that has trained."""
    from toolkit import Recipe, finetune
    from toolkit.errors import BadInputError

    start_thread_of_autograd()
    receiver, sender = os.pipe()
    if (child := os.fork()) == 0:
        try:
            finetune(Recipe.from_mapping(values_of(folder, "forked")))
        except BadInputError as error:
            os.write(sender, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(receiver, 10_000).decode()


def save_inputs(folder: Path) -> None:
    save_llama(folder / "model", make_texts(20), tied=True)
    write_rows(folder / "texts.jsonl", ({"text": text} for text in make_texts(20)))


def test_ranks_give_back_their_result_or_their_error_whatever_was_done_before(tmp_path: Path) -> None:
    """After a run in this process, threads of autograd, a failed run and an interrupted one."""
    save_inputs(tmp_path)
    [found] = run_on_ranks(after_all_that, 1, tmp_path)
    assert found["failed"].startswith(
        f"data.train: there is no file {str(tmp_path / 'none.jsonl')!r}; correct the path"
    )
    assert not (tmp_path / "other").exists()
    assert found["stopped"].startswith("stopped ")
    assert list((tmp_path / "stopped/checkpoints").glob("step_*/COMPLETE")), "its state is saved"
    left = [path.name for path in (tmp_path / "temporary").iterdir() if path.name.startswith("torchelastic_")]
    assert left == [], "torch's launcher leaves a folder for each start"
    assert found["handler"], "the next interrupt is the notebook's"
    records = records_of(tmp_path / "run")
    assert found["result"].metrics == records
    assert [record["step"] for record in records] == [1, 2]
    assert found["result"].output_dir == tmp_path / "run"


def test_a_fork_of_a_process_that_has_trained_is_refused(tmp_path: Path) -> None:
    save_inputs(tmp_path)
    [told] = run_on_ranks(in_a_fork, 1, tmp_path)
    assert "this process was forked from one that has trained (Unable to handle autograd's threading" in told
    assert told.endswith("restart the notebook, or use finetune(recipe, num_processes=N), which forks no process")
    assert not (tmp_path / "forked").exists()
