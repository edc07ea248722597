"""A rank of `toolkit verify`: `python -m toolkit.cli.ranks.verify_rank FOLDER`, started by `toolkit.verify.ranks`."""

from __future__ import annotations

import sys
from pathlib import Path

from toolkit.cli.shared.console import prepare_process

if __name__ == "__main__":
    prepare_process()
    from toolkit.verify.sharded import rank_main  # torch is imported only now

    sys.exit(rank_main(Path(sys.argv[1])))
