"""What ranks find in their rows of a model's weights, together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolkit import ranks
from toolkit.errors import BadInputError
from toolkit.model.weights.weight_values import Values


def model() -> nn.Module:
    found = nn.Linear(3, 4)
    found.register_buffer("mask", torch.full((2, 2), float("-inf")))
    return found


def found_by(rows: list[torch.Tensor | None], monkeypatch: pytest.MonkeyPatch, name: str = "weight") -> list[str]:
    """What rank 0 is told where each rank has read these rows; None: it has read nothing."""
    sent: list[object] = []
    monkeypatch.setattr(ranks, "gather_objects", lambda value: sent.append(value) or list(sent))
    for part in reversed(rows):
        values = Values("tiny", model())
        if part is not None:
            values.look(name, part)
            values.look(name, part)
        try:
            last = values.zero()
        except BadInputError:
            if len(sent) == len(rows):
                raise
    return last


ZERO, SOME, NONE = torch.zeros(2, 3), torch.tensor([[0.0, 0.0, 1e-30]]), torch.zeros(0, 3)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([ZERO, ZERO], ["weight"]),
        ([ZERO, SOME], []),
        ([SOME, ZERO], []),
        ([ZERO, NONE], ["weight"]),
        ([SOME, NONE], []),
        ([ZERO, None], ["weight"]),
        ([SOME, None], []),
        ([ZERO.bfloat16(), ZERO.to(torch.float8_e4m3fn)], ["weight"]),
        ([None, None], []),
    ],
)
def test_a_matrix_is_zero_where_every_rank_that_reads_it_says_so(
    rows: list[torch.Tensor | None], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found_by(rows, monkeypatch) == told


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_number_that_is_not_finite_is_refused_by_all(
    bad: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled = torch.ones(2, 3, dtype=dtype)
    spoiled[1, 1] = bad
    with pytest.raises(BadInputError, match="1 of the weights of 'tiny' hold numbers that are not finite: weight;"):
        found_by([SOME, spoiled], monkeypatch)


@pytest.mark.parametrize("name", ["mask", "lora_A.weight"])
def test_buffers_and_what_is_not_in_the_files_are_not_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_by([torch.full((2, 2), float("nan"))], monkeypatch, name) == []


def test_a_bias_or_a_norm_of_zeros_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_by([torch.zeros(4)], monkeypatch, "bias") == []
