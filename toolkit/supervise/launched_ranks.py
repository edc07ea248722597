"""Starts ranks by torch's launcher, each as an interpreter of its own, and says what went wrong on them."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from accelerate.utils import patch_environment

from toolkit import ranks
from toolkit.errors import BadInputError, StalledError, StoppedError, ToolkitError, signal_name

SECONDS_TO_SAVE = 600
"""How long ranks that are asked to stop may take to save their state. torch's 30 are too few for a large model."""

LAST_LINES = 15
"""Lines of its output that the error of a rank has."""


def settle_launcher() -> None:
    """Makes torch's launcher wait for saves and log only critical messages: it logs forty lines below an error.

    Imports its module first, because that sets the levels.
    """
    import torch.distributed.run  # noqa: F401

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_SAVE))

    distributed = "torch.distributed"
    names = (distributed, f"{distributed}.elastic.agent.server.api", f"{distributed}.elastic.multiprocessing.api")
    for name in (*names, "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def launch_ranks(
    module: str, job: Path, num_ranks: int, environment: Mapping[str, str], quiet: bool = False, seconds: float = 0
) -> None:
    """Runs `python -m MODULE JOB` on ranks of this machine, which call `run_as_rank`, and waits for them.

    Python's path is as it is here.

    Args:
        job: a file that says what they do; torch's launcher keeps files of the ranks beside it.
        environment: their variables in addition to those of this process.
        quiet: whether their output goes into these files.
        seconds: a time limit, which holds in the main thread; 0 for none.

    Raises:
        BadInputError, StoppedError: if a rank has raised it.
        ToolkitError: if a rank fails otherwise, or dies. It names the rank, with its last words if `quiet`.
        SignalException: after a signal, which the ranks get, too; SIGALRM if the time is over.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settle_launcher()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="none",  # as torchrun has it for a run by hand; torch warns of one that it draws itself
        logs_specs=DefaultLogsSpecs(str(job.parent), Std.ALL if quiet else Std.NONE),  # by default a folder that stays
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{ranks.free_port()}",
        rdzv_configs={"rank": 0},
        max_restarts=0,
    )
    path = os.pathsep.join(os.path.abspath(place) for place in sys.path)
    try:
        with patch_environment(PYTHONPATH=path, **environment), _same_signals(seconds):
            # -P: a file in the working directory must not stand in for a module.
            elastic_launch(config, sys.executable)("-P", "-m", module, str(job))
    except ChildFailedError as error:
        raise _error_of(error.failures, job.parent) from None


@contextlib.contextmanager
def _same_signals(seconds: float) -> Iterator[None]:
    """Puts the handlers of signals back at the end: torch's launcher leaves its own, which would end the next cell.

    Args:
        seconds: after which SignalException ends the block; 0 for no limit.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def end(number: int, _frame: FrameType | None) -> None:
        raise SignalException("the time is over", signal.Signals(number))

    is_main = threading.current_thread() is threading.main_thread()  # no other thread may set them
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM) if is_main else ()
    before = {number: signal.getsignal(number) for number in numbers}
    if is_main:
        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _error_of(failures: Mapping[int, Any], folder: Path) -> ToolkitError:
    """Returns the error of the rank that failed first, of the type that it was.

    Args:
        failures: rank -> torch's `ProcessFailure`.
        folder: where the launcher has its files.
    """

    def order(rank: int) -> tuple[bool, int]:
        # First those that died silently: the others most likely failed because of them. The launcher ended the rest.
        file = Path(failures[rank].error_file)
        return failures[rank].exitcode == -signal.SIGTERM, file.stat().st_mtime_ns if file.is_file() else 0

    rank = min(failures, key=order)
    message, code = failures[rank].message, failures[rank].exitcode
    said = message["message"] if isinstance(message, dict) else ""
    kind, _, text = said.partition(": ")
    if kind == StoppedError.__name__:
        return StoppedError(text)
    bad_input: list[type[ToolkitError]] = [BadInputError, *BadInputError.__subclasses__()]
    if kind in {each.__name__ for each in bad_input}:
        return BadInputError(text)
    if said:
        how = f"failed: {text if kind == ToolkitError.__name__ else said}"
    else:
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"died with exit code {code}"
    return ToolkitError(f"rank {rank} {how}{last_words(folder, rank)}")


def last_words(folder: Path, rank: int) -> str:
    """Returns the last lines that a rank has written into the launcher's files, for an error; empty without any."""
    files = sorted(folder.glob(f"none_*/attempt_0/{rank}/std*.log"), reverse=True)
    lines = [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    return "\n".join(["\nits last words:", *lines[-LAST_LINES:]]) if lines else ""


def run_as_rank(run: Callable[[], object]) -> NoReturn:
    """Runs what a rank does, and ends its process; what went wrong is in the file that torch's launcher reads."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler, code = get_error_handler(), 0
    handler.initialize()
    try:
        run()
    except BaseException as error:
        handler.record_exception(error)
        code = error.exit_code if isinstance(error, ToolkitError) else 1
        if not isinstance(error, ToolkitError):
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python's own end would take the process group down, which may wait for other ranks


# ---- Limits the time for process-group initialisation ----

SHORTEST_SECONDS = 60.0
"""The shortest time limit, even if `stall_minutes` is less: hosts need not start their ranks at the same time."""


@contextmanager
def timed_rendezvous(stall_minutes: float | None) -> Iterator[None]:
    """Limits how long this rank waits for the others inside the `with` block. Then it ends with exit code 4.

    torch would wait half an hour for a rank that ended before the rendezvous was complete.
    """
    if stall_minutes is None or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    seconds = max(60 * stall_minutes, SHORTEST_SECONDS)
    timer = threading.Timer(seconds, _give_up, [seconds])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(seconds: float) -> None:
    rank, num_ranks = os.environ.get("RANK", "0"), os.environ["WORLD_SIZE"]
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    print(
        f"error: rank {rank} on {platform.node()} has waited {seconds:.0f} s for all {num_ranks} ranks to meet at "
        f"{place} (training.stall_minutes, and a minute at least). A rank ended or did not start, or this host does "
        "not reach that address. Nothing has been done yet: start all hosts again",
        file=sys.stderr,
        flush=True,
    )
    os._exit(StalledError.exit_code)
