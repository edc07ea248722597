"""The loop: micro-batches, backward, clip, step, evaluate. Knows torch and Accelerate only."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from toolkit import ranks
from toolkit.data.ahead import ahead, with_next
from toolkit.data.samples import Batch
from toolkit.errors import StoppedError, TrainingError
from toolkit.objectives.balance import Balance
from toolkit.objectives.objective import Objective, OverWindow
from toolkit.optim.ema import Ema
from toolkit.recipe.schema import TrainingSection
from toolkit.sharding.by_block import ByBlock
from toolkit.sharding.offload import engine_of
from toolkit.sharding.shards import whole_tensor
from toolkit.terminal import Pass, Terminal
from toolkit.training.early_stopping import patience_is_over
from toolkit.training.experts import ExpertLoads
from toolkit.training.garbage import collect_at, collected_by_step
from toolkit.training.heartbeat import Heartbeat, Phase
from toolkit.training.metrics import Metrics
from toolkit.training.profile import DATA, UPDATE, StepProfile, label
from toolkit.training.step import RankStep, Step
from toolkit.training.stop import reason_of_all
from toolkit.training.usage import Counts, ModelFlops, counts_of, peak_device_bytes, peak_host_bytes


class Windows(Protocol):
    """Yields the micro-batches of one optimizer step at a time, equally many on every rank.

    `state_at` gives what `resume` needs besides the position in the data, as plain JSON.
    """

    def __iter__(self) -> Iterator[list[Batch]]: ...

    def resume(self, step: int, samples: int, num_positions: int, state: Any) -> None: ...

    def state_at(self, samples: int) -> Any: ...

    @property
    def samples_per_step(self) -> int: ...

    def epoch_at(self, step: int) -> float: ...

    def samples_at(self, step: int) -> int: ...


@dataclass
class Counters:
    """What a run has done so far, over all ranks."""

    global_step: int = 0
    tokens: int = 0
    target_tokens: int = 0
    non_finite_in_a_row: int = 0
    skipped_steps: int = 0


class Checkpoints(Protocol):
    """Where the state of a run is saved."""

    def due(self, step: int) -> bool: ...

    def save(self, trainer: Trainer, wait: bool = False) -> bool:
        """Saves the state after the last step; with `wait`, whether it is whole."""


class Trainer:
    """Trains `model` on `windows`.

    Args:
        accelerator: whose `prepare` has been given `model` and `optimizer`.
        schedule: stepped once per optimizer step.
        evaluation: makes this rank's evaluation batches, equally many on every rank; None: no evaluation.
        flops: of the model, and the peak of one device (FLOP/s), for the MFU; None where unknown.
        stop_reason: why this rank wants to end, or None; asked once a step.
        save_requested: whether this rank wants a checkpoint after the step; asked once a step.
        checkpoints: None: nothing is saved.
        profile: of some steps; None: nothing is profiled.
        beats: told what begins.
        by_block: runs the micro-batches of a step by block; None: one after another.
        balance: watches the routers of a mixture of experts; None: there are none.
        ema: averages the weights, and is evaluated in their place; None: there are no averages.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: LambdaLR,
        objective: Objective,
        settings: TrainingSection,
        metrics: Metrics,
        windows: Windows,
        evaluation: Callable[[], Iterable[Batch]] | None = None,
        flops: tuple[ModelFlops, float] | None = None,
        stop_reason: Callable[[], str | None] = lambda: None,
        save_requested: Callable[[], bool] = lambda: False,
        checkpoints: Checkpoints | None = None,
        profile: StepProfile | None = None,
        beats: Heartbeat | None = None,
        by_block: ByBlock | None = None,
        balance: Balance | None = None,
        ema: Ema | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self.objective = objective
        self.settings = settings
        self.metrics = metrics
        self.windows = windows
        self.evaluation = evaluation
        self.flops = flops
        self.stop_reason = stop_reason
        self.save_requested = save_requested
        self.checkpoints = checkpoints
        self.profile = profile
        self.beats = beats or Heartbeat()
        self.by_block = by_block
        self.ema = ema
        self.experts = ExpertLoads(balance or Balance([]), accelerator, metrics)
        self.counters = Counters()
        self._upcoming: list[Batch] | None = None
        self._counted: Counts | None = None  # of the next window, over all ranks
        engine = engine_of(accelerator.unwrap_model(model))
        self._steps_in_backward = engine is not None and engine.settings.during_backward

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self.counters.global_step

    def resume(self, counters: dict[str, int], samples: int, num_positions: int, windows: Any) -> None:
        """Goes on after `samples` of the run; `num_positions` is its end, `windows` the data's own state."""
        self.counters = Counters(**counters)
        self.windows.resume(self.global_step, samples, num_positions, windows)

    def fit(self) -> None:
        """Runs every window, evaluating at the start, so often as the settings say, and at the end.

        With averages, the model has them afterwards.

        Raises:
            TrainingError: after `max_non_finite_steps` steps in a row without a finite loss and gradient.
            StoppedError: where a rank wanted to end; the state is saved.
        """
        if self.global_step == 0:
            self.evaluate()
        self.model.train()
        with (
            collected_by_step(),
            contextlib.closing(self.profile or contextlib.ExitStack()),
            contextlib.closing(ahead(iter(self.windows))) as windows,
        ):
            try:
                self._fit(windows)
            except Exception as error:
                error.add_note(f"in optimizer step {self.global_step + 1}")
                raise
        if not self._evaluation_due():
            self.evaluate()
        if self.ema is not None:
            self.ema.put()  # nothing is saved any more; what is left to do shows and exports the model

    def _fit(self, windows: Iterator[list[Batch]]) -> None:
        # Resumed where patience had ended it: it was killed before its report. Step 0 is never the end.
        if self.global_step > 0 and self._evaluation_due() and self._is_over():
            return
        self._profile_from(self.global_step + 1)
        started = time.perf_counter()
        waited_for = self._waited_for(windows)
        for window, self._upcoming in with_next(waited_for):
            learning_rate = float(self.schedule.get_last_lr()[0])
            step = self.train_step(window)
            if step.skipped:
                self.counters.skipped_steps += 1  # and the schedule waits: its warm-up is for weights that move
            else:
                self.schedule.step()
            self.counters.global_step += 1
            finished = time.perf_counter()
            self._record(step, learning_rate, finished - started)
            self._watch(step, learning_rate)
            if self._evaluation_due():
                self.evaluate()
                if self._is_over():
                    return
            self._save_or_stop(step.stop, step.save)
            collect_at(self.global_step)
            if self.profile is not None:
                self.profile.after(self.global_step)
            self._profile_from(self.global_step + 1)
            # Evaluation and checkpoint are no part of a step's time.
            started = time.perf_counter()

    def _waited_for(self, windows: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """The same; a profile sees how long each was waited for."""
        while True:
            self._begin(Phase.DATA)
            with label(DATA):
                window = next(windows, None)
            if window is None:
                return
            yield window

    def _begin(self, phase: Phase) -> None:
        self.beats.at(phase, self.counters.global_step + 1)

    def _profile_from(self, step: int) -> None:
        if self.profile is not None:
            self.profile.before(step)

    def _save_or_stop(self, stop: str | None, save: bool) -> None:
        if self.checkpoints is None:
            return
        # Before what is due: one save, which the end waits for.
        if stop is not None:
            self._begin(Phase.SAVE)
            saved = self.checkpoints.save(self, wait=True)
            what = "its state is saved; the same command goes on from there" if saved else "its state was NOT saved"
            raise StoppedError(f"stopped after step {self.global_step}: {stop}; {what}")
        if save or self.checkpoints.due(self.global_step):
            self._begin(Phase.SAVE)
            self.checkpoints.save(self)

    def train_step(self, window: list[Batch]) -> Step:
        """One optimizer step on this rank's micro-batches; the loss is the mean over all ranks' targets.

        Host and device meet once, between backward and update, where the norm decides about the update: the
        loss, the norm, what the ranks have to say and the counts of the next window come in that one transfer.
        """
        counts = self._counted or self._total(self._count(window))
        # Accelerate divides by the micro-batches, FSDP and DDP average over the ranks: both are undone.
        scale = self.accelerator.num_processes * len(window) / max(1, counts.targets)
        run = self._run_in_turn if self.by_block is None else self._run_by_block
        self.experts.begin(counts.tokens)
        loss_sum, figures = run(window, scale)
        self._begin(Phase.COLLECTIVE)
        step = self._gathered(loss_sum, self._clip(), figures, counts)
        loads = self.experts.balance.loads()  # before the update, as long as host and device are together
        skipped = self._update(step.grad_norm)
        if self.ema is not None and not skipped:
            self.ema.update()
        return replace(step, skipped=skipped, experts=self.experts.after(self.global_step + 1, *loads, skipped))

    def _over_window(self, batches: Iterable[Any]) -> Batch:
        """What the losses of all these micro-batches, on all ranks, share, if anything; see `OverWindow`."""
        if not isinstance(self.objective, OverWindow):
            return {}
        sums = [self.objective.window_sums(self.model, batch) for batch in batches]
        return {"window": self.accelerator.reduce(torch.stack(sums).sum(dim=0), "sum")}

    def _run_in_turn(self, window: list[Batch], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward of one micro-batch after another; the sums of their losses and figures."""
        loss_sum, figures = self._zero_sums()
        shared = self._over_window(self._in_phase(window, Phase.FORWARD))
        for batch in self._in_phase([{**batch, **shared} for batch in window], Phase.FORWARD):
            with self.accelerator.accumulate(self.model):
                with self.experts.balance.observing(batch):
                    loss, of_batch = self.objective.training_sums(self.model, batch)
                # Summed on the device: to read each loss, the host would have to wait for every micro-batch.
                loss_sum += loss.detach()
                figures += of_batch
                self._begin_backward()
                self.accelerator.backward(loss * scale)
                del loss
        return loss_sum, figures

    def _run_by_block(self, window: list[Batch], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, with all micro-batches in a block before the next block."""
        assert self.by_block is not None
        for _ in window[1:]:
            with self.accelerator.accumulate(self.model):  # counts up to the micro-batch that ends the window
                pass
        batches, of_batches = list(self._in_phase(window, Phase.FORWARD)), []
        batches = self.objective.looked_at(self.model, batches, self.by_block.evaluate)
        shared = self._over_window(batches)
        batches = [{**batch, **shared} for batch in batches]

        def forward(batch: Any) -> torch.Tensor:
            with self.experts.balance.observing(batch):
                loss, of_batch = self.objective.training_sums(self.model, batch)
            of_batches.append(of_batch)
            return loss

        with self.accelerator.accumulate(self.model):
            losses = self.by_block.run(
                [functools.partial(forward, batch) for batch in batches],
                lambda loss: self.accelerator.backward(loss * scale),
                self._begin_backward,
            )
        loss_sum, figures = self._zero_sums()
        for loss, of_batch in zip(losses, of_batches, strict=True):
            loss_sum += loss
            figures += of_batch
        return loss_sum, figures

    def _begin_backward(self) -> None:
        self._begin(Phase.BACKWARD)
        self.experts.balance.exchange()

    def _zero_sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.accelerator.device
        return torch.zeros((), device=device), torch.zeros(len(self.objective.figures), device=device)

    def _in_phase(self, batches: Iterable[Batch], phase: Phase) -> Iterator[Batch]:
        for batch in batches:
            self._begin(phase)
            yield self._on_device(batch)

    def _on_device(self, batch: Batch) -> Any:
        known, device = self.objective.on_host(batch), self.accelerator.device
        if device.type == "cuda":
            # A copy from other memory waits for the device. Streams' batches, and what `on_host` adds, lie there.
            known = {name: value.pin_memory() if _is_pageable(value) else value for name, value in known.items()}
        return send_to_device(known, device, non_blocking=True)

    def _count(self, window: list[Batch] | None) -> Counts:
        """What this rank's part of a window holds; zeros where there is none."""
        return Counts.total(counts_of(batch, self.objective.count_targets(batch)) for batch in window or [])

    def _clip(self) -> torch.Tensor:
        """Clips to the settings' norm, if any; the global norm before that, on the device."""
        limit = self.settings.max_grad_norm
        # Without a limit too: the norm decides whether the step is taken.
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), math.inf if limit is None else limit)
        return whole_tensor(norm)

    def _update(self, grad_norm: float) -> bool:
        """Steps the optimizer unless the gradient is not finite; whether the step was skipped.

        A gradient scaler (fp16) is asked all the same: it finds that out by itself, and lowers its scale. What
        Accelerate says of it is not asked: a fused optimizer is called even then, and does nothing.
        """
        skipped = not math.isfinite(grad_norm)
        if skipped and self._steps_in_backward:
            raise TrainingError(
                f"step {self.global_step + 1}: the gradient norm is {grad_norm}, but the weights were already updated "
                "during backward; set training.max_grad_norm, for example to 1.0, so that such steps are skipped"
            )
        self._begin(Phase.OPTIMIZER)
        with label(UPDATE):
            if not skipped or self.accelerator.scaler is not None:
                self.optimizer.step()
            self.optimizer.zero_grad()
        return skipped

    def _gathered(self, loss_sum: torch.Tensor, norm: torch.Tensor, figures: torch.Tensor, counts: Counts) -> Step:
        """What the ranks found, before the update. Also takes the counts of the next window."""
        reason = self.stop_reason()
        mine = RankStep.pack(
            loss_sum,
            norm,
            figures,
            peak_device_bytes(self.accelerator.device),
            peak_host_bytes(),
            reason is not None,
            self.save_requested(),
            *astuple(self._count(self._upcoming)),
        )
        found = [RankStep.unpack(row) for row in self.accelerator.gather(mine[None]).tolist()]
        # Unknown at the end, and where `train_step` is called without `fit`: then it asks the ranks itself.
        self._counted = None
        if self._upcoming is not None:
            self._counted = Counts.total(rank.next_counts for rank in found)
        return Step(
            loss=sum(rank.loss_sum for rank in found) / max(1, counts.targets),
            grad_norm=found[self.accelerator.process_index].grad_norm,
            counts=counts,
            peak_device_bytes=max(rank.peak_device_bytes for rank in found),
            peak_host_bytes=max(rank.peak_host_bytes for rank in found),
            non_finite_ranks=[number for number, rank in enumerate(found) if not math.isfinite(rank.loss_sum)],
            figures=[
                sum(sums) / max(1, counts.targets) for sums in zip(*(rank.figures for rank in found), strict=True)
            ],
            skipped=False,
            stop=reason_of_all(reason, [rank.wants_to_stop for rank in found]),
            save=any(rank.wants_to_save for rank in found),
            experts={},
        )

    def _total(self, counts: Counts) -> Counts:
        """Sums over ranks; float64 counts exactly up to 2^53."""
        tensor = torch.tensor(astuple(counts), dtype=torch.float64, device=self.accelerator.device)
        return Counts(*map(int, self.accelerator.reduce(tensor, "sum").tolist()))

    def _record(self, step: Step, learning_rate: float, seconds: float) -> None:
        counts, samples = step.counts, self.windows.samples_at(self.global_step)
        self.counters.tokens += counts.tokens
        self.counters.target_tokens += counts.targets
        unit, mfu = self.objective.unit, None
        if self.flops is not None:
            flops, peak = self.flops
            mfu = flops.of(counts) / (seconds * peak * self.accelerator.num_processes)
        self.metrics.train(
            {
                "step": self.global_step,
                "epoch": self.windows.epoch_at(self.global_step),
                "samples": samples,
                "tokens": self.counters.tokens,
                "target_tokens" if unit == "targets" else unit: self.counters.target_tokens,
                "loss": step.loss,
                **dict(zip(self.objective.figures, step.figures, strict=True)),
                **step.experts,
                "grad_norm": step.grad_norm,
                "learning_rate": learning_rate,
                "tokens_per_second": counts.tokens / seconds,
                "padded_tokens_per_second": counts.padded_tokens / seconds,
                f"{unit}_per_second": counts.targets / seconds,
                "samples_per_second": (samples - self.windows.samples_at(self.global_step - 1)) / seconds,
                "step_seconds": seconds,
                "peak_device_bytes": step.peak_device_bytes or None,
                "peak_host_bytes": step.peak_host_bytes,
                "mfu": mfu,
            }
        )

    def _watch(self, step: Step, learning_rate: float) -> None:
        """Reports a step without a finite loss or gradient, and stops after too many in a row."""
        if math.isfinite(step.loss) and not step.skipped:
            self.counters.non_finite_in_a_row = 0
            return
        where = f" on rank {', '.join(map(str, step.non_finite_ranks))}" if step.non_finite_ranks else ""
        what = "loss" if not math.isfinite(step.loss) else "gradient norm"
        message = (
            f"step {self.global_step}: non-finite {what}{where} (loss {step.loss}, gradient norm {step.grad_norm}, "
            f"learning rate {learning_rate:.3e}); the optimizer step was skipped, {self.counters.skipped_steps} so far"
        )
        scaler = self.accelerator.scaler
        if scaler is not None and math.isfinite(step.loss) and scaler.get_scale() >= 1:
            # A scale is found by overflows, from 2^16 down: the run is broken where none is left to try.
            self.metrics.warn(f"{message}; fp16 overflowed, and its loss scale is now {scaler.get_scale():g}")
            return
        self.metrics.warn(message)
        self.counters.non_finite_in_a_row += 1
        if self.counters.non_finite_in_a_row >= self.settings.max_non_finite_steps:
            raise TrainingError(
                f"{message}. That makes {self.counters.non_finite_in_a_row} in a row (training.max_non_finite_steps); "
                "lower optimizer.learning_rate, lengthen the warm-up or look at the data of these steps"
            )

    def _evaluation_due(self) -> bool:
        every = self.settings.eval_every_steps
        return every is not None and self.global_step % every == 0

    def _is_over(self) -> bool:
        """Whether the held-out loss falls no more; then the state is saved, and all ranks end as after a last step."""
        if self.settings.patience is None:
            return False
        why = ranks.gather_objects(patience_is_over(self.metrics.records, self.settings.patience))[0]
        if why is None:
            return False
        self.metrics.tell(f"ended after step {self.global_step}: {why}")
        if self.checkpoints is not None:
            self._begin(Phase.SAVE)
            self.checkpoints.save(self, wait=True)
        return True

    def evaluate(self) -> None:
        """Records the mean loss over the held-out targets and what the objective adds, each sample counted once."""
        if self.evaluation is None:
            return
        self.model.eval()
        averaged = contextlib.nullcontext() if self.ema is None else self.ema.in_place()
        with Pass(Terminal(quiet=ranks.rank() != 0), "evaluating"), averaged, torch.no_grad():
            shared = self._over_window(self._in_phase(self.evaluation(), Phase.EVALUATE))
            batches = self._in_phase(self.evaluation(), Phase.EVALUATE)
            parts = [self.objective.evaluation_sums(self.model, {**batch, **shared}) for batch in batches]
        self._begin(Phase.COLLECTIVE)
        sums = self.accelerator.reduce(torch.stack(parts).sum(dim=0), "sum").tolist()
        self.model.train()
        self.metrics.evaluation({"step": self.global_step, **self.objective.evaluation_record(sums)})


def _is_pageable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_pinned()
