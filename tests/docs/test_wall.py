"""docs/wall.md: its programs print the numbers of its table, where the peer's is wrong and ours is right."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.launches import clean_environment
from support.ranks import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/examples/wall"
NUMBER = r"(\d[\d.e+-]*)"
ROW = re.compile(rf"^\| \[(\w+)\]\(examples/wall/\1\.py\) \|.*\| {NUMBER} \| {NUMBER} \| {NUMBER} \|$", re.MULTILINE)
PRINTED = re.compile(rf": peer {NUMBER}, right {NUMBER}, ours {NUMBER}$", re.MULTILINE)
TABLE = {
    name: [float(number) for number in numbers] for name, *numbers in ROW.findall((ROOT / "docs/wall.md").read_text())
}
OURS_WITHIN = {"stop_token": 1e-3}
"""Sixty steps of another AdamW; elsewhere float32's rounding."""


@pytest.mark.first
def test_the_table_has_a_row_for_each_program() -> None:
    assert sorted(TABLE) == sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "_common")


@pytest.mark.grid
@pytest.mark.parametrize("name", TABLE)
def test_a_program_prints_the_numbers_of_the_table(name: str) -> None:
    program = (FOLDER / f"{name}.py").read_text()
    for package in ("trl", "deepspeed"):
        if f"from {package}" in program and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    environment = clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")],
        env=environment, cwd=ROOT, text=True, capture_output=True, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = PRINTED.findall(done.stdout)
    peer, right, ours = map(float, found)
    assert ours == pytest.approx(right, rel=OURS_WITHIN.get(name, 1e-5))
    assert abs(peer - right) > 0.004 * right, "the peer has mended it: take its row out of docs/wall.md"
    assert [peer, right, ours] == pytest.approx(TABLE[name], rel=2e-3, abs=1e-4)
