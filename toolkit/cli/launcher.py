"""Starting ranks by Accelerate's own launcher, in this process, with its exit code and without its traceback."""

from __future__ import annotations

import logging
import signal
import subprocess
from collections.abc import Sequence

from toolkit.errors import BadInputError, ToolkitError, first_line


def run_launcher(arguments: Sequence[str]) -> int:
    """`accelerate launch ARGUMENTS`; returns the exit code of the rank that failed first, 0 where none did.

    Raises:
        BadInputError: where the launcher refuses its arguments or the config.
        ToolkitError: where a signal ended a rank.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # A rank prints its own error; torch's launcher would add forty lines about exit codes.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        launch_command(launch_command_parser().parse_args(list(arguments)))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _exit_code(rank, failure.exitcode)
    except subprocess.CalledProcessError as error:
        return _exit_code(0, error.returncode)
    except SignalException as error:
        return 128 + int(error.sigval)
    except ValueError as error:
        raise BadInputError(f"accelerate launch: {first_line(error)}") from error
    return 0


def _exit_code(rank: int, code: int) -> int:
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    hint = ": the machine may have run out of memory" if name == "SIGKILL" else ""
    raise ToolkitError(f"rank {rank} was ended by {name}{hint}")
