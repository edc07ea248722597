"""The script for the first hours with a GPU: limits, and processes that fail or hang."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def acceptance() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import acceptance

        return acceptance
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_a_part_takes_ten_minutes_at_most(acceptance: ModuleType) -> None:
    steps = acceptance.steps_of(False, "")
    assert [step.part for step in steps] == sorted(step.part for step in steps)
    assert {part: sum(step.limit for step in steps if step.part == part) for part in (1, 2, 3, 4)} == {
        1: 600,
        2: 600,
        3: 600,
        4: 600,
    }


def run(acceptance: ModuleType, code: str, limit: float = 60.0) -> dict[str, object]:
    """Two processes that run the same code; RANK tells them apart."""
    environments = [{"RANK": "0"}, {"RANK": "1"}]
    found: dict[str, object] = acceptance.run(
        acceptance.Step("step", [sys.executable, "-c", code], limit, processes=environments), tiny=False
    )
    return found


def test_a_process_that_fails_ends_the_step_and_is_the_one_that_is_told_of(acceptance: ModuleType) -> None:
    code = "import os, time\nif os.environ['RANK'] == '1': raise SystemExit('rank 1 says why')\ntime.sleep(600)"
    found = run(acceptance, code, limit=60)
    assert not found["passed"]
    assert "rank 1 says why" in str(found["printed"])


def test_a_step_that_hangs_is_ended(acceptance: ModuleType) -> None:
    found = run(acceptance, "import time; time.sleep(600)", limit=0.5)
    assert not found["passed"]
    assert "ended after" in str(found["printed"])


def test_a_run_that_ends_before_it_is_killed_is_told(acceptance: ModuleType, tmp_path: Path) -> None:
    told = acceptance._killed_after_a_checkpoint([sys.executable, "-c", ""], tmp_path)
    assert told == "the run had ended before it was killed"


def test_what_an_image_lacks(acceptance: ModuleType) -> None:
    import carry

    image = {"torch": "2.11.0+cu130", "transformers": "5.17.0", "numpy": "2.3.1", "pyyaml": "6.0.2"}
    image |= {"tokenizers": "0.22.2", "regex": "2.0"}
    required = ["torch>=2.11,<2.16", "transformers>=5.24,<5.25", "datasets>=4.0", "numpy>=1.26", "PyYAML>=6"]
    assert carry.missing(required, image) == ["transformers>=5.24,<5.25", "datasets>=4.0"]
    machine = carry.Machine("3.12", "x86_64", image, carry.missing(required, image))
    planned = {"transformers": "5.24.0", "datasets": "5.2.0", "numpy": "2.3.1", "torch": "2.15.0", "dill": "0.4.1"}
    planned |= {"tokenizers": "0.23.1", "regex": "9.1", "nvidia-cublas": "13.1"}
    needs = {
        "transformers": ["tokenizers>=0.23", "numpy>=1.17", "regex>=9; extra == 'words'"],
        "datasets": ["dill>=0.3"],
    }
    needs |= {"torch": ["numpy>=3", "nvidia-cublas>=13"], "dill": ["torch>=2"]}
    report = {
        "install": [
            {"metadata": {"name": name, "version": each, "requires_dist": needs.get(name, [])}}
            for name, each in planned.items()
        ]
    }
    # tokenizers is there, and too old for this transformers; the torch that is there stays, whatever a new one needs.
    expected = ["datasets==5.2.0", "dill==0.4.1", "tokenizers==0.23.1", "transformers==5.24.0"]
    assert carry.wanted(report, machine) == expected
    assert "transformers>=5.24,<5.25 (found: 5.17.0)" in machine.told()
