"""toolkit.training.trainer: steps that are skipped, and what the ranks exchange."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from toolkit import Recipe, finetune
from toolkit.errors import StoppedError, TrainingError
from toolkit.recipe.schema import TrainingSection
from toolkit.run.parts.figures import NonFiniteSteps, Records
from toolkit.sharding.plugin import reset_accelerate
from toolkit.training.extension import Extension
from toolkit.training.extensions.best import BestEvaluation
from toolkit.training.loop_state import Counters
from toolkit.training.phase import Phase
from toolkit.training.step import Step
from toolkit.training.trainer import RankStep, Trainer
from toolkit.training.usage import Counts

HUGE = 1e36
"""Times a scale of 2^16 it is infinite in float32; alone it is not."""


class Told:
    """Keeps what a trainer tells."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.warnings: list[str] = []

    def train(self, record: dict[str, Any]) -> None:
        self.records.append({"split": "train", **record})

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    tell = warn


class Product:
    """The weight times the batch: a gradient is what the batch holds; of 0, the loss is finite and the gradient not."""

    unit = "pairs"
    figures = ("margin",)
    failure = None
    needs_whole_steps = False
    pads = True

    def count_targets(self, batch: dict[str, torch.Tensor]) -> int:
        return 1

    def on_host(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return batch

    def training_sums(self, model: nn.Linear, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        product = model(batch["input_ids"]).sum()
        return product.sqrt() if product == 0 else product, 3 * product.detach()[None]

    def training_record(self, means: list[float]) -> dict[str, float]:
        return {"margin": means[0]}


class Steps:
    """A window of one number for each step."""

    fresh = False
    samples_per_step = 1

    def __init__(self, gradients: list[float]) -> None:
        self.gradients = gradients

    def __iter__(self) -> Iterator[list[dict[str, torch.Tensor]]]:
        return iter([[{"input_ids": torch.tensor([[value]])}] for value in self.gradients])

    def epoch_at(self, step: int) -> float:
        return 0.0

    def samples_at(self, step: int) -> int:
        return step


def built(gradients: list[float], fused: bool, scale: float | None, **settings: int) -> tuple[Trainer, Told]:
    """A run of one weight, which starts at 0.01; with fp16's scaler, which a CPU run of Accelerate has not."""
    reset_accelerate()
    accelerator = Accelerator(cpu=True)
    if scale is not None:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        accelerator.native_amp = True
        accelerator.state._mixed_precision = "fp16"
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=fused)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    prepared = accelerator.prepare_optimizer(optimizer)
    accelerator._models.append(model)
    told: Any = Told()
    section = TrainingSection(output_dir="unused", max_steps=len(gradients), max_grad_norm=1.0, **settings)
    objective: Any = Product()
    windows: Any = Steps(gradients)
    extensions: list[Extension] = [Records(told), NonFiniteSteps(told, section.max_non_finite_steps)]
    if section.patience is not None:
        extensions.append(BestEvaluation(section, told))
    trainer = Trainer(accelerator, model, prepared, schedule, objective, section, windows, extensions=extensions)
    return trainer, told


def trained(gradients: list[float], fused: bool, scale: float | None) -> tuple[Trainer, Told, torch.Tensor]:
    trainer, told = built(gradients, fused, scale)
    try:
        trainer.fit()
    finally:
        reset_accelerate()
    weight: Any = trainer.model.weight
    return trainer, told, weight.detach()


@pytest.mark.parametrize("fused", [True, False])
def test_an_overflow_of_fp16_is_told_and_counted_and_the_schedule_waits(fused: bool) -> None:
    """A fused optimizer is called in an overflow, too, so that Accelerate says that nothing was skipped."""
    trainer, told, weight = trained([1.0, HUGE, 1.0], fused, scale=2.0**16)
    assert [record["learning_rate"] for record in told.records] == [1e-3, 5e-4, 5e-4]
    assert trainer.counters.skipped_steps == 1
    assert trainer.counters.non_finite_in_a_row == 0
    [message] = told.warnings
    assert message.startswith("step 2: non-finite gradient norm (loss 8.99"), message
    assert message.endswith(
        "the optimizer step was skipped, 1 so far; fp16 overflowed, and its loss scale is now 32768"
    )
    # Adam's first two steps on a gradient of 1 are of the learning rate each.
    assert weight.item() == pytest.approx(0.01 - 1e-3 - 5e-4, abs=1e-8)


def test_a_search_for_the_scale_is_no_broken_run_but_one_without_a_scale_left_is() -> None:
    trainer, _, _ = trained([HUGE] * 8 + [1.0], False, scale=2.0**16)
    assert trainer.counters.skipped_steps == 8
    with pytest.raises(TrainingError, match="3 in a row"):
        trained([0.0] * 9, False, scale=2.0)


def test_a_norm_that_another_rank_alone_finds_not_finite_skips_the_step_here_too() -> None:
    trainer, told = built([1.0, 1.0], False, None)
    gather = trainer.accelerator.gather

    def with_another_rank(mine: torch.Tensor) -> torch.Tensor:
        other = gather(mine).clone()
        if trainer.global_step == 1:
            other[0, 1] = float("nan")  # its norm
        return torch.cat([mine, other])

    trainer.accelerator.gather = with_another_rank
    try:
        trainer.fit()
    finally:
        reset_accelerate()
    assert trainer.counters.skipped_steps == 1
    assert [math.isfinite(record["grad_norm"]) for record in told.records] == [True, False]
    weight: Any = trainer.model.weight
    assert weight.item() == pytest.approx(0.01 - 1e-3, abs=1e-8)


def test_without_a_scaler_the_schedule_waits_too() -> None:
    trainer, told, _ = trained([1.0, float("inf"), 1.0], False, None)
    assert [record["learning_rate"] for record in told.records] == [1e-3, 5e-4, 5e-4]
    assert trainer.counters.skipped_steps == 1


@pytest.mark.parametrize(
    ("step", "patience", "end"),
    [(4, 2, 4), (4, 3, 7), (5, 2, 6)],
    ids=["it was over", "it has more patience", "no evaluation was due"],
)
def test_a_run_that_patience_had_ended_is_not_trained_on_when_it_is_resumed(step: int, patience: int, end: int) -> None:
    trainer, told = built([1.0] * 3, False, None, eval_every_steps=2, patience=patience)
    told.records += [{"split": "eval", "step": each, "loss": 1.0} for each in (0, 2, 4)]
    trainer.counters.global_step = step
    try:
        trainer.fit()
    finally:
        reset_accelerate()
    assert trainer.global_step == end
    assert ("no lower held-out loss in 2 evaluations" in " ".join(told.warnings)) == (patience == 2)


def test_a_row_of_what_ranks_exchange_comes_back_as_it_went() -> None:
    on_host = (2**40, 3, True, False, 0.5, 5, 2**53, 7, 8)
    row = RankStep.pack(torch.tensor(1.5), torch.tensor(2.5), torch.tensor([0.5, 4.0]), *on_host)
    found = RankStep.unpack(row.tolist())
    assert found == RankStep(1.5, 2.5, 2**40, 3, True, False, 0.5, Counts(5, 2**53, 7, 8), [0.5, 4.0])


class Noted(Extension):
    """Notes at which points it is called, but for phases."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self.phases: list[tuple[Phase, int]] = []

    def enter_phase(self, phase: Phase, step: int) -> None:
        self.phases.append((phase, step))

    def before_step(self, step: int) -> None:
        self.notes.append(f"before step {step}")

    def before_update(self) -> None:
        self.notes.append("before update")

    def after_update(self, step: int, skipped: bool) -> dict[str, Any]:
        self.notes.append(f"after update {step}" + " skipped" * skipped)
        return {"noted": step}

    def after_step(self, trainer: Trainer, step: Step) -> None:
        self.notes.append(f"after step {trainer.global_step}: {step.metrics}")

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        self.notes.append("evaluating")
        yield
        self.notes.append("evaluated")

    def after_evaluation(self, trainer: Trainer, record: dict[str, Any]) -> None:
        self.notes.append(f"after evaluation {record}")

    def ends_run(self, trainer: Trainer) -> bool:
        self.notes.append(f"asked at {trainer.global_step}")
        return trainer.global_step == 4

    def between_steps(self, trainer: Trainer, step: Step) -> None:
        self.notes.append(f"between {trainer.global_step}")

    def after_last_step(self) -> None:
        self.notes.append("after last step")

    def close(self) -> None:
        self.notes.append("close")


def evaluation_of(trainer: Trainer) -> None:
    """Gives a trainer held-out data with a loss of 7."""
    objective: Any = trainer.objective
    objective.evaluation_sums = lambda model, batch: torch.tensor([7.0], dtype=torch.float64)
    objective.evaluation_record = lambda sums: {"loss": sums[0]}
    trainer.evaluation = lambda: [{"input_ids": torch.ones(1, 1)}]


def test_an_extension_is_called_at_every_point_and_can_end_the_run() -> None:
    trainer, _ = built([1.0, float("inf"), 1.0, 1.0, 1.0], False, None, eval_every_steps=2)
    evaluation_of(trainer)
    noted = Noted([])
    trainer.extensions = [noted]
    try:
        trainer.fit()
    finally:
        reset_accelerate()

    def step(number: int, skipped: str = "") -> list[str]:
        return [
            f"before step {number}",
            "before update",
            f"after update {number}{skipped}",
            f"after step {number}: {{'noted': {number}}}",
        ]

    def evaluation(number: int) -> list[str]:
        return ["evaluating", "evaluated", f"after evaluation {{'step': {number}, 'loss': 7.0}}"]

    expected = [*evaluation(0), *step(1), "between 1", *step(2, " skipped"), *evaluation(2), "asked at 2", "between 2"]
    expected += [*step(3), "between 3", *step(4), *evaluation(4), "asked at 4", "close", "after last step"]
    assert noted.notes == expected
    first = [phase for phase, number in noted.phases if number == 1]
    # The data of two steps are waited for before the first, so that it can count the second's.
    assert first == [
        *[Phase.EVALUATE, Phase.COLLECTIVE],
        *[Phase.DATA, Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.COLLECTIVE, Phase.OPTIMIZER],
    ]


def test_an_evaluation_is_left_in_the_batch_in_which_that_is_asked() -> None:
    """18,000 held-out rows took 43 s, and a machine that is preempted gives 30."""
    trainer, _ = built([1.0], False, None)
    evaluation_of(trainer)
    batches, asked = iter([{"input_ids": torch.ones(1, 1)}] * 9), Extension()
    trainer.evaluation, trainer.extensions = (lambda: batches), [asked]
    asked.leaves_evaluation = iter([None, None, "SIGTERM"]).__next__  # type: ignore[method-assign]
    try:
        with pytest.raises(StoppedError, match="stopped after step 0: SIGTERM"):
            trainer.fit()
    finally:
        reset_accelerate()
    assert len([*batches]) == 6


def test_extensions_are_closed_after_an_error() -> None:
    trainer, told = built([1.0, 1.0], False, None)
    notes: list[str] = []
    trainer.extensions = [Noted(notes), *trainer.extensions]
    told.train = lambda record: 1 / 0  # type: ignore[method-assign,assignment]
    try:
        with pytest.raises(ZeroDivisionError):
            trainer.fit()
    finally:
        reset_accelerate()
    assert notes[-1] == "close"


@pytest.mark.parametrize("left_out", [Records, NonFiniteSteps, BestEvaluation])
def test_each_extension_can_be_left_out_alone(left_out: type[Extension]) -> None:
    gradients = [1.0, float("inf"), 1.0, 1.0]
    trainer, told = built(gradients, False, None, eval_every_steps=1, patience=9)
    evaluation_of(trainer)
    told.evaluation = told.train  # type: ignore[attr-defined]
    trainer.extensions = [each for each in trainer.extensions if not isinstance(each, left_out)]
    try:
        trainer.fit()
    finally:
        reset_accelerate()
    whole, _, weight = trained(gradients, False, None)
    assert trainer.counters == whole.counters
    assert torch.equal(trainer.model.weight.detach(), weight)  # type: ignore[union-attr,operator]
    assert bool(told.records) == (left_out is not Records)
    assert bool(told.warnings) == (left_out is not NonFiniteSteps)


def test_a_run_whose_every_step_was_skipped_has_failed_and_exports_nothing(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base", make_texts(20), tied=True)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)  # finite, and the logits are not
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    write_rows(tmp_path / "rows.jsonl", ({"text": text} for text in make_texts(20)))
    values = recipe_values(base, tmp_path / "rows.jsonl", tmp_path / "out", tmp_path / "cache", max_steps=2)
    values["training"]["max_non_finite_steps"] = 3
    with pytest.raises(TrainingError, match="each of the 2 steps of this run was skipped") as failed:
        finetune(Recipe.from_mapping(values))
    assert failed.value.exit_code == 1
    assert not (tmp_path / "out/export").exists()
    assert not (tmp_path / "out/finished.json").exists()
    steps: Any = NonFiniteSteps(Told(), 3)
    for counters in (Counters(global_step=2, skipped_steps=1), Counters()):
        steps.before_training(SimpleNamespace(counters=counters))
        steps.after_last_step()
