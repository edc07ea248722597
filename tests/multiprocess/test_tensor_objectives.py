"""Objectives whose model's matrices two ranks cut: the steps and held-out figures of the plain loop, one after another.

The pairs of `test_all_pairs.py` have each objective once with tensor groups; here each is with what its model needs
besides, on two ranks that have the same rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support import plain_objectives
from support.covering import Row
from support.ranks import run_on_ranks
from test_all_pairs import FACTORS, ROWS_PER_STEP, STEPS, model_of, runs, wrong_figures

PLAIN: Row = {
    **{name: values[0] for name, values in FACTORS.items()},
    "strategy": "zero3",
    "tensor": 2,
    "compile": False,
}
PLAIN |= {"adapter": "none", "optimizer": "adamw", "max_grad_norm": 0.5, "accumulate": "by_micro_batch"}
CASES: list[dict[str, Any]] = [
    {"objective": objective, **more}
    for objective in ("distillation", "reward", "sequence_classification", "token_classification")
    for more in ({}, {"adapter": "lora", "accumulate": "one"})
]
CASES += [
    {"objective": "distillation", "activation_checkpointing": 1, "offload": "optimizer"},
    {"objective": "reward", "activation_checkpointing": 1, "offload": "optimizer", "adapter": "lora"},
]


def test_objectives_are_the_plain_loop(with_objectives: Path) -> None:
    rows = [{**PLAIN, **case} for case in CASES]
    found = run_on_ranks(runs, 2, with_objectives, with_objectives / "text.jsonl", rows)[0]
    wrong = []
    for row, records in zip(rows, found, strict=True):
        expected = plain_objectives.expected_run(
            *(with_objectives, row["objective"], model_of(row), row["adapter"], "adamw", row["max_grad_norm"]),
            *(STEPS, ROWS_PER_STEP[2]),
        )
        wrong += [f"{row}: {each}" for each in wrong_figures(row, records, expected)]
    assert not wrong, "\n".join(wrong)
