"""How far two exports are from each other."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from toolkit.run.reproduction import Difference, difference

A = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([math.nan, 0.0])}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({}, Difference(2, 0, 0.0, "")),  # what is not a number has bits, too
        ({"a": torch.tensor([1.5, -4.0])}, Difference(2, 1, 0.125, "a")),
        ({"b": torch.tensor([math.nan, -0.0])}, Difference(2, 1, math.inf, "b")),
        ({"a": torch.tensor([1.0, -4.0]).bfloat16()}, Difference(2, 1, math.inf, "a")),
        ({"a": torch.tensor([1.0])}, Difference(2, 1, math.inf, "a")),
        ({"c": torch.zeros(1)}, Difference(2, 1, math.inf, "c")),
    ],
)
def test_a_difference_is_that_of_bits(tmp_path: Path, other: dict[str, torch.Tensor], expected: Difference) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    save_file(A, tmp_path / "one" / "model.safetensors")
    first, *rest = sorted({**A, **other})  # in two files, as an export of another size would be
    whole = {**A, **other}
    save_file({first: whole[first]}, tmp_path / "other" / "model-00001-of-00002.safetensors")
    save_file({name: whole[name] for name in rest}, tmp_path / "other" / "model-00002-of-00002.safetensors")
    assert difference(tmp_path / "one", tmp_path / "other") == expected


def test_signs_of_zero_are_told_apart(tmp_path: Path) -> None:
    for name, zero in (("one", 0.0), ("other", -0.0)):
        (tmp_path / name).mkdir()
        save_file({"a": torch.tensor([zero, 2.0])}, tmp_path / name / "model.safetensors")
    assert difference(tmp_path / "one", tmp_path / "other") == Difference(1, 1, 0.0, "a")
