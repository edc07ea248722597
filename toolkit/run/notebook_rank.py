"""A rank of `finetune(recipe, num_processes=N)`: an interpreter of its own, which no state of the notebook's reaches.

python -m toolkit.run.notebook_rank JOB
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from multiprocessing.connection import Client
from pathlib import Path

from toolkit.errors import ToolkitError
from toolkit.run.shown.notebook import Job


def main(job: Job) -> int:
    """Runs the rank. Returns its exit code; what went wrong is in the file that torch's launcher reads."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    handler = get_error_handler()
    handler.initialize()
    if job.in_notebook:
        sys.stderr = sys.stdout  # a cell has lines on stderr in red
    try:
        _run(job)
    except BaseException as error:
        handler.record_exception(error)
        if isinstance(error, ToolkitError):
            return error.exit_code
        traceback.print_exc()
        return 1
    return 0


def _run(job: Job) -> None:
    from toolkit.run.run import finetune
    from toolkit.run.shown import notebook

    is_first = os.environ["RANK"] == "0"
    if is_first:
        notebook.connection = Client(job.address, authkey=job.key)
        notebook.shows = job.in_notebook
    result = finetune(job.recipe)
    if is_first:
        notebook.send(result)


if __name__ == "__main__":
    code = main(pickle.loads(Path(sys.argv[1]).read_bytes()))  # noqa: S301 - our own file, in a folder of the user's
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python's own end would take the process group down, which may wait for other ranks
