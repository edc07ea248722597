"""Private modules of other packages are named in few files, so that an upgrade has few places to mend."""

from __future__ import annotations

import re
from pathlib import Path

PRIVATE = re.compile(r"\b(?:torch|accelerate|transformers)\.(?:\w+\.)*_[a-z]\w*")


def test_private_modules_are_named_in_few_files() -> None:
    package = Path(__file__).parents[4] / "toolkit"
    naming = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(PRIVATE.search(line) for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    }
    assert naming == {
        "__init__.py",  # the name of a logger
        "cli/shared/console.py",  # the name of its logger
        "model/structure/fake_tensors.py",
        "planning/memory/fake.py",
        "run/stages/accelerator.py",  # whether CUDA is unusable after a fork
        "sharding/fsdp2/fsdp.py",
        "sharding/fsdp2/fsdp_replaced.py",
        "sharding/fsdp2/gloo.py",
        "sharding/fsdp2/shards.py",
        "sharding/blocks/compiling.py",
    }
