"""Lets the model sample the completions that its next optimizer step learns from, and scores them.

One step is one rollout: the weights of the step before sample G completions of each of its prompts, rewards score them,
and they are learned once. Nothing is kept for later steps. So no sample is stale, and a checkpoint needs no state of
this: weights, position and seed decide the next samples.

The prompts, the noise of each draw and the batches in which completions are sampled do not depend on the number of
ranks, and neither does the order in which completions are learned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from toolkit import ranks
from toolkit.data.build import TokenisedData
from toolkit.data.samples.loader import EpochOrder, Loader
from toolkit.data.samples.samples import Batch, padded_length, sample_of, segments_of, stack
from toolkit.data.tokens.tokenizer import decode
from toolkit.errors import BadInputError, listed
from toolkit.generation.sampling.fresh import FreshSample, draw, sampler_gap
from toolkit.generation.sampling.rewards import Completions, Rewards
from toolkit.generation.sampling.sampled_rows import PromptForm
from toolkit.generation.text.complete import Prompt
from toolkit.generation.text.load import Loaded
from toolkit.generation.text.rows import PromptRow, all_right, answers_of
from toolkit.model.adapters.adapters import base_of
from toolkit.objectives.losses.policy_losses import advantages_of
from toolkit.pages.parts.loss_warnings import gamed
from toolkit.pages.samples_page import SampledPrompt
from toolkit.recipe.recipe import Recipe
from toolkit.run.stages.generating import generating, loaded_of, split_over_ranks
from toolkit.run.stages.part import Loop, RunPart
from toolkit.run.stages.stages import BuiltRun, ReportExtras
from toolkit.training.extension import Extension
from toolkit.training.loop_state import LoopState, Windows
from toolkit.training.metrics import Metrics
from toolkit.training.phase import Phase

LARGEST_GAP, LARGEST_GAP_IN_16_BITS = 1e-3, 0.1
"""The most by which the log-probabilities of tokens may differ between sampler and training, on average (nats).

