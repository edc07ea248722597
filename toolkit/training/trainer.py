"""The loop: micro-batches, backward, clip, step, evaluate. Knows torch and Accelerate only."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from toolkit import ranks
from toolkit.data.samples.documents_apart import without_padding
from toolkit.data.samples.loader import ahead, with_next
from toolkit.data.samples.samples import Batch
from toolkit.errors import BadInputError, OwnCodeError, StoppedError, TrainingError
from toolkit.objectives.losses.balance import Balance
from toolkit.objectives.objective import Objective
from toolkit.recipe.schema import TrainingSection
from toolkit.sharding.blocks.by_block import ByBlock
from toolkit.sharding.fsdp2.shards import whole_tensor
from toolkit.sharding.offload import engine_of
from toolkit.terminal import LongAction, Terminal
from toolkit.training.extension import Extension
from toolkit.training.loop_state import Counters, Windows
from toolkit.training.phase import Phase
from toolkit.training.profile import DATA, UPDATE
from toolkit.training.step import RankStep, Step, with_figures
from toolkit.training.stop import reason_of_all
from toolkit.training.usage import Counts, counts_of, peak_device_bytes, peak_host_bytes
from toolkit.user_function import begin_moment


@dataclass(eq=False, repr=False)
class Trainer:
    """Trains `model` on `windows`.

    Attributes:
        accelerator: its `prepare` has returned `model` and `optimizer`.
        schedule: stepped once per optimizer step that is not skipped.
        evaluation: makes this rank's evaluation batches, equally many on every rank; None for no evaluation.
        by_block: runs the micro-batches of a step by block; None runs one after another.
        balance: adds the balance loss of a mixture's routers.
        copies: the number of ranks that have the same rows, so that what is summed over all ranks counts each once.
        extensions: called by the loop, in this order.
    """

    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    objective: Objective
    settings: TrainingSection
    windows: Windows
    evaluation: Callable[[], Iterable[Batch]] | None = None
    by_block: ByBlock | None = None
    balance: Balance = field(default_factory=lambda: Balance([]))
    copies: int = 1
    extensions: Sequence[Extension] = ()

    def __post_init__(self) -> None:
        self.counters = Counters()
        self._upcoming: list[Batch] | None = None
        self._rate_factor = 1.0
        self._left_evaluation = False  # when the checkpoint was written that training resumes from
        self._counted: Counts | None = None  # of the next window, over all ranks
        engine = engine_of(self.accelerator.unwrap_model(self.model))
        self._steps_in_backward = engine is not None and engine.settings.during_backward

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self.counters.global_step

    def resume(self, counters: dict[str, int], samples: int, windows: Any, is_evaluated: bool = True) -> None:
        """Continues a run.

        Args:
            samples: samples that the run has trained on.
            windows: the state of the data that `Windows.state_at` returned.
            is_evaluated: whether the evaluation after the last step, if one was due, is done.
        """
        self._left_evaluation = not is_evaluated
        self.counters = Counters(**counters)
        self.windows.resume(self.global_step, samples, windows)

    def fit(self) -> None:
        """Runs every window; evaluates at the start, every `eval_every_steps` steps and at the end.

        Raises:
            Exception: as a step or an extension raised it, with a note that names the step.
        """
        with self._stoppable():
            for extension in self.extensions:
                extension.before_training(self)
        if self.global_step == 0:
            self.evaluate()
        self.model.train()
        # Each window is made while the one before is trained on, unless the weights make it.
        windows = (window for window in self.windows) if self.windows.fresh else ahead(iter(self.windows))
        with collected_by_step(), ExitStack() as extensions, contextlib.closing(windows):
            for extension in self.extensions:
                extensions.callback(extension.close)
            try:
                self._fit(windows)
            except Exception as error:
                error.add_note(f"in optimizer step {self.global_step + 1}")
                raise
        if not self._evaluation_due():
            self.evaluate()
        with self._stoppable():
            for extension in self.extensions:
                extension.after_last_step()

    def _fit(self, windows: Iterator[list[Batch]]) -> None:
        # The run had finished but was killed before its report: nothing is left to train. Step 0 is never the end.
        if self.global_step > 0 and self._is_over(evaluates=self._left_evaluation):
            return
        self._before_step()
        started = time.perf_counter()
        waited_for = _waited_for(windows, lambda: self.enter_phase(Phase.DATA))
        with_upcoming = ((window, None) for window in waited_for) if self.windows.fresh else with_next(waited_for)
        for window, self._upcoming in with_upcoming:
            learning_rate = self._set_rates()
            step = self.train_step(window)
            self.counters.add(step)
            if not step.skipped:  # else the schedule waits: its warm-up is for weights that move
                self.schedule.step()
            step = replace(step, learning_rate=learning_rate, seconds=time.perf_counter() - started)
            for extension in self.extensions:
                extension.after_step(self, step)
            if self._is_over():
                return
            for extension in self.extensions:
                extension.between_steps(self, step)
            collect_at(self.global_step)
            self._before_step()
            # Evaluation and checkpoint are no part of a step's time.
            started = time.perf_counter()

    def _set_rates(self) -> float:
        """Sets the rates of the coming step by the schedule and the extensions. Returns that of the first group."""
        rates = self.schedule.get_last_lr()
        factor = math.prod(extension.rate_factor(self.global_step + 1) for extension in self.extensions)
        if factor != 1.0 or self._rate_factor != 1.0:  # the schedule sets them otherwise
            for group, rate in zip(self.schedule.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        self._rate_factor = factor
        return float(rates[0]) * factor

    def enter_phase(self, phase: Phase) -> None:
        """Tells extensions that a phase of the step under way begins."""
        for extension in self.extensions:
            extension.enter_phase(phase, self.counters.global_step + 1)

    def _before_step(self) -> None:
        begin_moment(f"step {self.global_step + 1}")
        for extension in self.extensions:
            extension.before_step(self.global_step + 1)

    def train_step(self, window: list[Batch]) -> Step:
        """Takes one optimizer step on this rank's micro-batches; the loss is the mean over all ranks' targets.

        Host and device meet once, between backward and update, because the norm decides about the update: the
        loss, the norm, the ranks' requests and the counts of the next window come in that one transfer.
        """
        counts = self._counted or self._sum_over_ranks(_counts(self.objective, window))
        # Accelerate divides by the micro-batches, FSDP and DDP average over the ranks with other rows: both are undone.
        scale = self.accelerator.num_processes // self.copies * len(window) / max(1, counts.targets)
        run = self._run_in_turn if self.by_block is None else self._run_by_block
        if self.balance.routers:
            # The ranks' gradients are averaged, and in float16 scaled; the loss's own division is not met here.
            scaler = self.accelerator.scaler
            factor = 1.0 if scaler is None else scaler.get_scale()
            self.balance.begin(counts.tokens, self.accelerator.num_processes * factor)
        loss_sum, figures = run(window, scale)
        self.enter_phase(Phase.COLLECTIVE)
        limit = self.settings.max_grad_norm
        # Without a limit too: the norm decides whether the step is taken.
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), math.inf if limit is None else limit)
        step = self._exchange_figures(loss_sum, whole_tensor(norm), figures, counts)
        for extension in self.extensions:
            extension.before_update()
        skipped = self._step_optimizer(step.grad_norm)
        metrics: dict[str, Any] = {}
        for extension in self.extensions:
            metrics = with_figures(metrics, extension.after_update(self.global_step + 1, skipped))
        return replace(step, skipped=skipped, metrics=metrics)

    def _shared_by_window(self, batches: Iterable[Any]) -> Batch:
        """Returns what the losses of all these micro-batches share, over all ranks; see `Objective.window_sums`."""
        if not self.objective.needs_whole_steps:
            return {}
        sums = [self.objective.window_sums(self.model, batch) for batch in batches]
        return {"window": self._over_ranks(torch.stack(sums).sum(dim=0))}

    def _over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        """Returns sums of any shape over the rows of all ranks."""
        total: torch.Tensor = self.accelerator.reduce(sums, "sum")
        return total if self.copies == 1 else total / self.copies

    def _run_in_turn(self, window: list[Batch], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs one micro-batch after another; returns the sums of their losses, a scalar, and figures, (F,)."""
        loss_sum, figures = _zero_sums(self.objective, self.accelerator.device)
        shared = self._shared_by_window(self._in_phase(window, Phase.FORWARD))
        for batch in self._in_phase([{**batch, **shared} for batch in window], Phase.FORWARD):
            with self.accelerator.accumulate(self.model):
                with self.balance.observing(batch):
                    loss, of_batch = self.objective.training_sums(self.model, batch)
                # Summed on the device: to read each loss, the host would have to wait for every micro-batch.
                loss_sum += loss.detach()
                figures += of_batch
                self._begin_backward()
                self.accelerator.backward(loss * scale)
                del loss
        return loss_sum, figures

    def _run_by_block(self, window: list[Batch], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the same as `_run_in_turn`; runs all micro-batches in a block before the next block."""
        assert self.by_block is not None
        for _ in window[1:]:
            with self.accelerator.accumulate(self.model):  # counts up to the micro-batch that ends the window
                pass
        batches, of_batches = list(self._in_phase(window, Phase.FORWARD)), []
        batches = self.objective.looked_at(self.model, batches, self.by_block.evaluate)
        shared = self._shared_by_window(batches)
        batches = [{**batch, **shared} for batch in batches]

        def forward(batch: Any) -> torch.Tensor:
            with self.balance.observing(batch):
                loss, of_batch = self.objective.training_sums(self.model, batch)
            of_batches.append(of_batch)
            return loss

        with self.accelerator.accumulate(self.model):
            losses = self.by_block.run(
                [functools.partial(forward, batch) for batch in batches],
                lambda loss: self.accelerator.backward(loss * scale),
                self._begin_backward,
            )
        loss_sum, figures = _zero_sums(self.objective, self.accelerator.device)
        for loss, of_batch in zip(losses, of_batches, strict=True):
            loss_sum += loss
            figures += of_batch
        return loss_sum, figures

    def _begin_backward(self) -> None:
        self.enter_phase(Phase.BACKWARD)
        self.balance.exchange()

    def _in_phase(self, batches: Iterable[Batch], phase: Phase) -> Iterator[Batch]:
        for batch in batches:
            self.enter_phase(phase)
            whole = batch if self.objective.pads else without_padding(batch)
            yield _on_device(self.objective.on_host(whole), self.accelerator.device)

    def _step_optimizer(self, grad_norm: float) -> bool:
        """Steps the optimizer unless the gradient is not finite. Returns whether the step was skipped.

        A gradient scaler (fp16) is stepped in any case: it looks for infinities by itself, and lowers its scale.
        Accelerate's `optimizer_step_was_skipped` is not used: a fused optimizer is called even then, and does nothing.
        """
        skipped = not math.isfinite(grad_norm)
        if skipped and self._steps_in_backward:
            raise TrainingError(
                f"step {self.global_step + 1}: the gradient norm is {grad_norm}, but the weights were already updated "
                "during backward; set training.max_grad_norm, for example to 1.0, so that such steps are skipped"
            )
        self.enter_phase(Phase.OPTIMIZER)
        with torch.profiler.record_function(UPDATE):
            if not skipped or self.accelerator.scaler is not None:
                self.optimizer.step()
            self.optimizer.zero_grad()
        return skipped

    def _exchange_figures(
        self, loss_sum: torch.Tensor, norm: torch.Tensor, figures: torch.Tensor, counts: Counts
    ) -> Step:
        """Exchanges the ranks' figures before the update. Also sets the counts of the next window."""
        reason = next((why for each in self.extensions if (why := each.reason_to_stop()) is not None), None)
        wants_save = [each.wants_save() for each in self.extensions]
        mine = RankStep.pack(
            loss_sum,
            norm,
            figures,
            peak_device_bytes(self.accelerator.device),
            peak_host_bytes(),
            reason is not None,
            any(wants_save),
            self._rate_factor,
            *astuple(_counts(self.objective, self._upcoming or [])),
        )
        found = [RankStep.unpack(row) for row in self.accelerator.gather(mine[None]).tolist()]
        norms = [rank.grad_norm for rank in found]
        _require_no_failure(self.objective, [rank.loss_sum for rank in found], self._steps_in_backward)
        if len(factors := {rank.rate_factor for rank in found}) > 1:
            raise TrainingError(
                f"the ranks' rate_factor differ: {', '.join(f'{factor:g}' for factor in sorted(factors))}; an "
                "extension must compute it from what is equal on all ranks, such as the step and its loss"
            )
        # Unknown at the end, and where `train_step` is called without `fit`: then it asks the ranks itself.
        self._counted = None
        if self._upcoming is not None:
            self._counted = Counts.total(rank.next_counts for rank in found[:: self.copies])
        return Step(
            loss=sum(rank.loss_sum for rank in found[:: self.copies]) / max(1, counts.targets),
            # If only one replica's norm is non-finite, use that one so that all ranks skip the step.
            grad_norm=next((norm for norm in norms if not math.isfinite(norm)), norms[self.accelerator.process_index]),
            counts=counts,
            peak_device_bytes=max(rank.peak_device_bytes for rank in found),
            peak_host_bytes=max(rank.peak_host_bytes for rank in found),
            non_finite_ranks=[number for number, rank in enumerate(found) if not math.isfinite(rank.loss_sum)],
            figures=[
                sum(sums) / max(1, counts.targets)
                for sums in zip(*(rank.figures for rank in found[:: self.copies]), strict=True)
            ],
            skipped=False,
            stop=reason_of_all(reason, [rank.wants_to_stop for rank in found]),
            save=any(rank.wants_to_save for rank in found),
            metrics={},
            rate_factor=self._rate_factor,
        )

    def _sum_over_ranks(self, counts: Counts) -> Counts:
        """Sums counts over ranks; float64 is exact up to 2^53."""
        tensor = torch.tensor(astuple(counts), dtype=torch.float64, device=self.accelerator.device)
        return Counts(*map(int, self._over_ranks(tensor).tolist()))

    def _evaluation_due(self) -> bool:
        every = self.settings.eval_every_steps
        return every is not None and self.global_step % every == 0

    def _is_over(self, evaluates: bool = True) -> bool:
        """Evaluates if it is due and not done, and returns whether an extension ends the run then."""
        due = self._evaluation_due()
        if due and evaluates:
            self.evaluate()
        return due and any(extension.ends_run(self) for extension in self.extensions)

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Ends the run where `check_stop` leaves the block.

        Raises:
            StoppedError: by then the extensions have saved the state.
        """
        try:
            yield
        except _EvaluationLeftError as left:
            reason = str(left)
            for extension in self.extensions:
                extension.stopped(self, reason)
            raise StoppedError(f"stopped after step {self.global_step}: {reason}") from None

    def check_stop(self) -> None:
        """Leaves an evaluation, if a rank was asked to end. Collective."""
        reason = next((why for each in self.extensions if (why := each.leaves_evaluation()) is not None), None)
        if ranks.on_any_rank(reason is not None):
            raise _EvaluationLeftError(reason or "another rank was asked to")

    def evaluate(self) -> None:
        """Records the mean loss over the held-out targets and the objective's figures; each sample counts once.

        A run that makes its own samples has no held-out loss; only the figures of its extensions are recorded.

        Raises:
            StoppedError: if a rank was asked to end; the state is saved.
        """
        if self.evaluation is None and not self.windows.fresh:
            return
        begin_moment(f"evaluation {self.global_step}")
        made = self.evaluation or (lambda: ())
        self.model.eval()
        with self._stoppable(), LongAction(Terminal(quiet=ranks.rank() != 0), "evaluating"), ExitStack() as weights:
            for extension in self.extensions:
                weights.enter_context(extension.evaluating())
            weights.enter_context(torch.no_grad())
            shared = self._shared_by_window(self._in_phase(made(), Phase.EVALUATE))
            batches = self._held_out(made())
            parts = [self.objective.evaluation_sums(self.model, {**batch, **shared}) for batch in batches]
            figures: dict[str, Any] = {}
            for extension in self.extensions:
                figures = with_figures(figures, extension.at_evaluation(self))
        self.enter_phase(Phase.COLLECTIVE)
        of_rows: dict[str, Any] = {}
        if parts:
            sums = self._over_ranks(torch.stack(parts).sum(dim=0)).tolist()
            seen = [*sums, *(value for each in shared.values() for value in each.tolist())]
            _require_no_failure(self.objective, seen, self._steps_in_backward)
            of_rows = self.objective.evaluation_record(sums)
        self.model.train()
        record = with_figures({"step": self.global_step, **of_rows}, figures)
        for extension in self.extensions:
            extension.after_evaluation(self, record)

    def held_out_predictions(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields this rank's held-out predictions, a micro-batch at a time: logits (N, V) and labels (N,).

        Every rank has to take all of them, and each has equally many micro-batches; see `Objective.predictions`.
        """
        for batch in () if self.evaluation is None else self._held_out(self.evaluation()):
            yield self.objective.predictions(self.model, batch)

    def _held_out(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in self._in_phase(batches, Phase.EVALUATE):
            self.check_stop()
            yield batch


class _EvaluationLeftError(Exception):
    """Unwinds an evaluation that a rank was asked to leave; its text is the reason."""


def _waited_for(windows: Iterator[list[Batch]], begin: Callable[[], None]) -> Iterator[list[Batch]]:
    """Yields from `windows` and labels the wait for each, which a profile shows. `begin` is called before each."""
    while True:
        begin()
        with torch.profiler.record_function(DATA):
            window = next(windows, None)
        if window is None:
            return
        yield window


def _zero_sums(objective: Objective, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a scalar for the loss, and (F,) for the objective's figures."""
    return torch.zeros((), device=device), torch.zeros(len(objective.figures), device=device)


def _require_no_failure(objective: Objective, sums: list[float], steps_in_backward: bool) -> None:
    """Raises on all ranks what failed on one, which they see by sums that are not finite. Collective then."""
    failures = [] if all(map(math.isfinite, sums)) else ranks.gather_objects(objective.failure)
    if (failure := next(filter(None, failures), None)) is not None:
        # The weights are those of the last step, unless backward updates them: then there is nothing to save.
        raise (OwnCodeError if steps_in_backward else BadInputError)(failure)


def _counts(objective: Objective, window: list[Batch]) -> Counts:
    """Counts this rank's part of a window."""
    return Counts.total(counts_of(batch, objective.count_targets(batch)) for batch in window)


def _on_device(batch: Any, device: torch.device) -> Any:
    if device.type == "cuda":
        # A copy from other memory waits for the device. Streams' batches, and what `on_host` adds, lie there.
        batch = {name: value.pin_memory() if _is_pageable(value) else value for name, value in batch.items()}
    return send_to_device(batch, device, non_blocking=True)


def _is_pageable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_pinned()


# Garbage is collected at the same steps on every rank: otherwise each rank would wait for the others' collections


# torchtitan's number.
EVERY_STEPS = 50


@contextlib.contextmanager
def collected_by_step() -> Iterator[None]:
    """Switches automatic collection off until the block ends."""
    was_on = gc.isenabled()
    # Not `gc.freeze`: to unfreeze at the end also thaws what others had frozen, 0.15 s a run in our tests.
    gc.collect()  # what is alive is old from here on, and `collect_at` does not look at it
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def collect_at(step: int) -> None:
    """Collects young objects every `EVERY_STEPS` steps."""
    if step % EVERY_STEPS == 0:
        gc.collect(1)
