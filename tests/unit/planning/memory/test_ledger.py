"""The ledger, on fake and on real tensors, against what torch's CPU allocator says it gave out."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from support.planning_models import workload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from toolkit.planning.memory.fake import Ledger
from toolkit.planning.workload.workload import Workload
from toolkit.sharding.blocks.checkpointing import Checkpointing, checkpoint_blocks
from toolkit.sharding.plan.units import plan_units

KINDS = ("llama", "qwen2", "qwen3", "gpt2", "t5", "mixtral", "bert")
BOTH = (torch.float32, torch.bfloat16)
CASES = [(kind, dtype, False) for kind, dtype in itertools.product(KINDS, BOTH)]
CASES.remove(("mixtral", torch.float32, False))  # torch has grouped products of fake tensors in bf16 alone
CASES += [("llama", dtype, True) for dtype in BOTH] + [("gpt2", torch.float32, True), ("qwen3", torch.bfloat16, True)]
SCRATCH = {("bert", torch.bfloat16, False)}
"""bf16 BERT: in float32 both figures agree; in bf16 CPU kernels of the padded attention take scratch memory
inside of them, which no operator returns, so that no dispatch mode sees it."""


def step_of(
    kind: str, dtype: torch.dtype, checkpointed: bool, meta: bool = False
) -> tuple[Workload, Callable[[], None]]:
    """A model with its batch and one forward and backward."""
    work = workload(kind, meta=meta, dtype=dtype, tokens=192 if checkpointed else 96, whole_logits=True)
    if checkpointed:
        checkpoint_blocks(work.model, plan_units(work.model), Checkpointing(1))
    objective = work.objective(work.model)
    batch = work.batch(2)

    def step() -> None:
        objective.loss_sum(work.model, batch).backward()

    return work, step


def allocator_peak(step: Callable[[], None]) -> int:
    """Most bytes above those at the start, from the profiler's record of every allocation and release."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            step()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes))


def ledger_peak(work: Workload, step: Callable[[], None]) -> int:
    """The same by the ledger, to the byte."""
    ledger = Ledger(granule=1)
    for tensor in (*work.model.parameters(), *work.model.buffers()):
        ledger.see(tensor)
    base = ledger.current
    with ledger:
        step()
    return ledger.peak - base


def fake_peak(kind: str, dtype: torch.dtype, checkpointed: bool) -> int:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return ledger_peak(*step_of(kind, dtype, checkpointed))


def peaks(kind: str, dtype: torch.dtype, checkpointed: bool) -> tuple[int, int, int]:
    """By the allocator, by the ledger on the same real tensors' model, and on fake tensors."""
    work, step = step_of(kind, dtype, checkpointed)
    step()  # oneDNN, rotary caches and the like
    work.model.zero_grad()
    truth = allocator_peak(step)
    work.model.zero_grad()
    return truth, ledger_peak(work, step), fake_peak(kind, dtype, checkpointed)


@pytest.mark.parametrize(("kind", "dtype", "checkpointed"), CASES)
def test_bytes_of_the_allocator(kind: str, dtype: torch.dtype, checkpointed: bool) -> None:
    truth, real, fake = peaks(kind, dtype, checkpointed)
    assert real == fake
    if (kind, dtype, checkpointed) not in SCRATCH:
        assert fake == pytest.approx(truth, rel=1e-3)
    else:
        assert 0.9 * truth < fake <= truth  # equal in builds whose kernels take none