Types that do it right have 5e-7 in float32 and 4e-3 in bfloat16, RWKV 2 in a batch and 8e-7 one by one."""

TRIED = 16
"""Tokens of a completion in the trial of `batch_size_of`."""

MANY = 0.5
"""Share of completions that are cut from which on a warning says so."""

SHOWN = 3
"""Completions that a warning shows."""

CHARACTERS = 200
"""Characters of each of them."""

PROMPTS_SHOWN = 4
"""Prompts of a step whose completions the report shows."""


@dataclass(frozen=True)
class Rollout:
    """The completions of a step, N of them, in the order of the run; those of a prompt are neighbours.

    Attributes:
        prompts: as they were asked.
        rows: the rows of their prompts.
        samples: as they were drawn.
        texts: without the tokens that end them.
        values: of each completion by each reward, (N, K).
        rewards: the weighted sums, (N,).
        advantages: (N,).
    """

    prompts: Sequence[Prompt]
    rows: Sequence[PromptRow]
    samples: Sequence[FreshSample]
    texts: Sequence[str]
    values: np.ndarray
    rewards: np.ndarray
    advantages: np.ndarray


def require_whole_groups(recipe: Recipe, samples_per_step: int) -> None:
    """Checks that a step has whole groups of completions, if the model samples them.

    Raises:
        BadInputError: if it has not; it names the nearest numbers that do.
    """
    group = recipe.objective.completions_per_prompt
    if not recipe.objective.spec.samples_itself or samples_per_step % group == 0:
        return
    fewer, more = samples_per_step // group * group, -(-samples_per_step // group) * group
    nearest = f"{fewer} or {more}" if fewer else str(more)
    raise BadInputError(
        f"objective.group_size: {group} does not divide the {samples_per_step} completions of a step, which are "
        "training.micro_batch_size x ranks x training.gradient_accumulation_steps; change these so that a step has "
        f"{nearest}"
    )


def _require_no_dropout(model: Any) -> None:
    """Raises BadInputError if forwards in training differ from those that sample."""
    config = base_of(model).config.get_text_config()
    modules = [name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]
    settings = [name for name, value in vars(config).items() if "drop" in name and isinstance(value, float) and value]
    if modules or {"attention_dropout", "attn_pdrop"} & {*settings}:
        raise BadInputError(
            f"model.name_or_path: {listed(settings or modules)} of config.json drops values in training, so the model "
            "would learn from samples of another model than the one that drew them; set each to 0 there"
        )


Sampler = Callable[[list[Prompt]], list[FreshSample]]
"""Draws a completion of each prompt, from the weights that the model has. Collective."""


def batch_size_of(
    recipe: Recipe, loaded: Loaded, prompts: list[Prompt], exact: bool, warn: Callable[[str], None]
) -> int:
    """Returns how many completions are drawn at a time: one by one if the model mixes up the rows of a batch.

    The batch of a step whose prompts differ most in length is tried, by all ranks at once. Collective.

    Args:
        exact: whether the model computes in float32.

    Raises:
        BadInputError: if a completion is drawn with other probabilities than training gives it, alone as well.
    """
    section = recipe.objective
    size = section.rollout_batch_size or recipe.training.micro_batch_size
    limit = LARGEST_GAP if exact else LARGEST_GAP_IN_16_BITS
    most = min(TRIED, section.max_new_tokens or TRIED)
    by_length = [sorted(batch, key=lambda prompt: len(prompt.ids)) for batch in batches_of(prompts, size)]
    batch = max(by_length, key=lambda batch: len(batch[-1].ids) - len(batch[0].ids))  # padding would show here

    def gap_of(trial: list[Prompt]) -> float:
        with torch.no_grad():
            found = sampler_gap(loaded, trial, most, recipe.training.seed)
        return ranks.on_first_rank(lambda: found)  # near the limit ranks may round otherwise

    together = gap_of(batch)
    if together <= limit:
        return size
    alone = max(gap_of([prompt]) for prompt in (batch[0], batch[-1]))
    if not alone <= limit:
        raise BadInputError(
            "objective.kind: grpo would learn from samples of another distribution: this model draws tokens with "
            f"log-probabilities that differ from those of training by {alone:.1e} nats on average, more than "
            f"{limit:.0e}; {'' if exact else 'compute in float32, or '}name a model of another type"
        )
    warn("objective.rollout_batch_size: this model mixes up the rows of a batch; completions are drawn one by one")
    return 1


def batches_of(prompts: list[Prompt], size: int) -> list[list[Prompt]]:
    return [prompts[first : first + size] for first in range(0, len(prompts), size)]


def drawn_in_batches(recipe: Recipe, loaded: Loaded, prompts: list[Prompt], size: int) -> list[FreshSample]:
    """Draws completions in batches that do not depend on the ranks, which share them. Collective."""
    section, batches = recipe.objective, batches_of(prompts, size)
    assert section.max_new_tokens is not None
    work = partial(draw, loaded, max_new_tokens=section.max_new_tokens, seed=recipe.training.seed)
    with torch.no_grad():
        return [sample for batch in split_over_ranks(batches, work, recipe.sharding.tensor) for sample in batch]


class RunSampler:
    """Lets the model of a run sample, sharded as it is.

    Args:
        beat: called before each forward, so that long completions do not count as a stall.

    Raises:
        BadInputError: if the model has dropout, or no token that ends a text.
    """

    def __init__(self, run: BuiltRun, beat: Callable[[], None]) -> None:
        self._run, self._beat = run, beat
        _require_no_dropout(run.inner)
        self._whole = run.planned.gathers_whole
        self._size: int | None = None
        too_large = "lower objective.rollout_batch_size or objective.max_new_tokens"
        self._loaded = loaded_of(run, too_large, whole=self._whole)
        if not self._loaded.stops:
            raise BadInputError(
                "objective.kind: grpo samples until a token ends the text, and neither the tokenizer nor "
                "generation_config.json names one; set eos_token in tokenizer_config.json"
            )

    def __call__(self, prompts: list[Prompt]) -> list[FreshSample]:
        opened, recipe = self._run.opened, self._run.opened.recipe
        with generating(self._run, self._beat, self._whole):
            if self._size is None:
                self._size = batch_size_of(recipe, self._loaded, prompts, not opened.in_16_bits, opened.console.warn)
            return drawn_in_batches(recipe, self._loaded, prompts, self._size)


class Rollouts:
    """The windows of a run that learns from its own samples.

    Args:
        data: prompts.
        positions: counts the completions of the run, and says which are this rank's.
        sampler: draws them.
        device: where reward models run.
        warn: called about rewards and completions from which nothing can be learned.
        wait: called before rewards, which may be slow on rank 0 while the others wait for it.

    Attributes:
        last: the rollout of the step under way, or None before the first.
        figures: what is recorded of it.
        names: of the rewards.

    Raises:
        BadInputError: if a reward cannot be loaded.
    """

    fresh = True

    def __init__(
        self,
        recipe: Recipe,
        data: TokenisedData,
        positions: Loader,
        tokenizer: PreTrainedTokenizerBase,
        sampler: Sampler,
        device: torch.device,
        warn: Callable[[str], None] = lambda _: None,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._positions, self._tokenizer, self._sampler = positions, tokenizer, sampler
        # As `Loader` counts them: a sample is a completion.
        self.resume, self.epoch_at, self.samples_at = positions.resume, positions.epoch_at, positions.samples_at
        self.samples_per_step = positions.samples_per_step
        self._warn, self._wait = warn, wait
        self._section, self._training = recipe.objective, recipe.training
        assert data.train.asked_of_itself is not None
        self._samples, self._group = data.train.asked_of_itself, self._section.completions_per_prompt
        self._order = EpochOrder(self._samples.num_prompts, self._training.seed, recipe.data.shuffle)
        self._given_up = ExitStack()
        rewards, most = self._section.rewards, self._section.max_new_tokens
        assert rewards is not None
        assert most is not None
        self._compares = any(reward.compare is not None and reward.score is None for reward in rewards)
        form, size = PromptForm(data.report.chat_template is not None), self._training.micro_batch_size
        self._rewards = Rewards(rewards, self._all_rows, form, tokenizer, most, size, str(device), self._given_up)
        self.figures: dict[str, Any] = {}
        self.names = self._rewards.names
        self.last: Rollout | None = None

    # The windows of the loop.

    def state_at(self, samples: int) -> None:
        return None

    def __iter__(self) -> Iterator[list[Batch]]:
        for start in self._positions.step_starts():
            yield self._window(start)

    def _window(self, start: int) -> list[Batch]:
        """Returns this rank's micro-batches of the step whose first completion is at this position. Collective."""
        began = time.perf_counter()
        prompts = [self._prompt_at(position) for position in range(start, start + self.samples_per_step)]
        samples = self._sampler(prompts)
        sampled = time.perf_counter()
        self.last = self._scored(prompts, samples)
        self.figures = self._figures(self.last, sampled - began, time.perf_counter() - sampled)
        if start == 0:
            self._look_at_first(self.last)
        return [self._batch(self.last, mine) for mine in self._positions.micro_batches(0)]

    def _prompt_at(self, position: int) -> Prompt:
        """Returns the prompt at a position; the number of the prompt in the run decides its draws, also in epoch 2."""
        number, k = divmod(position, self._group)
        return Prompt(self._samples.prompt(self._order[number])[0], [], row=number, k=k)

    def _row(self, number: int) -> PromptRow:
        """Returns the row of a prompt, with its answers if a reward compares with them; raises BadInputError."""
        _, place, kept = self._samples.prompt(number)
        asked, fields = kept["prompt"], kept["row"]
        answers = answers_of(fields.get("answer")) if self._compares else ()
        return PromptRow(place, asked, asked, kept["tools"], kept["arguments"], answers, fields=fields)

    def _all_rows(self) -> list[PromptRow]:
        numbers = range(self._samples.num_prompts)
        return all_right("data.train", [(self._samples.prompt(n)[1], partial(self._row, n)) for n in numbers])

    def _scored(self, prompts: Sequence[Prompt], samples: Sequence[FreshSample]) -> Rollout:
        rows = [self._row(self._order[prompt.row]) for prompt in prompts]
        texts = [decode(self._tokenizer, sample.written) for sample in samples]
        lengths, stopped = [len(sample.ids) for sample in samples], [sample.stopped for sample in samples]
        self._wait()
        values, rewards = self._rewards.of(Completions(texts, lengths, stopped, rows))
        found = advantages_of(rewards, self._group, self._section.scale_rewards or "group")
        return Rollout(prompts, rows, samples, texts, values, rewards, found)

    def _batch(self, rollout: Rollout, numbers: range) -> Batch:
        """Returns completions after their prompts, packed into one row; see `Grpo`."""
        samples = [rollout.samples[number] for number in numbers]
        asked = [rollout.prompts[number].ids for number in numbers]
        learned = [self._is_learned(rollout, number) for number in numbers]
        pieces = [
            (prompt + sample.ids, [False] * len(prompt) + [is_learned] * len(sample.ids))
            for prompt, sample, is_learned in zip(asked, samples, learned, strict=True)
        ]
        total = sum(len(ids) for ids, _ in pieces)
        batch = stack([sample_of(pieces, padded_length(total, total + 8), self._samples.pad_id)])
        drawn = torch.zeros(batch["input_ids"].shape)
        of_tokens = [[0.0] * len(ids) + each.log_probabilities for ids, each in zip(asked, samples, strict=True)]
        drawn[0, :total] = torch.tensor([value for piece in of_tokens for value in piece])
        return {
            **batch,
            "segments": segments_of([pieces], batch["input_ids"]),
            "advantages": torch.tensor(rollout.advantages[numbers.start : numbers.stop], dtype=torch.float32),
            "drawn": drawn,
        }

    def _is_learned(self, rollout: Rollout, number: int) -> bool:
        is_whole = rollout.samples[number].stopped or not self._section.mask_truncated
        return is_whole and not np.isnan(rollout.rewards[number])

    # What is recorded.

    def _figures(self, rollout: Rollout, sampling: float, scoring: float) -> dict[str, Any]:
        # A completion from which a reward abstains is in no figure of rewards.
        groups = np.ma.masked_invalid(rollout.rewards.reshape(-1, self._group))
        spreads = np.ma.filled(groups.std(axis=1, ddof=1), 0.0)
        lengths = np.array([len(sample.ids) for sample in rollout.samples])
        drawn = sum(value for sample in rollout.samples for value in sample.log_probabilities)
        return {
            "reward": float(groups.mean()),
            "reward_std": float(spreads.mean()),
            **({"abstained": float(np.isnan(rollout.rewards).mean())} if groups.mask.any() else {}),
            **{
                f"reward/{name}": float(value)
                for name, value in zip(self._rewards.names, np.nanmean(rollout.values, axis=0), strict=True)
            },
            "groups_without_signal": float(np.ma.filled(groups.min(axis=1) == groups.max(axis=1), True).mean()),
            "completion_tokens": float(lengths.mean()),
            "longest_completion": int(lengths.max()),
            "cut": float(np.mean([not sample.stopped for sample in rollout.samples])),
            # Of fresh samples the mean of -log p is an unbiased estimate.
            "entropy": -drawn / max(1, int(lengths.sum())),
            "rollout_seconds": sampling,
            "reward_seconds": scoring,
        }

    def _look_at_first(self, rollout: Rollout) -> None:
        """Warns if nothing, or little, can be learned from the first step's completions."""
        first = rollout.rewards[0]
        if (rollout.rewards == first).all():
            shown = "\n".join(f"  {text[:CHARACTERS]!r}" for text in rollout.texts[:SHOWN])
            self._warn(
                f"objective.rewards: all {len(rollout.rewards)} completions of the first step have the reward "
                f"{first:g}, so there is nothing to learn from them. Three of them:\n{shown}"
            )
        if self.figures["cut"] > MANY:
            self._warn(
                f"objective.max_new_tokens: {self.figures['cut']:.0%} of the first step's completions were cut after "
                f"{self._section.max_new_tokens} tokens; raise it, or ask for shorter answers"
            )

    def shown(self) -> list[SampledPrompt]:
        """Returns the first prompts of the last rollout, with their completions and rewards."""
        assert self.last is not None
        found, scores = [], [None if np.isnan(reward) else float(reward) for reward in self.last.rewards]
        for first in range(0, len(scores), self._group)[:PROMPTS_SHOWN]:
            of_prompt = range(first, first + self._group)
            completions = [(scores[n], self.last.texts[n], self.last.samples[n].stopped) for n in of_prompt]
            asked = self._tokenizer.decode(self.last.prompts[first].ids)
            found.append(SampledPrompt(self.last.rows[first].place, asked, completions))
        return found

    def close(self) -> None:
        """Gives the reward models up."""
        self._given_up.close()


