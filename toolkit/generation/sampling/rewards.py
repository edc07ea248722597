"""Scores sampled completions by the rewards of a recipe."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.errors import OwnCodeError
from toolkit.generation.sampling.reward import reward_model
from toolkit.generation.sampling.sampled_rows import PromptForm
from toolkit.generation.text.evaluation import scoring_of
from toolkit.generation.text.rows import PromptRow
from toolkit.recipe.objectives.grpo import RewardSection
from toolkit.user_function import UserFunction, as_number, load_function

LARGEST = 1e30
"""The largest size of a reward, far from where the squares in a variance are infinite."""

NEEDED = f"a number of at most {LARGEST:g}, or None to leave a completion out"


@dataclass(frozen=True)
class Completions:
    """Completions to score, in the order of their rows.

    Attributes:
        texts: the completions, without the tokens that end them.
        lengths: their tokens, with the one that ends a completion.
        stopped: whether a token ended them.
        rows: the rows of their prompts.
    """

    texts: Sequence[str]
    lengths: Sequence[int]
    stopped: Sequence[bool]
    rows: Sequence[PromptRow]


class Reward(Protocol):
    """Scores N completions; returns their values in order. Collective."""

    def __call__(self, completions: Completions) -> list[float]: ...


class Rewards:
    """All rewards of a run.

    Args:
        rows: all rows of the run, whose answers are compared; only read on rank 0.
        prompts: the form of the prompts, which a reward model reads.
        batch_size: completions that a reward model reads at a time.
        close: the models are given up when it closes.

    Attributes:
        names: in the order of the recipe, (K,).

    Raises:
        BadInputError: if a function or a model cannot be loaded, or a row lacks the answer to compare with.
    """

    def __init__(
        self,
        sections: Sequence[RewardSection],
        rows: Callable[[], Sequence[PromptRow]],
        prompts: PromptForm,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        batch_size: int,
        device: str,
        close: ExitStack,
    ) -> None:
        self.names = [section.name for section in sections]
        self._weights = np.array([section.weight for section in sections])
        self._form, self._batch_size, self._device, self._max_new_tokens = prompts, batch_size, device, max_new_tokens
        self._tokenizer = tokenizer if prompts.chat_template else None
        self._rewards = [self._made(section, rows, close) for section in sections]

    def _made(self, section: RewardSection, rows: Callable[[], Sequence[PromptRow]], close: ExitStack) -> Reward:
        where = f"objective.rewards.{section.name}"
        if section.score is not None:
            values = _Function(load_function(section.score, where), section.batched).values
            # Once for all: a function of the user's may have effects, and need not be on every host.
            return lambda given: ranks.on_first_rank(lambda: values(given))
        if section.model is not None:
            judge = close.enter_context(reward_model(section.model, "auto", self._device, f"{where}: model"))
            return _ModelReward(judge, self._form, self._batch_size)
        if section.overlong is not None:
            return _Overlong(self._max_new_tokens, min(section.overlong, self._max_new_tokens))
        if section.match is not None:
            pattern = re.compile(section.match)
            return lambda given: [float(pattern.search(text) is not None) for text in given.texts]
        # Every row's answer is looked at, before the first step.
        ranks.on_first_rank(lambda: scoring_of(list(rows()), section.compare, f"{where}: compare"))
        comparison, pairs = scoring_of([], section.compare, where, self._tokenizer), partial(zip, strict=True)
        return lambda given: [comparison.score(text, row) for text, row in pairs(given.texts, given.rows)]

    def of(self, completions: Completions) -> tuple[np.ndarray, np.ndarray]:
        """Returns the values of each completion by each reward, (N, K), and the weighted sums, (N,). Collective.

        Both are NaN where a function abstains.

        Raises:
            BadInputError: if a function fails, returns no number, or abstains from all; it names the row.
        """
        values = np.array([reward(completions) for reward in self._rewards], dtype=np.float64).T
        idle = [name for name, column in zip(self.names, values.T, strict=True) if np.isnan(column).all()]
        if idle:
            raise OwnCodeError(
                f"objective.rewards: {idle[0]} returned None for all {len(values)} completions of the step, so "
                "nothing can be learned; return a number for some"
            )
        return values, values @ self._weights


@dataclass(frozen=True)
class _Function:
    """A function of the user's."""

    function: UserFunction
    batched: bool

    def values(self, completions: Completions) -> list[float]:
        # Copies, so that one score does not depend on those before it.
        rows = [copy.deepcopy(dict(row.fields)) for row in completions.rows]
        if not self.batched:
            places = [row.place for row in completions.rows]
            each = zip(places, completions.texts, rows, strict=True)
            return [self._number(self.function.call(place, text, row), place) for place, text, row in each]
        found = self.function.call("the completions of a step", list(completions.texts), rows)
        if not isinstance(found, list | tuple) or len(found) != len(rows):
            raise self.function.wrong(found, f"{len(rows)} completions", f"a list of {len(rows)} values, {NEEDED} each")
        return [self._number(value, row.place) for value, row in zip(found, completions.rows, strict=True)]

    def _number(self, value: Any, place: str) -> float:
        if value is None:
            return math.nan
        found = as_number(value)
        if found is not None and abs(found) <= LARGEST:
            return found
        raise self.function.wrong(value, place, NEEDED)


@dataclass(frozen=True)
class _Overlong:
    """Between 0 and -1, over the last tokens before the limit (arXiv 2503.14476, eq. 13)."""

    limit: int
    margin: int

    def __call__(self, completions: Completions) -> list[float]:
        free = self.limit - self.margin
        return [
            -1.0 if not stopped else -max(0, length - free) / self.margin
            for length, stopped in zip(completions.lengths, completions.stopped, strict=True)
        ]


@dataclass(frozen=True)
class _ModelReward:
    """The scores of a reward model; each rank computes a share."""

    judge: Any
    prompts: PromptForm
    batch_size: int

    def __call__(self, completions: Completions) -> list[float]:
        share = range(ranks.rank(), len(completions.texts), ranks.world_size())
        mine = [number for number in share if completions.texts[number].strip()]
        rows = [self.prompts.row(completions.rows[number], completion=completions.texts[number]) for number in mine]
        scores = self.judge.rewards(self.judge.encode(rows), self.batch_size) if rows else []
        found = dict(pair for of_rank in ranks.gather_objects(list(zip(mine, scores, strict=True))) for pair in of_rank)
        # A reward model has learned nothing of empty completions, which are as bad as the worst.
        worst = min(found.values(), default=0.0)
        return [found.get(number, worst) for number in range(len(completions.texts))]
