"""Lets both sides of `toolkit verify` learn from the same samples: the plain model draws them, and the ranks get them.

In float32 the ranks draw those of the first step, too, and these are compared. Later weights differ by rounding, so
that two almost equally likely tokens may come out otherwise.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from toolkit.generation.sampling.fresh import FreshSample
from toolkit.generation.text.complete import Prompt
from toolkit.generation.text.load import Loaded, beginning, positions_of, stop_tokens
from toolkit.model.adapters.adapters import base_of
from toolkit.paths import atomic_write
from toolkit.recipe.recipe import Recipe
from toolkit.run.parts.rollouts import Sampler, batch_size_of, drawn_in_batches

FILE = "samples.json"
"""What the plain model has drawn, in the folder that the ranks read."""

Steps = list[list[FreshSample]]
"""The completions of each step, in the order of the run."""


class PlainSampler:
    """Lets the plain model sample on one process.

    Attributes:
        drawn: the completions of each step.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        base = base_of(model)
        self._recipe, self._model = recipe, model
        base.generation_config = GenerationConfig(**beginning(base))
        self._loaded = Loaded("the model", base, tokenizer, stop_tokens(base, tokenizer), positions_of(base))
        self.drawn: Steps = []

    def __call__(self, prompts: list[Prompt]) -> list[FreshSample]:
        self._model.eval()
        size = batch_size_of(
            self._recipe, self._loaded, prompts, self._loaded.model.dtype == torch.float32, lambda _: None
        )
        self.drawn.append(drawn_in_batches(self._recipe, self._loaded, prompts, size))
        self._model.train()
        return self.drawn[-1]


class GivenSamples:
    """Returns the completions of the plain model, step by step.

    Args:
        own: draws on the ranks; its first step is compared with the given one.

    Attributes:
        differ: the completions of the first step that the ranks draw otherwise.
    """

    def __init__(self, folder: Path, own: Sampler) -> None:
        self._steps, self._own = iter(_read(folder)), own
        self.differ: int | None = None

    def __call__(self, prompts: list[Prompt]) -> list[FreshSample]:
        given = next(self._steps)
        if self.differ is None:
            pairs = zip(self._own(prompts), given, strict=True)
            self.differ = sum(mine.ids != other.ids for mine, other in pairs)
        return given


def write(folder: Path, steps: Steps) -> None:
    """Writes the completions for `GivenSamples`."""
    atomic_write(folder / FILE, json.dumps([[asdict(sample) for sample in step] for step in steps]))


def _read(folder: Path) -> Steps:
    steps = json.loads((folder / FILE).read_text(encoding="utf-8"))
    return [[FreshSample(**sample) for sample in step] for step in steps]
