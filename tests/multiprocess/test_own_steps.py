"""Loops of one's own, drawn at random, train as torch's own loop does, or are refused by name."""

from __future__ import annotations

import gc
import pickle
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.backend import accelerated
from support.ranks import run_on_ranks
from support.tiny import llama
from torch import nn

from toolkit.errors import ToolkitError
from toolkit.sharding import OffloadSettings
from toolkit.sharding.blocks.by_block import ByBlock

WINDOWS = 5
NUM_PARAMETERS = 15
STRATEGIES = ["zero1", "zero2", "zero3", "zero3+offload"]
Program = list[tuple[str, Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.branch = nn.Linear(8, 8)
        self.fails = ""

    def forward(self, x: torch.Tensor, branches: bool) -> torch.Tensor:
        y = x + torch.tanh(self.linear(x)) * next(self.parameters()).ndim  # as transformers' `dtype` reads them
        y = y + torch.tanh(self.branch(y)) if branches else y
        if self.fails == "forward":
            raise torch.OutOfMemoryError
        if self.fails == "backward":
            y = y * torch.ones((), requires_grad=True)  # all before may be frozen
            y.register_hook(_fail)
        return y


def _fail(_gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor, depth: int, branches: bool) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers[:depth]:
            x = layer(x, branches)
        return self.head(x)


class Loop:
    """Takes the steps of a program: of the toolkit on the rows of this rank, or of torch on those of all ranks.

    Args:
        strategy: None for torch's own loop.
        num_optimizers: how many share the parameters.
    """

    def __init__(self, strategy: str | None, num_optimizers: int = 1) -> None:
        model = Model()
        listed = list(model.parameters())
        groups = [listed[number::num_optimizers] for number in range(num_optimizers)]
        optimizers = [torch.optim.AdamW(group, lr=0.02, weight_decay=0.5, eps=1e-3) for group in groups]
        self.accelerator: Any = None if strategy is None else accelerator_of(strategy)
        self.model: Any
        self.model, *self.optimizers = (
            (model, *optimizers) if self.accelerator is None else self.accelerator.prepare(model, *optimizers)
        )
        self.seen: list[torch.Tensor] = []

    def step_inside_backward(self) -> None:
        owners = {p: each for each in self.raw_optimizers() for group in each.param_groups for p in group["params"]}

        def act(parameter: torch.Tensor) -> None:
            owners[parameter].step()
            owners[parameter].zero_grad()

        for parameter in owners:
            parameter.register_post_accumulate_grad_hook(act)

    def gather_no_table_in_backward(self) -> None:
        if self.accelerator is not None:
            self.model.table.set_unshard_in_backward(False)

    def loss(self, number: int, depth: int) -> torch.Tensor:
        """Returns the loss of a micro-batch through `depth` blocks. With 0, it is of one block, called alone."""
        mine = range(dist.get_world_size()) if self.accelerator is None else [dist.get_rank()]
        losses = []
        for rank in mine:
            draw = torch.Generator().manual_seed(10 * number + rank)
            ids, branches = torch.randint(16, (3,), generator=draw), bool(torch.randint(2, (), generator=draw))
            alone = (ids[:, None] / 16).expand(3, 8).requires_grad_()  # its block may be frozen
            output = self.model(ids, depth, branches) if depth else self.model.layers[1](alone, True)
            losses.append(output.square().mean())
        return torch.stack(losses).mean()

    def train(self, number: int, depth: int, is_last: bool) -> None:
        if self.accelerator is not None:
            self.accelerator.gradient_state._set_sync_gradients(is_last)
        loss = self.loss(number, depth)
        loss.backward() if self.accelerator is None else self.accelerator.backward(loss)

    def forward(self, number: int, depth: int, mode: Callable[[], Any]) -> None:
        with mode():
            self.loss(number, depth)

    def fail(self, number: int, layer: int, where: str) -> None:
        """Ends a micro-batch in an error, and gives up the window if gradients may be half there."""
        self.model.layers[layer].fails = where
        with pytest.raises(torch.OutOfMemoryError):
            self.train(number, 3, True)
        self.model.layers[layer].fails = ""
        if where == "backward":
            self.zero_grad("optimizer")

    def zero_grad(self, way: str) -> None:
        for optimizer in [self.model] if way == "model" else self.raw_optimizers():
            optimizer.zero_grad(set_to_none=way != "zeros")

    def raw_optimizers(self) -> list[Any]:
        return [getattr(optimizer, "optimizer", optimizer) for optimizer in self.optimizers]

    def clip(self, limit: float) -> None:
        owner = torch.nn.utils if self.accelerator is None else self.accelerator
        self.seen.append(whole(owner.clip_grad_norm_(self.model.parameters(), limit)))

    def step(self) -> None:
        for optimizer in self.raw_optimizers():
            optimizer.step()

    @torch.no_grad()
    def scale(self, layer: int) -> None:
        for parameter in self.model.layers[layer].parameters():
            parameter.mul_(0.9)

    @torch.no_grad()
    def scale_groups(self) -> None:
        for parameter in (
            each for owner in self.raw_optimizers() for group in owner.param_groups for each in group["params"]
        ):
            parameter.mul_(0.9)

    def freeze(self, layer: int, is_frozen: bool) -> None:
        self.model.layers[layer].requires_grad_(not is_frozen)

    def state(self) -> None:
        self.seen += [whole(value) for value in self.model.state_dict().values()]


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def accelerator_of(strategy: str) -> Any:
    word, _, offload = strategy.partition("+")
    settings = OffloadSettings(executor="cpu_torch") if offload else None
    return accelerated(word, unit_classes=["Block", "Embedding"], offload=settings)


def drawn(seed: int, is_offloaded: bool) -> Program:
    """Returns names and arguments of the methods of `Loop` to call."""
    draw = random.Random(seed)

    def micro_batch() -> tuple[int, int]:
        return draw.randrange(10**6), draw.choice([3, 3, 2, 0])

    def disturbances() -> Program:
        layer = draw.randrange(3)
        allowed: Program = [
            *(("forward", (*micro_batch(), mode)) for mode in (nullcontext, torch.no_grad, torch.inference_mode)),
            ("fail", (micro_batch()[0], layer, "forward")),
            ("state", ()),
        ]
        if not is_offloaded:
            allowed += [("scale", (layer,)), ("scale_groups", ())]
        return draw.sample(allowed, draw.choice([0, 0, 1, 2]))

    if seed % 4 == 3 and not is_offloaded:
        steps = [("train", (*micro_batch(), True)) for _ in range(WINDOWS)]
        return [("step_inside_backward", ()), *steps, ("state", ())]
    program: Program = [("gather_no_table_in_backward", ())] if seed % 2 else []
    for _ in range(WINDOWS):
        if not is_offloaded and draw.random() < 0.5:
            program.append(("freeze", (draw.randrange(3), draw.random() < 0.5)))
        size = draw.choice([1, 1, 2, 3])
        for number in range(size):
            program += [*disturbances(), ("train", (*micro_batch(), number == size - 1)), *disturbances()]
            if draw.random() < 0.15:
                program.append(("zero_grad", (draw.choice(["model", "optimizer"]),)))
            if draw.random() < 0.15:
                program.append(("fail", (micro_batch()[0], draw.randrange(3), "backward")))
        if draw.random() < 0.5:
            program += [("clip", (limit,)) for limit in draw.choice([[0.1], [0.1, float("inf")]])]
        program += [*disturbances(), ("step", ()), *disturbances()]
        program.append(("zero_grad", (draw.choice(["model", "optimizer", "optimizer" if is_offloaded else "zeros"]),)))
    return [*program, ("state", ())]


def differences(strategies: list[str], seeds: range) -> dict[str, str]:
    """Returns where loops of the toolkit are off, and by how much."""
    found = {}
    for strategy in strategies:
        for seed in seeds:
            is_offloaded = "offload" in strategy
            program = drawn(seed, is_offloaded)
            num_optimizers = 1 if is_offloaded else (1, 1, 2, NUM_PARAMETERS)[seed % 4]
            loops = [Loop(word, num_optimizers) for word in (None, strategy)]
            for number, (name, arguments) in enumerate(program):
                for loop in loops:
                    getattr(loop, name)(*arguments)
                plain, ours = (torch.cat([each.flatten() for each in loop.seen] or [torch.zeros(1)]) for loop in loops)
                for loop in loops:
                    loop.seen.clear()
                if not (off := (plain - ours).abs().max().item()) < 5e-6:
                    found[f"{strategy}, seed {seed}"] = f"{off:.1e} after {program[: number + 1][-12:]}"
                    break
    return found


@pytest.mark.parametrize(
    ("num_ranks", "strategies", "seeds"),
    [
        pytest.param(2, STRATEGIES, range(4), marks=pytest.mark.first),
        pytest.param(4, ["hybrid"], range(4)),
        pytest.param(2, STRATEGIES, range(4, 100), marks=pytest.mark.grid),
        pytest.param(4, ["hybrid", "zero3"], range(4, 40), marks=pytest.mark.grid),
    ],
)
def test_a_loop_drawn_at_random_trains_as_torchs_own(num_ranks: int, strategies: list[str], seeds: range) -> None:
    for found in run_on_ranks(differences, num_ranks, strategies, seeds):
        assert found == {}


def refusals() -> dict[str, str]:
    """Returns the errors of loops that cannot be right: with offload, and of what hand-written ones leave behind."""

    def add(loop: Loop) -> None:
        group = loop.raw_optimizers()[0].param_groups
        group.append({**group[0], "params": [group[0]["params"].pop()]})

    def clip(loop: Loop) -> None:
        loop.train(0, 3, True)
        loop.clip(0.1)

    def write(loop: Loop) -> None:
        loop.forward(0, 3, nullcontext)
        torch.no_grad()(loop.model.head.weight.mul_)(0.5)

    def keep(loop: Loop) -> None:
        loop.model.layers[1].fails = "backward"
        with pytest.raises(torch.OutOfMemoryError):
            loop.train(1, 3, False)
        for parameter in loop.model.parameters():
            parameter.grad = None

    found = {}
    changes: dict[str, Callable[[Loop], None]] = {
        "frozen": lambda loop: loop.freeze(0, True),
        "added": add,
        "clipped": clip,
        "zeros": lambda loop: loop.zero_grad("zeros"),
        "inside": Loop.step_inside_backward,
        "written, zero2": write,
        "of a frozen one, zero3": lambda loop: (loop.model.head.requires_grad_(False), write(loop)),
        "saved, zero3": lambda loop: (write(loop), loop.state()),  # type: ignore[func-returns-value]
        "kept, zero2": keep,
    }
    for name, change in changes.items():
        name, _, strategy = name.partition(", ")
        loop = Loop(strategy or "zero3+offload")
        loop.train(0, 3, True)
        loop.step()
        try:
            change(loop)
            loop.train(0, 3, True)
            loop.step()
        except ToolkitError as error:
            found[name] = str(error)
    model = llama().bfloat16()
    model.model.layers[1].input_layernorm.float()
    with pytest.raises(ToolkitError) as refused:
        accelerated("zero3").prepare(model, torch.optim.SGD(model.parameters()))
    return {**found, "two types": str(refused.value)}


def test_loops_that_cannot_be_right_are_refused() -> None:
    found = run_on_ranks(refusals, 1)[0]
    assert "(first: layers.0.linear.weight)" in found["frozen"]
    assert "frozen, unfrozen or added to the optimizer after accelerator.prepare" in found["added"]
    assert "between clip_grad_norm_ and optimizer.step" in found["clipped"]
    assert "zero_grad(set_to_none=False)" in found["zeros"]
    assert "optimizer.step was called inside of backward" in found["inside"]
    for name in ("written", "of a frozen one", "saved"):
        assert found[name].startswith("head.weight was changed in place through the attribute of its module")
    assert "call zero_grad() of the optimizer or of the model before the next forward" in found["kept"]
    assert "layers.1.input_layernorm.weight float32 are trained, but" in found["two types"]


def objects() -> list[Any]:
    """Whether an accelerator is pickled, what a failed window by block leaves, and whether an engine is freed."""
    assert type(pickle.loads(pickle.dumps(accelerator_of("zero3"))).prepare(3)) is int  # and held by nothing else
    loop, plain = Loop("zero3"), Loop(None)
    by_block = ByBlock(loop.model, loop.accelerator.state.fsdp_plugin.unit_plan)
    loop.model.layers[1].fails = "forward"
    with pytest.raises(torch.OutOfMemoryError):
        by_block.run([lambda: loop.loss(0, 3), lambda: loop.loss(1, 3)])
    loop.model.layers[1].fails = ""
    for each in (loop, plain):
        each.train(2, 3, True)
        each.step()
        each.state()
    off = max((ours - right).abs().max().item() for ours, right in zip(loop.seen, plain.seen, strict=True))
    loop = Loop("zero3+offload")
    accelerator: Any = loop.accelerator
    engine = weakref.ref(accelerator.state.fsdp_plugin.engine)
    is_held = engine() is not None
    loop.model, loop.optimizers = None, []
    accelerator.free_memory()
    gc.collect()
    return [off < 2e-6, is_held, engine() is None]


def test_objects_can_be_copied_reused_and_freed() -> None:
    assert run_on_ranks(objects, 1) == [[True, True, True]]
