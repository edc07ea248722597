"""What a user does with offloaded state: look at memory, save, resume elsewhere, skip, fine-tune by recipe."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from support.backend import accelerated, close
from support.cases import cases
from support.memory import memory_report
from support.offload_loops import (
    STEPS,
    Case,
    Found,
    differences,
    loss_of,
    make_model,
    masters,
    ordinary,
    prepare,
    train,
)
from support.ranks import run_on_ranks
from support.tiny import llama

from toolkit.errors import BadInputError, ToolkitError, TrainingError
from toolkit.sharding import OffloadSettings, sharding_kwargs
from toolkit.sharding.apply import apply
from toolkit.sharding.offload import engine as engines
from toolkit.sharding.offload import host
from toolkit.sharding.offload.host import held_bytes

CASE = Case(tied=False)


# Memory


def measure_memory() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, settings in (("none", {}), ("some", {"device_state_gib": 0.0005})):
        accelerator, model, optimizer = prepare(CASE, OffloadSettings(executor="cpu_torch", **settings))
        report = memory_report(model, optimizer)
        accelerator.backward(loss_of(model, CASE, 0, 0))
        after_backward = memory_report(model, optimizer)
        optimizer.step()
        engine = accelerator.state.fsdp_plugin.engine
        engine.flush()
        found[name] = {
            "before": report,
            "after backward": after_backward,
            "between": memory_report(model, optimizer),
            "plan": engine.state.plan,
            "resident": sum(unit.numel for unit in engine.state.residents),
            "padded": sum(unit.numel for unit in engine.state.units),
            "longest": max(unit.numel for unit in engine.state.hosted),
            "text": engine.describe(),
        }
        close(accelerator)
    return found


@pytest.fixture(scope="module")
def memory() -> list[dict[str, Any]]:
    return run_on_ranks(measure_memory, 2)


def test_the_device_holds_two_bytes_a_parameter(memory: list[dict[str, Any]]) -> None:
    """No gradients after backward, and no optimizer state at any time; by storage."""
    for rank in memory:
        found = rank["none"]
        for when in ("before", "after backward", "between"):
            assert found[when].sharded_parameters == pytest.approx(2 * found["padded"], rel=0.01), when
            assert found[when].gradients == 0, when
            assert found[when].optimizer_state == 0, when
        assert found["between"].gathered_parameters == 0


def test_the_host_holds_what_was_planned(memory: list[dict[str, Any]]) -> None:
    """Masters 4, moments 8, gradients 4 bytes a parameter, and two bf16 buffers as long as the longest unit."""
    for rank in memory:
        found = rank["none"]
        expected = 16 * found["padded"] + 2 * 2 * found["longest"]
        assert found["plan"].total == expected
        assert found["between"].host_state == expected
        assert "of host memory a rank" in found["text"]


def test_the_dial_moves_state_to_the_device(memory: list[dict[str, Any]]) -> None:
    for rank in memory:
        found = rank["some"]
        assert 0 < found["resident"] < found["padded"]
        assert found["between"].optimizer_state == 16 * found["resident"] <= 0.0005 * 2**30
        assert found["plan"].total == 16 * (found["padded"] - found["resident"]) + 4 * found["longest"]


# Steps that are not taken, and gradients that are not used


def other_ways_to_step() -> dict[str, Any]:
    settings = OffloadSettings(executor="cpu_torch")
    found: dict[str, Any] = {}

    case = Case(accumulation=3)
    expected = ordinary(case)
    accelerator, model, optimizer = prepare(Case(), settings)
    for step in range(STEPS):  # backward three times, without telling Accelerate
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + 0.3 * step)
        for micro in range(3):
            accelerator.backward(loss_of(model, case, step, micro) / 3)
        accelerator.clip_grad_norm_(model.parameters(), 0.8)
        optimizer.step()
        optimizer.zero_grad()
    found["summed by hand"] = differences(Found(expected.losses, expected.norms, masters(model)), expected)
    close(accelerator)

    accelerator, model, optimizer = prepare(CASE, settings)
    accelerator.backward(loss_of(model, CASE, 77, 0))
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, CASE, 78, 0))
    model.zero_grad()
    losses, norms = train(CASE, accelerator, model, optimizer)
    found["discarded"] = differences(Found(losses, norms, masters(model)), ordinary(CASE))
    close(accelerator)

    case = Case(poison=2)
    accelerator, model, optimizer = prepare(case, settings)
    train(case, accelerator, model, optimizer)
    accelerator.state.fsdp_plugin.engine.flush()
    found["steps"] = {int(state["step"]) for state in optimizer.state.values()}
    close(accelerator)
    return found


def test_other_ways_to_step() -> None:
    for rank in run_on_ranks(other_ways_to_step, 2):
        assert rank["summed by hand"] == []
        assert rank["discarded"] == []
        assert rank["steps"] == {STEPS - 1}


# Checkpoints


def moments(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{names[id(parameter)]}.{key}"] = whole.clone()
    return found


def run_halves(folder: str) -> dict[str, Any]:
    """Trains 3 steps with and without offload, saves, and goes on from each with each."""
    found: dict[str, Any] = {}
    ways = {"offload": "optimizer", "ordinary": "none"}
    for name, offload in ways.items():
        accelerator, model, optimizer = prepare(CASE, offload)
        losses, _ = train(CASE, accelerator, model, optimizer, range(3))
        accelerator.save_state(f"{folder}/{name}")
        if name == "offload":
            found["weights"], found["moments"] = masters(model), moments(model, optimizer)
        found[name] = losses + train(CASE, accelerator, model, optimizer, range(3, STEPS))[0]
        close(accelerator)
    for saved, resumed in itertools.product(ways, ways):
        accelerator, model, optimizer = prepare(CASE, ways[resumed])
        accelerator.load_state(f"{folder}/{saved}")
        losses, _ = train(CASE, accelerator, model, optimizer, range(3, STEPS))
        found[f"{saved} -> {resumed}"] = (losses, masters(model))
        close(accelerator)
    return found


def load_elsewhere(folder: str) -> dict[str, Any]:
    accelerator, model, optimizer = prepare(CASE, "optimizer")
    accelerator.load_state(f"{folder}/offload")
    found = {"weights": masters(model), "moments": moments(model, optimizer)}
    close(accelerator)
    return found


def test_checkpoints_are_those_of_an_ordinary_run(tmp_path: Path) -> None:
    """Saved with or without offload, resumed with or without: the same run bit for bit; and on other ranks."""
    saved = run_on_ranks(run_halves, 2, str(tmp_path))
    for rank in saved:
        assert rank["offload"] == rank["ordinary"]
        _, expected = rank["ordinary -> ordinary"]
        for way in ("offload -> offload", "offload -> ordinary", "ordinary -> offload", "ordinary -> ordinary"):
            losses, weights = rank[way]
            assert losses == rank["ordinary"][3:], way
            assert all(torch.equal(weights[name], expected[name]) for name in expected), way
    for num_ranks in (1, 4):
        for rank in run_on_ranks(load_elsewhere, num_ranks, str(tmp_path)):
            for kind in ("weights", "moments"):
                assert rank[kind].keys() == saved[0][kind].keys()
                assert all(torch.equal(rank[kind][name], value) for name, value in saved[0][kind].items())


# Replicas


def run_hybrid(ranks_of_a_host: int) -> list[str] | str:
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks_of_a_host), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    case = Case(strategy="hybrid")
    try:
        found = offloaded_hybrid(case)
    except BadInputError as error:
        return str(error)
    expected = ordinary(Case())
    # Summed in another order: inside the groups first.
    return [name for name, w in expected.weights.items() if not torch.allclose(found[name], w, atol=2e-2)]


def offloaded_hybrid(case: Case) -> dict[str, torch.Tensor]:
    accelerator, model, optimizer = prepare(case, "optimizer", shard_size=2)
    train(case, accelerator, model, optimizer)
    weights = masters(model)
    everyone = accelerator.gather(torch.stack([w.double().sum() for w in weights.values()])[None])
    assert (everyone == everyone[0]).all(), "replicas differ"
    close(accelerator)
    return weights


def test_hybrid_on_two_hosts() -> None:
    assert run_on_ranks(run_hybrid, 4, 2) == [[]] * 4


def test_hybrid_on_one_host_is_refused() -> None:
    for text in run_on_ranks(run_hybrid, 4, 4):
        assert "the 4 ranks of a host form 2 replicas" in text
        assert "dp_shard_size to 4" in text


# Errors


def fail_at_step(how: str) -> str:
    """Rank 1's third unit step fails; what each rank says when its forward comes to wait for it."""
    case = Case()
    accelerator, model, optimizer = prepare(case, "optimizer")
    engine = accelerator.state.fsdp_plugin.engine
    calls = itertools.count(1)
    if dist.get_rank() == 1:
        for executor in set(engine._executors.values()):
            step = executor.step

            def failing(unit_step: Any, step: Any = step) -> Any:
                if next(calls) == 3:
                    raise RuntimeError("bad luck" if how == "executor" else "")
                return step(unit_step)

            executor.step = failing
        if how == "thread":
            engines.CHECK_SECONDS = 0.1
            engine._worker._finish()  # the thread is gone; what is handed in now is never done
    try:
        train(case, accelerator, model, optimizer)
    except TrainingError as error:
        return f"TrainingError: {error}"
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return "nothing"


