"""What the best evaluation decides: when a run ends (`training.patience`), and which weights it leaves.

Early stopping: Prechelt, "Early Stopping - But When?", 1998.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolkit import ranks
from toolkit.errors import BadInputError, counted, did_you_mean
from toolkit.recipe.figures import steering
from toolkit.recipe.schema import TrainingSection
from toolkit.training.extension import Extension
from toolkit.training.loop_state import LoopState
from toolkit.training.metrics import Metrics
from toolkit.training.step import Step


class BestEvaluation(Extension):
    """Ends the run when its evaluations stop improving, all ranks alike, and at the end puts the best weights back.

    Args:
        settings: the run's, with a patience or None.
        save: saves the state of the trainer before the run ends.
        restore: puts the weights of the best checkpoint into the model, if they are better than the last ones.
    """

    def __init__(
        self,
        settings: TrainingSection,
        metrics: Metrics,
        save: Callable[[LoopState], Any] = lambda trainer: None,
        restore: Callable[[LoopState], Any] = lambda trainer: None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._save = save
        self._restore = restore
        self._is_known = False
        self._trainer: LoopState | None = None

    def before_training(self, trainer: LoopState) -> None:
        self._trainer = trainer

    def after_evaluation(self, trainer: LoopState, record: dict[str, Any]) -> None:
        self._look_for_figure(record, is_last=not trainer.windows.fresh)

    def after_step(self, trainer: LoopState, step: Step) -> None:
        if trainer.windows.fresh:  # its rewards are figures of training
            self._look_for_figure({**trainer.objective.training_record(step.figures), **step.metrics}, is_last=True)

    def _look_for_figure(self, record: Mapping[str, Any], is_last: bool) -> None:
        """Raises BadInputError if the first records do not have the figure that `training.best_by` names."""
        field = steering(self._settings.best_by).field
        self._is_known = self._is_known or field in record
        if self._is_known or not is_last:
            return
        known = [key for key, value in record.items() if isinstance(value, int | float) and key != "step"]
        raise BadInputError(
            f"training.best_by: this run's evaluations have no figure {field!r}{did_you_mean(field, known)}; they "
            f"have: {', '.join(known)}"
        )

    def ends_run(self, trainer: LoopState) -> bool:
        why = ranks.gather_objects(patience_is_over(self._metrics.records, self._settings))[0]
        if why is None:
            return False
        self._metrics.tell(f"ended after step {trainer.global_step}: {why}")
        self._save(trainer)
        return True

    def after_last_step(self) -> None:
        assert self._trainer is not None, "training has begun"
        self._restore(self._trainer)


def patience_is_over(records: Sequence[Mapping[str, Any]], settings: TrainingSection) -> str | None:
    """Returns why a run ends after its last evaluation, or None if it goes on.

    Only the records decide, so a resumed run decides as if it had never stopped.

    Args:
        records: those of metrics.jsonl.
        settings: `patience` is the number of evaluations in a row without a better figure (`best_by`) after which a
            run ends, or None.
    """
    if settings.patience is None:
        return None
    merits = {-1: -math.inf, **judged(records, settings.best_by, settings.eval_every_steps)}
    best_step = max(merits, key=merits.__getitem__)  # the first of equals
    since = sum(step > best_step for step in merits)
    if since < settings.patience:
        return None
    figure = steering(settings.best_by)
    best, top = merits[best_step], "lowest" if figure.better == "lower" else "highest"
    told = f"the {top} is {figure.in_short(figure.merit(best))}, at step {best_step:,}"
    told = told if math.isfinite(best) else "none was finite"
    return f"no {figure.better} {figure.name} in {counted(since, 'evaluation')} (training.patience); {told}"


def judged(records: Sequence[Mapping[str, Any]], best_by: str, every: int | None, at: int = 0) -> dict[int, float]:
    """Returns step -> merit of the weights after it, which is larger for better ones and -inf if it is not known.

    Those are the steps with an evaluation that has the figure. A figure that only training has, such as the reward of
    a run that samples itself, counts as its mean over `every` steps, because single steps are noisy: up to step `at`,
    and to those a multiple of `every` before or after it.
    """
    figure, merits = steering(best_by), dict[int, list[float]]()
    evals = [record for record in records if record["split"] == "eval" and figure.field in record]
    width = 1 if evals else every if figure.field != "loss" else None
    for record in evals or records:
        if figure.field in record and width is not None:
            value, step = record[figure.field], at - (at - record["step"]) // width * width
            merits.setdefault(step, []).append(-math.inf if value is None else figure.merit(float(value)))
    return {step: sum(found) / len(found) for step, found in merits.items() if step <= records[-1]["step"]}
