"""Preferences, KTO, rewards and distillation on rows with images: runs against losses written out, row by row.

Each half of a pair is its own conversation for transformers' processor and model (`support/image_objectives.py`).
docs/image_objectives.py runs every family, objective and case, and writes the table of docs/vision.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.image_objectives import CASES, HAVE_SCORES, compared, of_reference

WORK = {
    "llava": [
        *((objective, "2 ranks") for objective in ("ipo", "simpo", "orpo")),
        *(("dpo", case) for case in CASES if case != "2 ranks"),
        ("kto", "LoRA"),
        ("distillation", "packed"),
    ],
    # The tokens of an image see each other, and a classifier of transformers sees images.
    "gemma3": [("reward", "packed"), ("dpo", "packed"), ("kto", "2 ranks")],
}


@pytest.mark.parametrize("kind", WORK)
def test_a_run_is_the_plain_loop(kind: str, tmp_path: Path) -> None:
    for (objective, case), of_run in compared(tmp_path, kind, WORK[kind]).items():
        exact = case == "resumed"
        assert of_run.loss <= (0.0 if exact else 1e-5), f"{objective} {case}: {of_run}"
        assert of_run.weight <= (0.0 if exact else 5e-6), f"{objective} {case}: {of_run}"
    assert of_reference(tmp_path, kind) < 2e-5, "sums of log-probabilities around 30"
    assert (kind in HAVE_SCORES) == any(objective == "reward" for objective, _ in WORK[kind])
