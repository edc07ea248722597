"""What the loop is fed with, how far it is, and what its extensions see of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn

from toolkit.data.samples.samples import Batch
from toolkit.objectives.objective import Objective
from toolkit.training.phase import Phase
from toolkit.training.step import Step


class Windows(Protocol):
    """Yields the micro-batches of one optimizer step at a time, equally many on every rank.

    `state_at` returns, as plain JSON, the state that `resume` needs besides the position in the data.

    Attributes:
        fresh: whether each is made with the weights of its step, so that none can be made ahead.
    """

    fresh: bool

    def __iter__(self) -> Iterator[list[Batch]]: ...

    def resume(self, step: int, samples: int, state: Any) -> None: ...

    def state_at(self, samples: int) -> Any: ...

    @property
    def samples_per_step(self) -> int: ...

    def epoch_at(self, step: int) -> float: ...

    def samples_at(self, step: int) -> int: ...


@dataclass
class Counters:
    """Counts of a run so far, over all ranks."""

    global_step: int = 0
    tokens: int = 0
    target_tokens: int = 0
    non_finite_in_a_row: int = 0
    skipped_steps: int = 0

    def add(self, step: Step) -> None:
        self.skipped_steps += step.skipped
        self.global_step += 1
        self.tokens += step.counts.tokens
        self.target_tokens += step.counts.targets


class KeepsState(Protocol):
    """What checkpoints ask an extension; see `Extension.state` and `Extension.tensors`."""

    def state(self) -> dict[str, Any]: ...

    def tensors(self) -> dict[str, torch.Tensor]: ...


class LoopState(Protocol):
    """What an extension may read of the loop that calls it; `Trainer` has it."""

    accelerator: Accelerator
    model: nn.Module
    objective: Objective
    windows: Windows
    counters: Counters

    @property
    def extensions(self) -> Sequence[KeepsState]: ...

    @property
    def global_step(self) -> int: ...

    def enter_phase(self, phase: Phase) -> None: ...

    def check_stop(self) -> None: ...

    def held_out_predictions(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]: ...