@pytest.mark.parametrize("how", ["executor", "thread"])
def test_a_failing_step_ends_all_ranks(how: str) -> None:
    said = run_on_ranks(fail_at_step, 2, how)
    assert "nothing" not in said
    assert said[1].startswith("TrainingError: offload:")
    assert "on rank 1" in said[1]
    assert ("bad luck" in said[1]) == (how == "executor")


def run_out_of_memory(how: str) -> str:
    """Rank 1 may not take the 400 MB that it needs."""
    large = llama(vocab_size=100_000, hidden_size=256, num_hidden_layers=1)
    if dist.get_rank() == 1:
        if how == "limit":
            used = psutil.Process().memory_info().data
            resource.setrlimit(resource.RLIMIT_DATA, (used + 320 * 2**20, resource.RLIM_INFINITY))
        else:
            host.Slabs.cut = no_memory  # type: ignore[assignment]
    try:
        prepare(Case(), "optimizer", large)
    except ToolkitError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "nothing"


def no_memory(*_: Any) -> None:
    raise MemoryError("no memory")


def test_too_little_host_memory_is_told_on_all_ranks() -> None:
    for text in run_on_ranks(run_out_of_memory, 2, "limit"):
        assert text.startswith("BadInputError: offload: rank 1 would take")
        assert "ulimit" in text
        assert "device_state_gib" in text
    for text in run_on_ranks(run_out_of_memory, 2, "allocation"):
        assert text.startswith("ToolkitError: rank 1 could not take host memory for offload")


