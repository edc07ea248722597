"""Equal blocks share a graph, shapes cost few graphs, and what fails runs eagerly."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.packed_rows import VOCABULARY
from support.tiny import llama
from torch import nn
from torch._dynamo.utils import counters

from toolkit.errors import BadInputError
from toolkit.recipe.recipe import Recipe
from toolkit.run.stages.accelerator import build_plugins
from toolkit.sharding.blocks.checkpointing import Checkpointing, checkpoint_blocks
from toolkit.sharding.blocks.compiling import Compilation, compile_blocks
from toolkit.sharding.plan.units import plan_units
from toolkit.sharding.plugin import ShardingPlugin


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    counters.clear()
    yield
    torch.compiler.reset()
    counters.clear()


def compiled(backend: Any, checkpointed: bool = False) -> tuple[nn.Module, Compilation]:
    torch.manual_seed(0)
    model = llama("sdpa")
    compilation = Compilation(backend)
    plan = plan_units(model)
    compile_blocks(model, plan, compilation)
    if checkpointed:
        checkpoint_blocks(model, plan, Checkpointing(1))
    return model, compilation


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Loss, then gradients."""
    ids = torch.randint(0, VOCABULARY, (3, 16), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(16).remainder(7).expand(3, -1)
    model.zero_grad()
    loss = model(input_ids=ids, position_ids=positions, use_cache=False).logits.log_softmax(-1).square().mean()
    loss.backward()
    return [loss.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]


def eager() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return gradients(llama("sdpa"))


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_two_blocks_one_graph_and_the_eager_gradients(checkpointed: bool) -> None:
    model, compilation = compiled("aot_eager", checkpointed)
    torch.testing.assert_close(gradients(model), eager(), rtol=1e-5, atol=1e-7)
    assert num_graphs() == 1
    assert compilation.describe() == "each block compiled (aot_eager)"


class Stack(nn.Module):
    """Blocks that inductor compiles in seconds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_micro_batches_of_another_size_cost_two_graphs_more_and_further_sizes_nothing() -> None:
    model = Stack()
    compile_blocks(model, plan_units(model), Compilation("aot_eager"))
    found = []
    for rows in (3, 4, 2, 5, 6):
        inputs = torch.linspace(-1, 1, 8 * rows).view(rows, 8).requires_grad_()
        torch.testing.assert_close(model(inputs), Stack()(inputs), rtol=1e-5, atol=1e-7)
        found.append(num_graphs())
    assert found[0] == 1
    assert found[1:] == [found[1]] * 4
    assert found[1] <= 3
    with torch.no_grad():
        for rows in (3, 4, 5):
            model(torch.zeros(rows, 8))
    assert num_graphs() <= found[1] + 2


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a compiler on the CPU")
def test_inductor() -> None:
    found = []
    for compilation in (None, Compilation()):
        model = Stack()
        plan = plan_units(model)
        if compilation is not None:
            compile_blocks(model, plan, compilation)
            checkpoint_blocks(model, plan, Checkpointing(1))
        loss = model(torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()).square().sum()
        loss.backward()
        found.append([loss.detach(), *[p.grad for p in model.parameters()]])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)
    assert num_graphs() == 1
    assert compilation is not None
    assert compilation.describe() == "each block compiled (inductor)"


def assumes_strides(graph: Any, _inputs: Any) -> Any:
    """A backend whose graphs fail when they run, as with Qwen3-Next's."""

    def run(*_args: Any) -> Any:
        raise RuntimeError("view size is not compatible with input tensor's size and stride")

    return run


def test_a_graph_that_fails_at_its_first_run_is_left_for_eager_by_name() -> None:
    model = Stack()
    compilation = Compilation(assumes_strides)  # type: ignore[arg-type]
    compile_blocks(model, plan_units(model), compilation)
    inputs = torch.linspace(-1, 1, 24).view(3, 8)
    with pytest.warns(UserWarning, match=r"training\.compile: eager: .*view size is not compatible.*the run goes on"):
        torch.testing.assert_close(model(inputs), Stack()(inputs))
    assert str(compilation.problem).startswith("view size is not compatible")


def test_an_error_of_the_inputs_is_raised_and_nothing_is_blamed() -> None:
    model = Stack()
    compilation = Compilation("eager")
    compile_blocks(model, plan_units(model), compilation)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(3, 5))
    assert compilation.problem is None


def fails(*_: Any) -> Any:
    raise NotImplementedError("no such kernel")


def fails_in_backward(graph: Any, inputs: Any) -> Any:
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda module, _: module.forward, bw_compiler=fails)(graph, inputs)


@pytest.mark.parametrize("backend", [fails, fails_in_backward])
def test_what_cannot_be_compiled_runs_eagerly_and_says_why(backend: Any) -> None:
    model, compilation = compiled(backend)
    with pytest.warns(UserWarning, match="training.compile: eager: .*no such kernel"):
        found = gradients(model)
    torch.testing.assert_close(found, eager())
    assert "no such kernel" in compilation.describe()


def test_an_error_of_the_model_itself_is_its_own() -> None:
    model, _ = compiled("aot_eager")
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 8), model.get_input_embeddings().weight.shape[0]))


def test_the_setting_that_compiles_the_backward_at_once_is_still_there() -> None:
    import torch._functorch.config

    assert hasattr(torch._functorch.config, "enable_autograd_cache")
    assert hasattr(torch._functorch.config, "force_non_lazy_backward_lowering")


def test_settings_that_ddp_cannot_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(BadInputError, match=r"training.compile is not possible with .* ddp.*compile_blocks"):
        ShardingPlugin("ddp", compilation=Compilation())


@pytest.mark.parametrize("compiles", [True, False])
def test_a_model_that_accelerate_would_compile_is_refused(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would train to its end, and then fail to export an `OptimizedModule`."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    values = {
        "model": {"name_or_path": "m"},
        "data": {"train": "rows.jsonl", "max_length": 8},
        "optimizer": {"learning_rate": 1.0},
        "training": {"output_dir": "out", "max_steps": 1, "compile": compiles},
    }
    with pytest.raises(BadInputError, match=r"dynamo_backend of the Accelerate config is 'INDUCTOR', .*; remove it"):
        build_plugins(Recipe.from_mapping(values))
