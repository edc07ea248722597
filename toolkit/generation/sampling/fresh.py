"""Samples completions together with the log-probabilities with which their tokens were drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LogitsProcessor

from toolkit.generation.text.complete import Prompt, before_stop, generated
from toolkit.generation.text.load import Loaded
from toolkit.generation.text.options import Sampling

COMPARED = 4
"""Rows at each end of a batch that `sampler_gap` compares."""


@dataclass(frozen=True)
class FreshSample:
    """A completion as it was drawn.

    Attributes:
        ids: its tokens, with the one that ends it if one does.
        log_probabilities: of each token at the time of drawing (nats), as long as `ids`.
        stopped: whether a token ended it; otherwise it was cut at the limit of tokens.
    """

    ids: list[int]
    log_probabilities: list[float]
    stopped: bool

    @property
    def written(self) -> list[int]:
        """The tokens of the text, without the one that ends it."""
        return self.ids[:-1] if self.stopped else self.ids


def draw(loaded: Loaded, prompts: list[Prompt], max_new_tokens: int, seed: int) -> list[FreshSample]:
    """Draws a completion of each prompt from the model's own distribution, all prompts in one batch.

    Each prompt's numbers `row` and `k` decide its draws, together with the seed, and not the others in its batch.
    """
    record = _LogProbabilities()
    sampling = Sampling(max_new_tokens, temperature=1.0, top_p=1.0, seed=seed)
    found = generated(loaded, prompts, max_new_tokens, sampling, record=record)
    of_tokens = record.of(found).tolist()
    samples = []
    for row, of_row in zip(found.tolist(), of_tokens, strict=True):
        before, stopped = before_stop(row, loaded.stops)
        length = len(before) + stopped
        samples.append(FreshSample(row[:length], of_row[:length], stopped))
    return samples


def sampler_gap(loaded: Loaded, prompts: list[Prompt], max_new_tokens: int, seed: int) -> float:
    """Returns the mean distance of log-probabilities (nats) between drawing in one batch and a forward of each row.

    Of a large batch the first and the last `COMPARED` rows are compared.
    """
    gaps = []
    pairs = list(zip(prompts, draw(loaded, prompts, max_new_tokens, seed), strict=True))
    for prompt, sample in [*pairs[:COMPARED], *pairs[COMPARED:][-COMPARED:]]:
        ids = torch.tensor([[*prompt.ids, *sample.ids]], device=loaded.model.device)
        logits = loaded.model(input_ids=ids, use_cache=False).logits[0, len(prompt.ids) - 1 : -1]
        own = logits.float().log_softmax(-1).gather(1, ids[0, len(prompt.ids) :, None].to(logits.device))[:, 0]
        gaps.append((own.cpu() - torch.tensor(sample.log_probabilities)).abs())
    return float(torch.cat(gaps).mean())


class _LogProbabilities(LogitsProcessor):  # type: ignore[misc]
    """Records the log-probabilities of the tokens that are drawn.

    A token is known at the next call, so only the last distribution is kept.
    """

    def __init__(self) -> None:
        self._of_steps: list[torch.Tensor] = []
        self._last: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Keeps the distribution of the next token, and returns `scores` (B, V) as they are."""
        self._take(input_ids[:, -1:])
        self._last = scores.float().log_softmax(dim=-1)
        return scores

    def _take(self, ids: torch.Tensor) -> None:
        if self._last is not None:
            self._of_steps.append(self._last.gather(1, ids).squeeze(1))

    def of(self, found: torch.Tensor) -> torch.Tensor:
        """Returns the log-probabilities of the drawn tokens `found`, (B, tokens); those after a stop mean nothing."""
        self._take(found[:, -1:])
        self._last = None
        return torch.stack(self._of_steps, dim=1)
