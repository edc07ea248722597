"""What is asked for, where it may stand, and which executor it comes to."""

from __future__ import annotations

import pytest
import torch
from support.cases import cases
from torch import nn

from toolkit.errors import BadInputError, ToolkitError
from toolkit.recipe.recipe import Recipe
from toolkit.run.stages.accelerator import build_plugins, offload_of
from toolkit.sharding.launched import STRATEGY_VARIABLE, resolve_offload, resolve_strategy
from toolkit.sharding.offload import OffloadSettings
from toolkit.sharding.offload import engine as choice
from toolkit.sharding.offload.host import HostPlan
from toolkit.sharding.offload.settings import hyper_parameters, state_names
from toolkit.sharding.plan.strategy import parse_strategy

TABLES = cases(__file__)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(4))]


@pytest.mark.parametrize(("configured", "strategy", "offload", "expected"), TABLES["ASKED"])
def test_where_offload_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, configured: str | None, strategy: str | None, offload: str | None, expected: bool
) -> None:
    monkeypatch.delenv(STRATEGY_VARIABLE, raising=False)
    if configured is not None:
        monkeypatch.setenv(STRATEGY_VARIABLE, configured)
    assert (resolve_offload(strategy, offload) is not None) == expected
    assert resolve_strategy(strategy).name == (configured or strategy or "zero3").lower().removesuffix("+offload")


def test_an_unknown_suffix_is_told() -> None:
    with pytest.raises(BadInputError, match=r"'zero3\+ofload'.*each but ddp also with \+offload"):
        parse_strategy("zero3+ofload", "here")


def test_details_without_offload_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STRATEGY_VARIABLE, raising=False)
    recipe = Recipe.load("quickstart", ["sharding.offload_executor=cpu_torch"])
    with pytest.raises(BadInputError, match=r"sharding.offload_executor has no effect without offload"):
        build_plugins(recipe)
    monkeypatch.setenv(STRATEGY_VARIABLE, "zero3+offload")
    assert offload_of(recipe) == OffloadSettings(executor="cpu_torch")
    with pytest.raises(BadInputError, match=r"sharding.device_state_gib has no effect without offload"):
        Recipe.load("quickstart", ["sharding.offload=none", "sharding.device_state_gib=1"])


def test_without_clipping_the_step_is_taken_during_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STRATEGY_VARIABLE, raising=False)
    for limit, expected in (("null", True), ("1.0", False)):
        recipe = Recipe.load("quickstart", ["sharding.offload=optimizer", f"training.max_grad_norm={limit}"])
        settings = offload_of(recipe)
        assert isinstance(settings, OffloadSettings)
        assert settings.during_backward == expected


def test_the_tensors_that_optimizers_keep() -> None:
    """As torch itself keeps them after a step."""
    for optimizer in (
        torch.optim.AdamW(parameters()),
        torch.optim.AdamW(parameters(), amsgrad=True),
        torch.optim.Adam(parameters()),
        torch.optim.SGD(parameters(), momentum=0.9),
        torch.optim.SGD(parameters()),
    ):
        told = state_names(optimizer)
        parameter = optimizer.param_groups[0]["params"][0]
        parameter.grad = torch.ones(4)
        optimizer.step()
        kept = {name for name, value in optimizer.state[parameter].items() if value is not None}
        assert set(told) == kept - {"step"}


def test_hyper_parameters_are_a_copy() -> None:
    optimizer = torch.optim.AdamW(parameters(), lr=torch.tensor(1e-3), weight_decay=0.3)
    (settings,) = hyper_parameters(optimizer)
    optimizer.param_groups[0]["lr"].fill_(5.0)
    assert settings["lr"] == pytest.approx(1e-3)
    assert settings["weight_decay"] == 0.3
    assert "params" not in settings


def test_auto_is_the_kernel_where_every_rank_can_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose host has no compiler makes all take torch's step; so does another optimizer."""
    adamw = torch.optim.AdamW(parameters())
    assert choice.choose("auto", adamw) == ("cpu_fused", "its kernel can be built here")
    assert choice.choose("auto", torch.optim.SGD(parameters())) == ("cpu_torch", "cpu_fused: it steps AdamW, not SGD")
    monkeypatch.setattr(choice.ranks, "gather_objects", lambda mine: [mine, "there is no compiler"])
    assert choice.choose("auto", adamw) == ("cpu_torch", "cpu_fused: there is no compiler")
    with pytest.raises(BadInputError, match="there is no compiler; use cpu_torch or auto"):
        choice.choose("cpu_fused", adamw)

    def no_compiler() -> None:
        raise ToolkitError("found none")

    monkeypatch.undo()
    monkeypatch.setattr(choice, "load_kernel", no_compiler)
    assert choice.choose("auto", adamw) == ("cpu_torch", "cpu_fused: found none")


@pytest.mark.parametrize(
    ("device", "ranks_of_host", "expected"), [("cpu", 2, 4), ("cuda", 2, 6), ("cuda", 16, 1), ("cpu", 64, 1)]
)
def test_threads_are_the_ranks_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, device: str, ranks_of_host: int, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_of_host))
    assert choice.default_threads(torch.device(device)) == expected


def test_a_plan_is_readable() -> None:
    plan = HostPlan(masters=4 * 2**30, moments=8 * 2**30, gradients=2 * 2**30, staging=2**20)
    assert str(plan) == "14.0 GiB (masters 4.00 GiB, moments 8.00 GiB, gradients 2.00 GiB, staging 1.00 MiB)"
