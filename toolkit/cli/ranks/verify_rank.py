"""A rank of `toolkit verify`: `python -m toolkit.cli.ranks.verify_rank JOB`, started by `toolkit.verify.ranks`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from toolkit.cli.shared.console import prepare_process
from toolkit.supervise.launched_ranks import run_as_rank


def main(job: Path) -> None:
    """Runs the rank."""
    from toolkit.verify.sharded import rank_main  # torch is imported only now

    rank_main(job)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing to save
    prepare_process()
    run_as_rank(lambda: main(Path(sys.argv[1])))
