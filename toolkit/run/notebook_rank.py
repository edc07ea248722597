"""A rank of `finetune(recipe, num_processes=N)`: an interpreter of its own, which no state of the notebook's reaches.

python -m toolkit.run.notebook_rank JOB
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from toolkit.run.shown.notebook import RESULT
from toolkit.supervise.launched_ranks import run_as_rank


def main(job: Path) -> None:
    """Runs the rank; the first one leaves its result beside the job."""
    from toolkit.run.run import finetune

    sys.stderr = sys.stdout  # a cell has lines on stderr in red
    result = finetune(pickle.loads(job.read_bytes()))  # noqa: S301 (our own, in a folder of the user's)
    if os.environ["RANK"] == "0":
        job.with_name(RESULT).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    run_as_rank(lambda: main(Path(sys.argv[1])))
