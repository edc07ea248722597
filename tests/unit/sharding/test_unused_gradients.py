"""Parameters that some ranks or no rank used in a step, on records that stand in for those of FSDP2."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from toolkit import ranks
from toolkit.errors import TrainingError
from toolkit.sharding.fsdp2.fsdp import fill_missing_gradients
from toolkit.sharding.fsdp2.unit_states import UnitStates
from toolkit.sharding.fsdp2.unused import UsedParameters, drop_unused_gradients
from toolkit.sharding.plan.strategy import STRATEGIES


class Record:
    """Of a parameter that is its own shard and gathered one."""

    unsharded_accumulated_grad = None

    def __init__(self, parameter: nn.Parameter) -> None:
        self.sharded_param = self.unsharded_param = self._unsharded_param = parameter


def group_of(*parameters: nn.Parameter) -> Any:
    return SimpleNamespace(fsdp_params=list(map(Record, parameters)), _partial_reduce_output=None)


def pair() -> tuple[nn.Parameter, nn.Parameter]:
    """One with a gradient, and one without."""
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    used.grad = torch.full((3,), 2.0)
    return used, unused


def test_a_rank_that_did_not_use_a_parameter_adds_nothing_to_its_gradient() -> None:
    used, unused = pair()
    assert fill_missing_gradients(group_of(used, unused)) == [unused]
    assert unused.grad is not None
    assert (used.grad.tolist(), unused.grad.tolist()) == ([2.0] * 3, [0.0] * 2)


def used_in_a_step(*groups: Any) -> UsedParameters:
    found = UsedParameters(nn.Linear(1, 1), lambda _: False)
    found._groups = list(groups)
    for number, group in enumerate(groups):
        found._fill_and_record(number, group)
    return found


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_what_no_rank_used_is_neither_stepped_nor_decayed(penalty: float) -> None:
    used, unused = pair()
    found = used_in_a_step(group_of(used, unused))
    unused.grad += penalty  # the backward of a loss of the parameter itself, after the model's
    optimizer = torch.optim.AdamW([used, unused], lr=0.1, weight_decay=0.5)
    drop_unused_gradients(optimizer, found)
    optimizer.step()
    assert (unused.tolist() == [1.0, 1.0]) == (penalty == 0.0)
    assert used.tolist() != [1.0] * 3


def test_a_gradient_that_is_dropped_is_not_summed_into_the_next_step() -> None:
    """It may be on its way: whole, or summed over one replica."""
    dropped, kept = pair()
    groups = [group_of(dropped), group_of(kept)]
    for group in groups:
        group._partial_reduce_output = torch.ones(3)
        group.fsdp_params[0].unsharded_accumulated_grad = torch.ones(3)
    found = used_in_a_step()
    found._groups = groups
    found.drop_unreduced([dropped])
    assert [group.fsdp_params[0].unsharded_accumulated_grad is None for group in groups] == [True, False]
    assert [group._partial_reduce_output is None for group in groups] == [True, False]


@pytest.mark.parametrize("is_other", [False, True])
def test_ranks_that_reduce_other_units_do_not_take_a_step(is_other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other of two ranks has used the second parameter alone, in the same unit or in another one."""
    used, unused = pair()
    found = used_in_a_step(group_of(used, unused))
    order = found.order + is_other

    def maximum(numbers: torch.Tensor, *_: Any, **__: Any) -> None:
        numbers.copy_(torch.maximum(numbers, torch.tensor([order, -order, 0, 1])))

    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks, "host_group", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", maximum)
    if is_other:
        with pytest.raises(TrainingError, match="the ranks used different units"):
            found.used_by_any([used, unused])
    else:
        assert found.used_by_any([used, unused]) == [True, True]


SWITCHES = {
    "zero1": ([False, True], [False, True], None),
    "zero2": ([True, True], [False, True], None),
    "zero3": ([True, True], [True, True], None),
    "hybrid": ([True, True], [True, True], [False, True]),
}
"""In a micro-batch and in the last one: whether gradients are reduced, parameters freed, and replicas summed."""


@pytest.mark.parametrize("name", SWITCHES)
def test_what_a_strategy_sends_and_frees_in_each_micro_batch(name: str) -> None:
    told: dict[str, list[bool]] = {}
    names = ("requires_gradient_sync", "reshard_after_backward", "requires_all_reduce")
    root = SimpleNamespace(**{f"set_{switch}": told.setdefault(switch, []).append for switch in names})
    for is_last in (False, True):
        UnitStates(root).begin_micro_batch(STRATEGIES[name], is_last)
    assert tuple(told[switch] or None for switch in names) == SWITCHES[name]
