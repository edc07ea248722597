"""Entry points of the `toolkit` command and recipes/finetune.py, which handle Ctrl-C before any long import."""

from __future__ import annotations

import signal
import sys

from toolkit.cli.shared.signals import end_at_interrupts, ignore_save_requests, is_forked


def main() -> None:
    """The `toolkit` command; see `toolkit.cli.app.main`."""
    end_at_interrupts()
    if sys.argv[1:2] == ["train"]:
        ignore_save_requests()
    _print_starting(sys.argv[1:])
    from toolkit.cli.app import main as command

    command()


def _print_starting(arguments: list[str]) -> None:
    """Prints at once that `toolkit train` began: the imports behind the next word take seconds on a busy machine."""
    if arguments[:1] == ["train"] and not {"-h", "--help"}.intersection(arguments):
        print("reading the recipe ...", file=sys.stderr, flush=True)


def finetune(arguments: list[str]) -> int:
    """recipes/finetune.py; see `toolkit.cli.ranks.finetune.finetune_command`."""
    if is_forked():
        _forget_launcher()
    end_at_interrupts()
    from toolkit.cli.ranks.finetune import finetune_command

    return finetune_command(arguments)


def _forget_launcher() -> None:
    """Takes away the launcher's handlers of signals, which a rank started as a separate process would not have."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
