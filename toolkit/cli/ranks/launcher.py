"""Starts ranks by Accelerate's launcher, in this process, with its exit code and without its traceback."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from toolkit.cli.shared.hub import settle_hub
from toolkit.errors import SAVED, BadInputError, RankLostError, StoppedError, first_line, in_words, signal_name
from toolkit.recipe.recipe import Recipe
from toolkit.supervise.launched_ranks import settle_launcher
from toolkit.training.stop import SAVE_SIGNAL, SIGNALS, leave_terminal


def run_launcher(arguments: Sequence[str], output_dir: Path, recipe: Recipe | None = None) -> int:
    """Runs `accelerate launch ARGUMENTS`. Returns the exit code of the rank that failed first, or 0.

    A signal that asks it to stop is passed on, and it waits until the ranks have saved their state.

    Args:
        output_dir: output folder of the run, which may hold that state.
        recipe: what recipes/finetune.py trains. Its ranks are forked from this process if there are no GPUs.

    Raises:
        BadInputError: if the launcher refuses its arguments or the config, or the hub lacks what the recipe names.
        RankLostError: if a signal ended a rank.
    """
    forks = recipe is not None and _can_fork(arguments)
    if recipe is not None and forks:
        settle_hub(recipe)  # before the hub's library is imported
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from toolkit.sharding.launched import settle_threads

    if forks:
        _import_for_ranks()
    settle_threads()
    settle_launcher()  # a rank prints its own error
    started = time.time()
    try:
        with _forwarding_signals():
            settings = launch_command_parser().parse_args(list(arguments))
            # Nothing is logged there; otherwise torch's launcher leaves an empty folder torchelastic_* for each start.
            settings.log_dir = os.devnull
            # By `nohup`, which torch's launcher does not heed.
            if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
                settings.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"
            if forks:
                settings.run_path, settings.start_method = True, "fork"  # options of torch's launcher
            launch_command(settings)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _exit_code(rank, failure.exitcode, output_dir)
    except subprocess.CalledProcessError as error:
        return _exit_code(0, error.returncode, output_dir)
    except SignalException as error:
        # The launcher knows which signal it had, and not how the ranks ended: what they have left says it.
        if _is_finished(output_dir, started):
            return 0
        return StoppedError.exit_code if _has_saved(output_dir, started) else 128 + int(error.sigval)
    except ValueError as error:
        raise BadInputError(f"accelerate launch: {first_line(error)}") from error
    except (TypeError, AttributeError, KeyError) as error:  # it checks no types
        raise BadInputError(
            f"accelerate launch cannot use a value of its config ({in_words(error)}); compare numbers, quotes and keys "
            "with those of a shipped one (toolkit recipes configs)"
        ) from error
    return 0


def _can_fork(arguments: Sequence[str]) -> bool:
    """Tells whether torch's launcher starts the ranks, on a machine without GPUs whose system can fork.

    Accelerate starts a single rank by itself, in an interpreter of its own, if the config shards nothing. Where there
    are GPUs, ranks are interpreters of their own: a fork cannot use CUDA if this process has, as libraries do that look
    at the GPU when they are imported (torchao).
    """
    import torch

    from toolkit.sharding.accelerate_config import read_accelerate_config

    if sys.platform != "linux" or torch.accelerator.device_count() > 0:
        return False
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--config_file", type=Path)
    settings, _ = parser.parse_known_args(arguments)
    return bool(read_accelerate_config(settings.config_file).values.get("distributed_type", "NO") != "NO")


def _import_for_ranks() -> None:
    """Imports all that a run needs. Forked ranks have it then, where interpreters of their own take 5 s of CPU each."""
    import torch

    torch.set_num_threads(1)  # a pool of threads would not outlive the fork; each rank sets its own number
    import toolkit.run.run  # noqa: F401

    gc.freeze()  # no rank looks for garbage in it, which would also copy its pages


HANDED_ON = (*SIGNALS, SAVE_SIGNAL)


@contextmanager
def _forwarding_signals() -> Iterator[None]:
    """Forwards SIGUSR1 to the ranks, and the others to a single rank, which has no launcher of torch's.

    Without it SIGTERM would end this process and leave the rank behind, and Ctrl-C would not wait for its checkpoint.
    For several ranks torch's launcher puts handlers of its own in their place.
    """

    def hand_on(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        children = psutil.Process().children()
        if not children and number != SAVE_SIGNAL:
            raise SystemExit(128 + number)
        for child in children:
            child.send_signal(number)

    # Started by `nohup`, it goes on without its terminal. But a process that ignores SIGUSR1 is one that still starts
    # up: the user did not ask for that.
    ignored = [number for number in HANDED_ON if signal.getsignal(number) is signal.SIG_IGN]
    handled = [number for number in HANDED_ON if number == SAVE_SIGNAL or number not in ignored]
    before = {number: signal.signal(number, hand_on) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _has_saved(output_dir: Path, since: float) -> bool:
    """Tells whether the report of a run says, after `since` (seconds since the epoch), that its state is saved."""
    from toolkit.pages.status import status_in
    from toolkit.supervise.rank_status import REPORT

    report = output_dir / REPORT
    if not report.exists() or report.stat().st_mtime < int(since):
        return False
    ended = status_in(report.read_text(encoding="utf-8", errors="replace"))
    return ended is not None and SAVED in ended.problem


def _is_finished(output_dir: Path, since: float) -> bool:
    """Tells whether the run was finished after `since` (seconds since the epoch)."""
    from toolkit.run.folder.finished import FINISHED

    path = output_dir / FINISHED
    return path.exists() and path.stat().st_mtime >= int(since)


def _exit_code(rank: int, code: int, output_dir: Path) -> int:
    if code >= 0:
        return code
    from toolkit.pages.status import mark_ended
    from toolkit.supervise.rank_status import REPORT

    name = signal_name(-code)
    hint = ": the machine may have run out of memory" if name == "SIGKILL" else ""
    problem = f"rank {rank} was ended by {name}{hint}"
    mark_ended(output_dir / REPORT, "killed", f"{problem[0].upper()}{problem[1:]}.")  # the rank itself could not say so
    raise RankLostError(problem)
