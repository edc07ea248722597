"""benchmarks/loaders.py says of an export what another loader makes of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

OURS = {"logits": [0.5, -2.0], "as_base": {"tokens": True, "conversation": True}}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (OURS, "equal"),
        ({**OURS, "logits": [0.5001, -2.0]}, "equal"),
        ({**OURS, "logits": [0.501, -2.0]}, "differs: logits by 5e-04"),
        ({**OURS, "logits": [float("nan"), -2.0]}, "differs: logits by nan"),
        ({**OURS, "as_base": {"tokens": False, "conversation": False}}, "differs: tokens, conversation"),
        ({"error": "ValueError: no such class"}, "ValueError: no such class"),
    ],
)
def test_an_answer_is_compared(found: dict[str, object], told: str) -> None:
    import loaders

    assert loaders.verdict(OURS, found) == told


def test_what_is_not_equal_is_listed_below_the_table() -> None:
    import loaders

    found = loaders.as_text({"old": {"phi3: full": "equal", "qwen2: full": "KeyError: 1", "qwen2: LoRA": "equal"}})
    assert "| old | 1 of 2 |  | 1 of 1 |" in found
    assert found.rstrip().endswith("- old, qwen2: full: KeyError: 1")
