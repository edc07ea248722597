"""The rewards that score completions which the model in training samples itself."""

from __future__ import annotations

import re

from pydantic import Field, model_validator

from toolkit.recipe.objectives.section import COMPARED, Compare, Comparison, PositiveInt, Section, contradiction

SOURCES = ("compare", "match", "model", "overlong")
"""A reward sets exactly one of these fields."""


class RewardSection(Section):
    """One reward. A completion's reward is the sum of weight times value over all of them."""

    name: str = Field(pattern=r"^[\w.-]{1,64}$", description="Report it under this name.")
    weight: float = Field(1.0, description="Multiply its values by this.")
    compare: Compare | None = Field(
        None,
        description=f"1 if the completion equals the row's `answer` (or one of a list), else 0: {COMPARED} Or the "
        "number that this function (file.py:function, or module:function on Python's path) returns for a completion "
        "and its row; None leaves the completion out of its group. The file's code is run.",
    )
    match: str | None = Field(
        None, min_length=1, description="1 if this regular expression matches somewhere in the completion, else 0."
    )
    batched: bool = Field(
        False, description="Call the function once a step, with lists of completions and rows; it returns a list."
    )
    model: str | None = Field(
        None, min_length=1, description="The score of this reward model: the folder of a run of objective.kind reward."
    )
    overlong: PositiveInt | None = Field(
        None,
        description="Minus 1 for a completion that was cut, rising to 0 over the last N tokens before the limit (arXiv "
        "2503.14476, eq. 13).",
    )

    @model_validator(mode="after")
    def _consistent(self) -> RewardSection:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise contradiction(f"objective.rewards: {self.name} has {found}; set one of {', '.join(SOURCES)}")
        if self.batched and self.score is None:
            raise contradiction(f"objective.rewards: {self.name}: batched has no effect without a function; remove it")
        if self.weight == 0:
            raise contradiction(f"objective.rewards: {self.name} has the weight 0, so it has no effect; remove it")
        try:
            re.compile(self.match or "")
        except re.error as error:
            raise contradiction(
                f"objective.rewards: {self.name}: match is not a Python regular expression: {error}; correct it"
            ) from None
        return self

    @property
    def score(self) -> str | None:
        """The function that scores, or None."""
        return None if self.compare is None else Comparison.of(self.compare).score
