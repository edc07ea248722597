"""Ways in which a trace without memory tells another story than a GPU; each was met."""

from __future__ import annotations

import itertools
import resource
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.fsdp2_trace import trace
from support.planning_models import batch_of, build, config_of, objective_of, workload
from support.tiny import llama
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from toolkit.model.adapters.adapters import add_adapter
from toolkit.model.structure.fake_tensors import FakeTensorMode
from toolkit.objectives.distillation import Distillation
from toolkit.objectives.grpo import Grpo
from toolkit.objectives.losses.divergence import Divergence
from toolkit.optim.build import block_matrices, build_optimizer
from toolkit.planning.memory.fake import Ledger, cuda_dropout
from toolkit.planning.memory.probe import Probe, Prober
from toolkit.planning.memory.replay import replay
from toolkit.planning.memory.state_bytes import OPTIMIZER_BYTES, MemoryLayout, optimizer_bytes
from toolkit.planning.traffic import PARTIAL, traffic, with_teacher
from toolkit.planning.workload.unit_shapes import teacher_shapes, unit_shapes
from toolkit.planning.workload.workload import UNMASKED, Workload
from toolkit.recipe.schema import AdapterSection, OptimizerSection
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape
from toolkit.sharding.plan.units import plan_units

T = TypeVar("T")
ZERO3 = STRATEGIES["zero3"]
EIGHT = MeshShape(1, 8)


def peak(probe: Probe) -> int:
    return max(event.peak for event in probe.events)


def probed(work: Workload, rows: int = 2, checkpointing: Checkpointing | None = None) -> Probe:
    return Prober(work).probe(rows, checkpointing)


def test_the_first_step_is_like_the_others() -> None:
    """DTensor works out how operators shard at whole shapes, in the fake mode that is open: a step of the
    optimizer would be counted at many times its size, so none is traced."""
    work = workload("llama", tokens=16)
    parameters = 4 * sum(p.numel() for p in work.model.parameters())
    first, second = (trace(work, ZERO3, MeshShape(1, 64), 1) for _ in range(2))
    assert first == second
    assert first.peak < parameters


@pytest.mark.parametrize("attention", ["sdpa", UNMASKED])
def test_no_mask_of_packed_rows(attention: str) -> None:
    """transformers cannot look at fake positions and takes them for packed: a mask of T x T and repeated keys."""
    tokens = 160
    shapes: Counter[tuple[int, ...]] = Counter()

    def note(_func: Any, _args: Any, _kwargs: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            shapes[tuple(out.shape[-2:])] += 1

    with FakeTensorMode(allow_non_fake_inputs=True), Ledger(on_operator=note):
        model = build(config_of("llama", 1), meta=False, attention=attention)
        batch = batch_of("llama", tokens, 2048, 1)
        objective_of("llama")(model).loss_sum(model, batch).backward()
    assert bool(shapes[tokens, tokens]) == (attention == "sdpa")


def test_a_workloads_attention_is_its_copys() -> None:
    work = workload("llama", layers=1, tokens=160)
    work.model.set_attn_implementation("sdpa")
    assert peak(probed(replace(work, attention=UNMASKED))) < peak(probed(work))
    assert work.model.config._attn_implementation == "sdpa"


def test_a_model_that_refuses_an_attention_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: nn.Module, name: str) -> None:
        raise ValueError(f"{name} is not known here")

    work = workload("llama", layers=1)
    expected = probed(work)
    monkeypatch.setattr(type(work.model), "set_attn_implementation", refuse)
    assert probed(replace(work, attention="unheard of")) == expected


def test_a_dropout_mask_has_one_byte_per_element() -> None:
    tensor_bytes, mask_bytes = 4 * 64 * 64, 64 * 64
    with FakeTensorMode(), cuda_dropout():
        tensor = torch.empty(64, 64, requires_grad=True)
        with Ledger() as ledger:
            dropped = nn.Dropout(0.1)(tensor)
            assert ledger.current == tensor_bytes + mask_bytes
            del dropped
            assert ledger.current == 0
    assert F.dropout.__module__ == "torch.nn.functional"


def test_so_has_one_of_a_second_forward() -> None:
    types: list[torch.dtype] = []

    def note(func: Any, _args: Any, _kwargs: Any, out: Any) -> None:
        assert "bernoulli" not in str(func)
        if "empty_like" in str(func):
            types.append(out.dtype)

    with FakeTensorMode(), cuda_dropout():
        tensor = torch.empty(64, 64, requires_grad=True)
        with Ledger(on_operator=note):
            out = checkpoint(lambda x: F.dropout(x.sin(), 0.1), tensor, use_reentrant=False)
            assert types.count(torch.bool) == 1
            out.sum().backward()
            assert types.count(torch.bool) == 2


def test_dropout_of_a_model_costs_its_masks() -> None:
    """GPT-2 has three dropouts of (B, T, D) after the attention, whose own needs none, and one for the embeddings."""
    rows, tokens, width, layers = 2, 64, 128, 2
    level = []
    for dropout in (0.0, 0.1):
        found = probed(workload("gpt2", precision="no", tokens=tokens, layers=layers, dropout=dropout), rows)
        level.append(next(event.level for event in found.events if event.kind == "loss"))
    masks = (2 * layers + 1) * rows * tokens * width
    assert masks <= level[1] - level[0] <= 5 * masks


