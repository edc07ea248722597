"""The figures of a run's records: their names, how they are written, and which direction is better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from toolkit.errors import did_you_mean
from toolkit.recipe.objectives.section import contradiction

Direction = Literal["lower", "higher", ""]


@dataclass(frozen=True)
class Figure:
    """A figure of the records in metrics.jsonl.

    Attributes:
        field: its key in a record.
        title: its name on pages.
        form: how it is written.
        plain: what it is, in plain words.
        better: which direction is better; empty if neither is.
        said: its name inside a sentence; empty: the title.
    """

    field: str
    title: str
    form: Literal["share", "perplexity", "number"] = "number"
    plain: str = ""
    better: Direction = ""
    said: str = ""

    @property
    def name(self) -> str:
        """Its name inside a sentence."""
        return self.said or self.title.lower()

    def merit(self, value: float) -> float:
        """Returns a number that is larger for better values."""
        return -value if self.better == "lower" else value

    def in_short(self, value: float) -> str:
        """Returns a value as the console shows it."""
        return f"{value:.1%}" if self.form == "share" else f"{value:.4g}"


LOSS = Figure("loss", "Held-out loss", better="lower", said="held-out loss")
ANSWERS = Figure(
    "answer_accuracy",
    "Answers right",
    "share",
    "share of right answers to held-out prompts",
    "higher",
    "share of right answers",
)

FIGURES = (
    Figure(
        "perplexity", "Perplexity", "perplexity", "as many equally likely tokens would be as hard to predict", "lower"
    ),
    Figure("accuracy", "Accuracy", "share", "share of right answers", "higher"),
    Figure("f1_macro", "F1", "share", "rare classes count as much as frequent ones", "higher", "F1"),
    Figure("f1", "F1 of entities", "share", "entities that are found and right", "higher", "F1 of entities"),
    Figure("precision", "Precision", "share", better="higher"),
    Figure("recall", "Recall", "share", better="higher"),
    Figure("margin", "Margin", plain="how clearly the chosen answer is preferred", better="higher"),
    Figure("chosen_reward", "Chosen reward"),
    Figure("rejected_reward", "Rejected reward"),
    Figure("kl", "KL to the reference", said="KL to the reference"),
    Figure(
        "divergence",
        "Divergence from the teacher",
        plain="how far the model's predictions are from its teacher's",
        better="lower",
    ),
    Figure("cross_entropy", "Cross-entropy", better="lower"),
    ANSWERS,
    Figure("answer_stopped", "Answers that stop", "share", better="higher"),
    Figure("answer_mean_tokens", "Tokens of an answer"),
)
"""Figures of evaluations, in the order in which they are shown; an evaluation has those of its objective."""

REWARD = Figure("reward", "Reward", plain="of the model's own samples", better="higher", said="mean reward")
"""The figure of a run that learns from its own samples; its train records have it."""

KNOWN = {figure.field: figure for figure in (LOSS, REWARD, *FIGURES)}


def figure_of(field: str) -> Figure:
    """Returns the figure of a record's key. An extension's own is shown plainly; a source's loss has its name."""
    if field.startswith("loss/"):
        return Figure(field, f"Loss of {field.removeprefix('loss/')}", better="lower")
    return KNOWN.get(field) or Figure(field, field.replace("_", " ").capitalize(), said=field)


def steering(best_by: str) -> Figure:
    """Returns the figure that judges evaluations (`training.best_by`).

    Args:
        best_by: the name of a figure, after `lower` or `higher` if the figure does not say which is better.

    Raises:
        PydanticCustomError: if it names no direction, or more than a figure and a direction.
    """
    direction, _, field = best_by.rpartition(" ")
    figure = ANSWERS if field == "answers" else figure_of(field)
    if direction not in ("", "lower", "higher") or not field:
        raise contradiction(
            f"training.best_by: {best_by!r} is not the name of a figure, with lower or higher before it if needed"
        )
    if figure.better and direction not in ("", figure.better):
        raise contradiction(f"training.best_by: of {field}, {figure.better} is better; write {field}")
    if not figure.better and not direction:
        raise contradiction(
            f"training.best_by: whether more of {field!r} is better is not known"
            f"{did_you_mean(field, ['answers', *KNOWN])}; write higher {field}, or lower {field}"
        )
    return figure if figure.better else Figure(field, figure.title, better=direction, said=field)  # type: ignore[arg-type]
