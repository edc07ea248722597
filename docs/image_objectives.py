"""Runs every objective on rows with images for families of models, and writes the table of docs/vision.md.

    python docs/image_objectives.py llava gemma3

A cell is the larger of two differences from a loop on transformers' model and processor, row by row: of a loss, as its
share, and of a weight after the last step. A family takes some minutes on two CPU cores.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.image_objectives import CASES, HAVE_SCORES, NOT_PACKED, OBJECTIVES, compared

PAGE = Path(__file__).with_name("vision.md")
HEAD = f"| family | {' | '.join(CASES)} |"


def row_of(kind: str) -> str:
    """Returns the line of a family: for each case the largest difference of any objective."""
    objectives = [name for name in OBJECTIVES if name != "reward" or kind in HAVE_SCORES]
    cases = [case for case in CASES if case != "packed" or kind not in NOT_PACKED]
    work = [(objective, case) for objective in objectives for case in cases]
    with TemporaryDirectory() as folder:
        found = compared(Path(folder), kind, work)
    each = [
        max((max(one.loss, one.weight) for (_, its), one in found.items() if its == case), default=None)
        for case in CASES
    ]
    cells = ["" if largest is None else f"{largest:.0e}" for largest in each]
    return f"| `{kind}` | {' | '.join('0' if cell == '0e+00' else cell for cell in cells)} |"


def write(kind: str, line: str) -> None:
    """Puts the line of a family into the table, in place of its earlier one."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(HEAD)
    rule, *table = rest.lstrip("\n").split("\n\n")[0].splitlines()
    after = rest.lstrip("\n").partition("\n\n")[2]
    kept = [other for other in table if not other.startswith(f"| `{kind}` |")]
    text = "\n".join([HEAD, rule, *kept, line])
    PAGE.write_text(f"{before}{text}\n\n{after}", encoding="utf-8")


def main() -> None:
    for kind in sys.argv[1:]:
        write(kind, row_of(kind))


if __name__ == "__main__":  # ranks are processes of their own
    main()
