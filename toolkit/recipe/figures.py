"""The figures of a run's records: their names, how they are written, and which direction is better."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
        unit: what it is counted in, if the title does not say so.
        better: which direction is better; empty if neither is.
        said: its name inside a sentence; empty: the title.
    """

    field: str
    title: str
    form: Literal["share", "perplexity", "number"] = "number"
    plain: str = ""
    better: Direction = ""
    said: str = ""
    unit: str = ""

    @property
    def heading(self) -> str:
        """Its title with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def name(self) -> str:
        """Its name inside a sentence."""
        return self.said or self.title.lower()

    def merit(self, value: float) -> float:
        """Returns a number that is larger for better values."""
        return -value if self.better == "lower" else value

    def in_short(self, value: float) -> str:
        """Returns a value as the console shows it."""
        return f"{value:.1%}" if self.form == "share" else f"{value:.4g} {self.unit}".rstrip()


LOSS = Figure("loss", "Held-out loss", better="lower", said="held-out loss")
ESTIMATED = "estimated on these completions; below 0: they became less likely"
RIGHT = "share of right answers"
ANSWERS = Figure("answer_accuracy", "Answers right", "share", f"{RIGHT} to held-out prompts", "higher", RIGHT)
KEPT_LOSS = Figure("kept_loss", "Loss of kept rows", better="lower", said="kept loss")
FROM_START = "from the model before the first step, nats a token"
KEPT_KL = Figure("kept_kl", "KL of kept rows", plain=FROM_START, better="lower", said="kept KL")

FIGURES = (
    Figure("perplexity", "Perplexity", "perplexity", "as hard to predict as so many equally likely tokens", "lower"),
    Figure("accuracy", "Accuracy", "share", RIGHT, "higher"),
    Figure("f1_macro", "F1", "share", "rare classes count as much as frequent ones", "higher", "F1"),
    Figure("f1", "F1 of entities", "share", "entities that are found and right", "higher", "F1 of entities"),
    Figure("pearson", "Pearson's correlation", plain="1: on a line with the labels", better="higher"),
    Figure("mean_absolute_error", "Mean absolute error", better="lower"),
    Figure("precision", "Precision", "share", better="higher"),
    Figure("recall", "Recall", "share", better="higher"),
    Figure("margin", "Margin", plain="how clearly the chosen answer is preferred", better="higher"),
    Figure("chosen_reward", "Chosen reward"),
    Figure("rejected_reward", "Rejected reward"),
    Figure("kl", "KL to the reference", plain=ESTIMATED, said="KL to the reference"),
    Figure("divergence", "Divergence from the teacher", plain="how far its predictions are from it", better="lower"),
    Figure("cross_entropy", "Cross-entropy of the labels", better="lower"),
    ANSWERS,
    Figure("answer_stopped", "Answers that stop", "share", better="higher"),
    Figure("answer_mean_tokens", "Tokens of an answer, on average"),
    KEPT_LOSS,
    KEPT_KL,
)
"""Figures of evaluations, in the order in which they are shown; an evaluation has those of its objective."""

REWARD = Figure("reward", "Reward", plain="of the model's own samples", better="higher", said="mean reward")
"""The figure of a run that learns from its own samples; its train records have it."""

OF_STEPS = (
    REWARD,
    Figure("cut", "Completions that were cut", "share", better="lower", said="cut"),
    Figure("groups_without_signal", "Groups whose completions have one reward", "share", "", "lower", "without signal"),
    Figure("reward_std", "Spread of the rewards", plain="standard deviation among completions of a prompt"),
    Figure("abstained", "Completions without a reward", plain="share of them", better="lower"),
    Figure("completion_tokens", "Tokens of a completion"),
    Figure("longest_completion", "Longest completion", unit="tokens"),
    Figure("entropy", "Entropy of the samples", unit="nats a token"),
    Figure("sampler_gap", "Log-probabilities, sampler against training", better="lower", unit="nats a token"),
    Figure("balance_loss", "Balance loss of the experts", better="lower"),
    Figure("expert_entropy", "Entropy of the experts' load", plain="1: even", better="higher"),
)
"""Figures that steps of training alone have."""

KNOWN = {figure.field: figure for figure in (LOSS, *FIGURES, *OF_STEPS)}


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
    return figure if figure.better else replace(figure, better=direction)  # type: ignore[arg-type]