def test_adapters_are_made_outside_of_the_fake_mode() -> None:
    work = workload("llama", lora=True)
    assert all(parameter.is_meta for parameter in work.model.parameters())
    assert trace(work, ZERO3, EIGHT, 1).peak > 0
    assert all(parameter.is_meta for parameter in work.model.parameters())


def test_tied_embeddings_are_one_unit_with_three_gradients() -> None:
    """The head's, the embeddings', and their sum: autograd does not add in place."""
    vocabulary, width = 4096, 128
    work = workload("qwen2", tokens=16, vocabulary=vocabulary)
    owners = [unit.kind for unit in plan_units(work.model).units if unit.num_parameters >= vocabulary * width]
    assert owners == ["tail"]
    backward = [event for event in probed(work).events if event.kind == "post_backward"]
    table = 2 * vocabulary * width
    assert 3 * table <= max(event.peak for event in backward) < 3.5 * table


def test_parameters_without_memory_are_told_apart_by_identity() -> None:
    """On the meta device every data pointer is 0, and tied ones are one."""
    for kind in ("llama", "qwen2"):
        model = workload(kind).model
        assert {parameter.data_ptr() for parameter in model.parameters()} == {0}
        shapes = unit_shapes(model, plan_units(model), "bf16")
        assert sum(p.numel for shape in shapes for p in shape.parameters) == model.num_parameters()


def test_the_state_of_muon_is_one_moment_of_the_blocks_matrices() -> None:
    """As a step of the optimizer itself leaves it, and no more than a granule a tensor above."""
    model = llama(hidden_size=128, intermediate_size=256)
    optimizer = build_optimizer(model, OptimizerSection(kind="muon", learning_rate=1e-3))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [tensor for state in optimizer.state.values() for tensor in state.values()]
    plan = plan_units(model)
    layout = MemoryLayout(shard=1, compute=None, reduce=4, optimizer=OPTIMIZER_BYTES["muon"])
    shapes = unit_shapes(model, plan, "no", block_matrices(model, plan))
    planned = sum(optimizer_bytes(shape.trainable, layout, resident=False) for shape in shapes)
    found = sum(tensor.nbytes for tensor in kept)
    assert found <= planned <= found + 512 * len(kept)
    both = sum(optimizer_bytes(shape.trainable, layout, resident=False) for shape in unit_shapes(model, plan, "no"))
    assert both > 1.7 * found, "with two moments of each it would be nearly twice as much"


def test_the_trace_leaves_no_process_group() -> None:
    trace(workload("llama", layers=1), ZERO3, EIGHT, 1)
    assert not dist.is_initialized()
    broken = replace(workload("llama", layers=1), objective=lambda _model: object())  # type: ignore[arg-type,return-value]
    with pytest.raises(AttributeError):
        trace(broken, ZERO3, EIGHT, 1)
    assert not dist.is_initialized()


def test_experts_are_probed_as_grouped_products() -> None:
    """Batched products would repeat the weights of an expert for every token."""
    work = workload("mixtral", tokens=64)
    grouped = probed(work)
    work.model.set_experts_implementation("batched_mm")
    assert peak(probed(work)) > 5 * peak(grouped)


# Cost


LARGE = {"8b": (4096, 14336, 32, 32), "70b": (8192, 28672, 80, 64)}
"""Llama 3: width, hidden, layers, heads."""


def large(name: str) -> Workload:
    width, hidden, layers, heads = LARGE[name]
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        use_cache=False,
    )
    model = build(config, dtype=torch.bfloat16)
    return Workload(model, objective_of("llama"), lambda rows: batch_of("llama", 4096, 128256, rows), "bf16", 4096)


def python_calls(function: Callable[[], T]) -> tuple[int, T]:
    """How many Python functions ``function`` calls, which no load of the machine changes, and what it returns."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        found = function()
    finally:
        sys.setprofile(None)
    return calls, found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "70b" else name for name in LARGE]
)
def test_a_plan_costs_few_calls_and_no_memory(name: str) -> None:
    """A second's worth of calls, as many for 4,096 ranks as for 2."""
    work = large(name)

    def plan() -> tuple[Probe, Any]:
        prober = Prober(work)
        return prober.probe(1, Checkpointing(1)), unit_shapes(work.model, prober.plan, "bf16")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls, (probe, units) = python_calls(plan)
    mebibytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert calls < 4_000_000
    assert mebibytes < 300
    few, many = (
        python_calls(partial(replay, units, probe, ZERO3, MemoryLayout(ranks, 2, 4, 8), 4))[0] for ranks in (2, 4096)
    )
    assert many < 1.1 * few