def lose_weights() -> str:
    """A run whose weights cannot be read ends as `finetune` ends it; the error that comes through."""

    def cannot(_: Any) -> None:
        raise OSError("no such weights")

    failing = {"load_weights": cannot}
    try:
        try:
            with patch("toolkit.sharding.plugin.apply", lambda *given, **named: apply(*given, **{**named, **failing})):
                prepare(CASE, "optimizer", make_model(CASE))
        finally:
            AcceleratorState().fsdp_plugin.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_offload_that_never_began_can_be_ended() -> None:
    assert run_on_ranks(lose_weights, 1) == ["OSError: no such weights"]


def drop_a_model() -> tuple[int, int, list[str]]:
    """Trains a step, and lets go of everything as a Trainer that is deleted does; the bytes held before and after."""
    accelerator, model, optimizer = prepare(CASE, "optimizer")
    accelerator.backward(loss_of(model, CASE, 0, 0))
    optimizer.step()
    before = held_bytes()
    del accelerator, model, optimizer
    # The worker lets go of them, too, once the step that it is in is done.
    deadline = time.monotonic() + 20
    while held_bytes() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return before, held_bytes(), [thread.name for thread in threading.enumerate()]


def test_who_lets_go_of_the_model_gets_the_memory_back() -> None:
    for before, after, threads in run_on_ranks(drop_a_model, 1):
        assert before > 0
        assert after == 0
        assert "offload-step" not in threads


def refused() -> dict[str, str]:
    """What cannot be had, and what is said."""
    found = {}

    def note(**attempts: Any) -> None:
        for name, attempt in attempts.items():
            try:
                attempt()
            except BadInputError as error:
                found[name] = str(error)

    def prepared_with(optimizer: Any, **settings: Any) -> None:
        accelerator, model = (
            accelerated("zero3", precision="bf16", offload=OffloadSettings(**settings)),
            make_model(CASE),
        )
        accelerator.prepare(model, optimizer(model.parameters()))

    note(
        ddp=lambda: sharding_kwargs("ddp", offload="optimizer"),
        ddp_text=lambda: sharding_kwargs("ddp+offload"),
        word=lambda: sharding_kwargs("zero3", offload="everything"),
        contradiction=lambda: sharding_kwargs("zero3+offload", offload="none"),
        optimizer=lambda: prepared_with(torch.optim.Adagrad),
        dampening=lambda: prepared_with(lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.1)),
        kernel=lambda: prepared_with(torch.optim.Adam, executor="cpu_fused"),
        executor=lambda: OffloadSettings(executor="gpu"),  # type: ignore[arg-type]
        gib=lambda: OffloadSettings(device_state_gib=-1.0),
    )
    accelerator, model, optimizer = prepare(Case(), "optimizer")
    accelerator.backward(loss_of(model, Case(), 0, 0))
    note(
        subset=lambda: accelerator.clip_grad_norm_(list(model.parameters())[:2], 1.0),
        norm=lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1.0),
        value=lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
        closure=lambda: optimizer.step(lambda: 0.0),
    )
    close(accelerator)

    twice = Case(max_norm=None)
    accelerator, model, _ = prepare(twice, OffloadSettings(during_backward=True))
    accelerator.backward(loss_of(model, twice, 0, 0))
    note(
        limit=lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        twice=lambda: accelerator.backward(loss_of(model, twice, 0, 1)),
    )
    close(accelerator)
    return found


def test_what_cannot_be_had_is_told_with_the_way_out() -> None:
    found = run_on_ranks(refused, 1)[0]
    expected = cases(__file__)["WAYS_OUT"]
    assert found.keys() == expected.keys()
    for name, words in expected.items():
        assert words in found[name], name
