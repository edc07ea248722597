"""Entry points of the `toolkit` command and recipes/finetune.py, which handle Ctrl-C before any long import."""

from __future__ import annotations

import os
import signal
import sys

from toolkit.cli.shared.signals import end_at_interrupts, ignore_save_requests, is_forked


def main() -> None:
    """The `toolkit` command; see `toolkit.cli.app.main`."""
    _leave_ranks()
    end_at_interrupts()
    if sys.argv[1:2] == ["train"]:
        ignore_save_requests()
    _print_starting(sys.argv[1:])
    from toolkit.cli.app import main as command

    command()


def _leave_ranks() -> None:
    """Forgets of which rank another launcher speaks: in a pod of Kubeflow all programs have such variables.

    The command is no rank. Where it took itself for one other than the first, its errors would not be printed.
    """
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)


STARTING = {
    "train": "reading the recipe ...",
    "verify": "reading the recipe ...",
    "plan": "reading the recipe and the model's configuration ...",
    "data": "reading the recipe and its rows ...",
    "init": "reading the rows and the model's configuration ...",
    "doctor": "looking at this machine ...",
    "generate": "loading the model ...",
    "merge": "loading the base and the adapter ...",
    "sample": "loading the model ...",
}
"""Commands that import torch -> their first line."""


def _print_starting(arguments: list[str]) -> None:
    """Prints at once that a command began: the imports before the next line take seconds on a busy machine."""
    if not arguments or {"-h", "--help"}.intersection(arguments):
        return
    if line := STARTING.get(arguments[0]):
        print(line, file=sys.stderr, flush=True)


def finetune(arguments: list[str]) -> int:
    """recipes/finetune.py; see `toolkit.cli.ranks.finetune.finetune_command`."""
    if is_forked():
        _forget_launcher()
        _take_threads()
    end_at_interrupts()
    from toolkit.cli.ranks.finetune import finetune_command

    return finetune_command(arguments)


def _forget_launcher() -> None:
    """Takes away the launcher's handlers of signals, which a rank started as a separate process would not have."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _take_threads() -> None:
    """Takes as many threads as the launcher says, by a variable that torch reads when it is imported: too late here."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
