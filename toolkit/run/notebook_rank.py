"""A rank of `finetune(recipe, num_processes=N)`: an interpreter of its own, which no state of the notebook's reaches.

python -m toolkit.run.notebook_rank JOB
"""

from __future__ import annotations

import os
import pickle
import sys
from multiprocessing.connection import Client
from pathlib import Path

from toolkit.run.shown.notebook import Job
from toolkit.supervise.launched_ranks import run_as_rank


def main(job: Job) -> None:
    """Runs the rank."""
    from toolkit.run.run import finetune
    from toolkit.run.shown import notebook

    if job.in_notebook:
        sys.stderr = sys.stdout  # a cell has lines on stderr in red
    is_first = os.environ["RANK"] == "0"
    if is_first:
        notebook.connection = Client(job.address, authkey=job.key)
        notebook.shows = job.in_notebook
    result = finetune(job.recipe)
    if is_first:
        notebook.send(result)


if __name__ == "__main__":
    file = Path(sys.argv[1])  # our own, in a folder of the user's
    run_as_rank(lambda: main(pickle.loads(file.read_bytes())))  # noqa: S301
