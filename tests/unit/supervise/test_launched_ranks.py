"""What is said of ranks that torch's launcher has started: which one failed first, and how."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from toolkit.errors import BadInputError, StoppedError, ToolkitError
from toolkit.supervise.launched_ranks import _error_of

FAILED = [
    ([(1, "DataError: data.train: no rows")], BadInputError, "data.train: no rows"),
    ([(3, "StoppedError: stopped after step 3: SIGINT")], StoppedError, "stopped after step 3: SIGINT"),
    ([(1, "ToolkitError: no memory: left")], ToolkitError, "rank 0 failed: no memory: left"),
    ([(7, None)], ToolkitError, "rank 0 died with exit code 7"),
    # The first that said something; before it one that died silently, but for those that the launcher ended.
    ([(-15, None), (1, "OSError: 2"), (1, "OSError: 1")], ToolkitError, "rank 2 failed: OSError: 1"),
    ([(-15, None), (1, "OSError: lost its peer"), (-9, None)], ToolkitError, "rank 2 was ended by SIGKILL"),
]
"""For each rank the exit code and what it said, or None; the error and its first line."""


def test_the_failure_names_the_rank_that_failed_first(tmp_path: Path) -> None:
    for number, (ranks, kind, told) in enumerate(FAILED):
        failures = {}
        for rank, (code, said) in enumerate(ranks):
            folder = tmp_path / f"{number}/none_x/attempt_0/{rank}"
            folder.mkdir(parents=True)
            (folder / "stdout.log").write_text("first\n" * 20)
            (folder / "stderr.log").write_text(f"last of {rank}\n")
            if said is not None:
                message = {"message": said, "extraInfo": {"timestamp": "5"}}
                (folder / "error.json").write_text(json.dumps({"message": message}))
                os.utime(folder / "error.json", ns=(0, 100 - rank))
            failures[rank] = ProcessFailure(rank, 123, code, str(folder / "error.json"))
        words = "\nits last words:\n" + "first\n" * 14 + f"last of {told.split()[1]}" if kind is ToolkitError else ""
        error = _error_of(failures, tmp_path / str(number))
        assert (type(error), str(error)) == (kind, told + words)
