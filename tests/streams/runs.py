"""Short training runs under the checker, on ranks that are not there: rank 0 of a fake process group.

A fake collective copies this rank's own part, so the numbers are those of ranks that are all alike. FSDP2 goes the way
that it goes over NCCL.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from streams.happens_before import Checker, Race
from streams.simulated import watched_by
from support import offload_loops
from support.fsdp2_trace import fake_ranks
from support.moe import mixture
from support.offload_loops import Case, learning_rate, loss_of, make_model, ordinary, prepare, slow_down
from torch import nn
from torch.utils._pytree import tree_map_only

from toolkit import ranks
from toolkit.checkpoint import state
from toolkit.model.attention.attention import attend_by_heads
from toolkit.model.quantised.quantised import Quantisation, quantise_loaded
from toolkit.optim.ema import Ema
from toolkit.sharding import Checkpointing, OffloadSettings
from toolkit.sharding.blocks.by_block import ByBlock
from toolkit.sharding.fsdp2.shards import local_tensor
from toolkit.sharding.parallel.sequence_parallel import WholeRows, form_groups, rows_shared

STEPS = 2


@dataclass(frozen=True)
class Run:
    """What one run does.

    Attributes:
        executor: None: no offload. `plain`: FSDP2 written out with torch alone.
        num_layers: of the model.
        num_ranks: of the fake group, two on each host; hybrid shards over a host's.
        also: a word of `BEFORE_STEP` or `AFTER_STEP`.
        delay: seconds that every unit's step takes longer.
        by_block: the micro-batches of a step go through each unit together, on a stream that is not the default one.
        node: ranks among which units are sharded from forward to backward; None: all.
        experts: ranks that share a mixture's experts.
        sequence: ranks that share a row.
        quantised: whether LoRA's base is held in 4 bits.
    """

    case: Case = field(default_factory=Case)
    executor: str | None = "cpu_torch"
    device_state_gib: float = 0.0
    during_backward: bool = False
    num_layers: int = 3
    num_ranks: int = 2
    offload_inputs: bool = False
    also: str | None = None
    delay: float = 0.0
    by_block: bool = False
    node: int | None = None
    experts: int = 1
    sequence: int = 1
    quantised: bool = False

    def __str__(self) -> str:
        plain = Run()
        told = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(plain, name)]
        return ", ".join(told) or "default"


@dataclass
class Loop:
    """The parts of a training loop.

    Attributes:
        kept: the state of model and optimizer before the first step, copied.
        norms: of every clipping.
        threads: that it has begun.
        averages: of the weights, once they are asked for.
    """

    run: Run
    accelerator: Any
    model: Any
    optimizer: Any
    kept: tuple[Any, Any]
    norms: list[torch.Tensor] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    averages: Ema | None = None

    @property
    def engine(self) -> Any:
        return self.accelerator.state.fsdp_plugin.engine


def races_of(run: Run, is_changed: bool = False) -> Counter[Race]:
    """The races of a run.

    Args:
        is_changed: by a mutation, which may leave other numbers; otherwise every step is taken, or nothing is shown.
    """
    with fake_launch(run.num_ranks):
        with mock.patch.object(offload_loops, "LAYERS", run.num_layers):
            model = _model(run)  # before the checker looks: it lies on the device
        checker = Checker()
        with watched_by(checker):
            norms = _plain(run, model) if run.executor == "plain" else _train(run, model)
    assert is_changed or all(norm.isfinite() for norm in norms)
    return checker.races


def _model(run: Run) -> Any:
    spread = run.experts > 1
    model = mixture("qwen3_moe", vocab_size=offload_loops.VOCABULARY) if spread else make_model(run.case)
    if run.quantised:
        paths = [name for name, _ in model.named_modules()]
        adapters = [path for path in paths if "lora_" in path]
        quantise_loaded(model, Quantisation("nf4").for_transformers(["base_model.model.lm_head", *adapters]))
    form_groups(run.sequence)
    if run.sequence > 1:
        attend_by_heads(model)
    return model


@contextmanager
def fake_launch(num_ranks: int) -> Iterator[None]:
    """Rank 0 of a process group of this process alone, with a launcher's variables."""
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(min(num_ranks, 2))}
    told |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # Accelerate asks for it, and the group needs none
    with mock.patch.dict(os.environ, told), fake_ranks(num_ranks), mock.patch.object(ranks, "_gloo_group") as group:
        group.return_value = dist.group.WORLD
        yield


def _plain(run: Run, model: nn.Module) -> list[torch.Tensor]:
    with mock.patch.multiple(offload_loops, make_model=lambda case: model, STEPS=STEPS):
        return [torch.tensor(norm) for norm in ordinary(run.case).norms]