class RolloutRecords(Extension):
    """Puts the figures of each rollout into the record of its step, and its samples into the report.

    It comes after the extension that writes records, which it looks at after each evaluation.
    """

    def __init__(self, rollouts: Rollouts, metrics: Metrics, shown: ReportExtras) -> None:
        self._rollouts, self._metrics, self._shown = rollouts, metrics, shown
        self._has_warned = False

    def after_update(self, step: int, skipped: bool) -> dict[str, Any]:
        self._shown.sampled = (step, self._rollouts.shown())
        return self._rollouts.figures

    def after_evaluation(self, trainer: LoopState, record: dict[str, Any]) -> None:
        told = None if self._has_warned else gamed(self._metrics.records)
        if told is not None:
            self._has_warned = True
            self._metrics.warn(told)

    def close(self) -> None:
        self._rollouts.close()


class OwnSamples(RunPart):
    """The completions that a run learns from, where the model samples them itself."""

    def before_rows(self) -> None:
        require_whole_groups(self.recipe, self.opened.samples_per_step)

    def windows(self, loop: Loop) -> Windows | None:
        if not self.recipe.objective.spec.samples_itself:
            return None
        opened, run, wait = self.opened, loop.run, loop.heartbeat.wait
        sampler = RunSampler(run, lambda: loop.heartbeat.enter_phase(Phase.GENERATE))
        made = (self.recipe, run.data, run.windows, run.tokenizer, sampler, opened.device, opened.console.warn, wait)
        self._rollouts = Rollouts(*made)
        return self._rollouts

    def extension(self, loop: Loop) -> Extension | None:
        if not self.recipe.objective.spec.samples_itself:
            return None
        return RolloutRecords(self._rollouts, loop.metrics, self.opened.shown)
