"""Runs a command with the pretended device: `python tests/cuda/run.py [python's arguments]`, by default these tests.

    python tests/cuda/run.py -m pytest tests/cuda tests/gpu
    PRETENDED_DEVICES=8 PRETENDED_GIB=79 python tests/cuda/run.py recipes/finetune.py quickstart
    PRETENDED_NUMBERS=300000 PRETENDED_LARGEST_COPY=2000000 python tests/cuda/run.py ...   # memory of a large model

It needs a build of torch for CUDA 13, as `pip install` brings, a C compiler and no GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from build import build, why_not

FOLDER = Path(__file__).parent
DEFAULTS = {"PRETENDED_DEVICES": "2", "PRETENDED_NUMBERS": "400000000", "OMP_NUM_THREADS": "1"}


def environment() -> dict[str, str]:
    """With which Python loads the pretended device at its start; what is set already stays."""
    libraries = build(Path(tempfile.gettempdir()) / f"pretended-device-{os.getuid()}")
    paths = [str(FOLDER / "site"), str(FOLDER.parents[1]), str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    return {**DEFAULTS, **os.environ, "PRETENDED_LIBRARIES": str(libraries), "PYTHONPATH": os.pathsep.join(paths)}


def main() -> None:
    if (reason := why_not()) is not None:
        sys.exit(f"no pretended device: {reason}")
    arguments = sys.argv[1:] or ["-m", "pytest", str(FOLDER), "-m", "grid or not grid"]
    os.execve(sys.executable, [sys.executable, *arguments], environment())


if __name__ == "__main__":
    main()