def _train(run: Run, model: nn.Module) -> list[torch.Tensor]:
    loop = _prepare(run, model)
    runner = ByBlock(loop.model, loop.accelerator.state.fsdp_plugin.unit_plan) if run.by_block else None
    for step in range(STEPS):
        if runner is None:
            _step(loop, step)
        else:
            _step_by_block(loop, runner, step)
        if run.also in AFTER_STEP:
            AFTER_STEP[run.also](loop)
    for thread in loop.threads:
        thread.join()
    engine = loop.engine
    if engine is not None:
        loop.accelerator.state.fsdp_plugin.close()
        engine.flush()  # nothing is left to wait for
    return loop.norms


def _prepare(run: Run, model: nn.Module) -> Loop:
    offload: Any = "none"
    if run.executor is not None:
        offload = OffloadSettings(run.executor, run.device_state_gib, 1, run.during_backward)  # type: ignore[arg-type]
    settings: dict[str, Any] = {"shard_size": 2} if run.case.strategy == "hybrid" else {}
    if run.offload_inputs:
        settings["checkpointing"] = Checkpointing(1, offload=True)
    settings |= {"experts": run.experts, "reshard_after_forward": run.node}
    accelerator, model, optimizer = prepare(run.case, offload, model, **settings)
    if run.delay:
        slow_down(model, run.delay)
    kept = _copied((model.state_dict(), optimizer.state_dict()))
    return Loop(run, accelerator, model, optimizer, kept)


def _loss(loop: Loop, step: int, micro: int) -> torch.Tensor:
    """Of rows of which this rank may have one of several parts."""
    parts = loop.run.sequence
    rows = WholeRows(torch.arange(16 * parts).expand(2, -1), parts)
    with rows_shared(rows) if parts > 1 else nullcontext():
        return loss_of(loop.model, loop.run.case, step, micro)


def _step(loop: Loop, step: int) -> None:
    case, accelerator, optimizer = loop.run.case, loop.accelerator, loop.optimizer
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(case, step)
    for micro in range(case.accumulation):
        with accelerator.accumulate(loop.model):
            accelerator.backward(_loss(loop, step, micro))
            if loop.run.also in BEFORE_STEP:
                BEFORE_STEP[loop.run.also](loop)
            if accelerator.sync_gradients and case.max_norm is not None:
                loop.norms.append(accelerator.clip_grad_norm_(loop.model.parameters(), case.max_norm))
            optimizer.step()
            optimizer.zero_grad()


def _step_by_block(loop: Loop, runner: ByBlock, step: int) -> None:
    """As a loop of one's own does that computes on a stream of its own."""
    case, accelerator, optimizer = loop.run.case, loop.accelerator, loop.optimizer
    stream = torch.cpu.Stream()
    stream.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(stream):
        forwards = [functools.partial(_loss, loop, step, micro) for micro in range(case.accumulation)]
        accelerator.gradient_state._set_sync_gradients(True)  # as `accumulate` at the end of a window
        runner.run(forwards, accelerator.backward)
        if case.max_norm is not None:
            loop.norms.append(accelerator.clip_grad_norm_(loop.model.parameters(), case.max_norm))
        runner.evaluate(forwards)
        optimizer.step()
        optimizer.zero_grad()
    torch.cpu.current_stream().wait_stream(stream)


@torch.no_grad()
def _look(loop: Loop) -> None:
    loop.model.eval()
    loss_of(loop.model, loop.run.case, 1000, 0)
    loop.model.train()


def _discard(loop: Loop) -> None:
    """Drops the gradients and goes through the same rows again."""
    loop.optimizer.zero_grad()
    loop.accelerator.backward(loss_of(loop.model, loop.run.case, 0, 0))


def _save(loop: Loop) -> None:
    """As an asynchronous checkpoint does: a copy, read by a thread while training goes on."""
    tensors = state.host_copy(state.named_tensors(loop.accelerator.unwrap_model(loop.model), loop.optimizer.optimizer))
    loop.threads.append(threading.Thread(target=lambda: [local_tensor(each).sum() for each in tensors.values()]))
    loop.threads[-1].start()


def _read_optimizer(loop: Loop) -> None:
    _copied(loop.optimizer.state_dict())


def _copied(values: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.clone, values)


def _load_model(loop: Loop) -> None:
    loop.model.load_state_dict(loop.kept[0])


def _load_optimizer(loop: Loop) -> None:
    loop.optimizer.load_state_dict(loop.kept[1])


def _average(loop: Loop) -> None:
    """Averages the weights, and evaluates with them."""
    averages = loop.averages or Ema(loop.model, 0.9)
    loop.averages = averages
    averages.update()
    with averages.in_place():
        _look(loop)


def _unshard(loop: Loop) -> None:
    loop.model.unshard()


BEFORE_STEP = {"look": _look, "discard": _discard}
AFTER_STEP = {
    "evaluate": _look,
    "save": _save,
    "read the optimizer": _read_optimizer,
    "load the model": _load_model,
    "load the optimizer": _load_optimizer,
    "unshard": _unshard,
    "average": _average,
}