CASES: list[Any] = [
    ("zero3", MeshShape(1, 8), 2, "bf16", "llama", {"width": 256, "layers": 4}, 64, 2048, False),
    ("zero3", MeshShape(1, 2), 1, "no", "qwen2", {"layers": 5}, 96, 4096, False),
    ("zero2", MeshShape(1, 4), 2, "bf16", "qwen3", {"width": 256, "layers": 2}, 16, 256, False),
    ("zero1", MeshShape(1, 4), 1, "bf16", "llama", {"layers": 2}, 160, 256, True),
    ("hybrid", MeshShape(2, 4), 1, "bf16", "qwen2", {"width": 256, "layers": 2}, 32, 2048, True),
    ("zero3", MeshShape(1, 1), 2, "bf16", "llama", {"layers": 4}, 48, 2048, False),
]
CUT: list[Any] = [
    ("zero3", MeshShape(1, 2, tensor=2), 2, "bf16", "llama", {"width": 256, "layers": 4}, 64, 2048, False),
    ("hybrid", MeshShape(2, 2, tensor=2), 1, "bf16", "qwen2", {"width": 256, "layers": 2}, 32, 2048, False),
    ("zero3", MeshShape(1, 1, tensor=4), 1, "no", "llama", {"layers": 4}, 48, 2048, False),
]
"""With tensor groups, which cut the model. All ranks share what is frozen."""


def taught(precision: str, teacher: str, sizes: dict[str, int], tokens: int, vocabulary: int, lora: bool) -> Workload:
    model = build(config_of("llama", 3, vocabulary))
    if lora:
        model = add_adapter(model, AdapterSection(kind="lora", r=8), None)
    dtype = {"bf16": torch.bfloat16, "no": torch.float32}[precision]
    asked = build(config_of(teacher, sizes["layers"], vocabulary + 64, sizes.get("width", 128)), dtype=dtype)

    def objective(model: nn.Module, teacher: nn.Module) -> Distillation:
        return Distillation(model, False, teacher, Divergence("forward_kl"))

    return Workload(
        model,
        objective,
        partial(batch_of, "llama", tokens, vocabulary),
        precision,
        tokens,
        teacher=asked.requires_grad_(False),
    )


def of_reference(precision: str, _: str, sizes: dict[str, int], tokens: int, vocabulary: int, __: bool) -> Workload:
    """Completions that were sampled, a row each, and a frozen copy of the model as the reference."""
    config = config_of("llama", sizes["layers"], vocabulary, sizes.get("width", 128))
    dtype = {"bf16": torch.bfloat16, "no": torch.float32}[precision]

    def objective(model: nn.Module, reference: nn.Module) -> Grpo:
        return Grpo(model, "grpo", 0.1, tokens, reference=reference)

    def batch(size: int) -> dict[str, torch.Tensor]:
        found = batch_of("llama", tokens, vocabulary, size)
        segments = torch.arange(size)[:, None].expand(size, tokens).clone()
        drawn, advantages = torch.zeros(size, tokens), torch.zeros(size)
        return {**found, "segments": segments, "drawn": drawn, "advantages": advantages}

    model, reference = build(config), build(config, dtype=dtype).requires_grad_(False)
    return Workload(model, objective, batch, precision, tokens, teacher=reference)


GRID = list(itertools.product(CASES, (taught, of_reference), (None, Checkpointing(1))))


@pytest.mark.parametrize(
    ("case", "made", "checkpointing"),
    # One in five: with and without checkpoints, of either kind of frozen model.
    [
        *(pytest.param(*one, marks=pytest.mark.slow if i % 5 == 0 else pytest.mark.grid) for i, one in enumerate(GRID)),
        *(pytest.param(case, taught, None, marks=pytest.mark.slow) for case in CUT),
    ],
)
def test_the_plan_is_the_trace(case: Any, made: Any, checkpointing: Checkpointing | None) -> None:
    name, mesh, accumulation, precision, *shape = case
    work, strategy = replace(made(precision, *shape), tensor=mesh.tensor), STRATEGIES[name]
    traced = trace(work, strategy, mesh, 2, accumulation, checkpointing)
    prober = Prober(work)
    probe = prober.probe(2, checkpointing)
    assert work.teacher is not None
    asked = teacher_shapes(work.teacher, plan_units(work.teacher), precision, mesh.tensor)
    own = unit_shapes(work.model if mesh.tensor == 1 else work.model_copy(), prober.plan, precision)
    compute = 2 if precision == "bf16" else None
    moments = replay([*asked, *own], probe, strategy, MemoryLayout(mesh.shard, compute, 4, 8), accumulation)
    peak = max(moments, key=lambda memory: memory.total - memory.optimizer)
    assert (peak.total - peak.optimizer) / traced.peak == pytest.approx(1, abs=0.02), (peak, traced)

    head = prober.teacher_head if probe.gathers_head else None
    sent = traffic(own, strategy, mesh, accumulation=accumulation, compute_bytes=compute)
    sent = with_teacher(sent, asked, head, mesh, accumulation, compute)
    found = {kind: size for kind, size in sent.whole.items() if size and kind != PARTIAL}  # of which a trace has none
    assert found == traced.traffic
