"""Draws tokens from a generator for each completion, so that it does not depend on the others in its batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from toolkit.errors import ToolkitError
from toolkit.generation.text.options import Sampling


def seed_of(seed: int, row: int, k: int) -> int:
    """Returns the seed of a row's k-th completion, 0 to 2**63 - 1."""
    digest = hashlib.sha256(f"{seed} {row} {k}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Drawn(LogitsProcessor):  # type: ignore[misc]
    """Adds Gumbel noise to logits, so that the argmax of the sums is a draw from their softmax (Gumbel-max).

    Args:
        seeds: a seed for each row of the batch, whose noise comes from a separate generator.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns logits plus noise.

        Args:
            input_ids: (B, T).
            scores: the logits of the next token, (B, V).

        Returns:
            The sums, (B, V), float32.

        Raises:
            ToolkitError: if logits of a row are not finite.
        """
        if not scores.amax(dim=-1).isfinite().all():
            raise ToolkitError("the logits contain NaN or infinity; try --dtype float32")
        waits = torch.empty(scores.shape, device=scores.device)
        for wait, generator in zip(waits, self._generators, strict=True):
            wait.exponential_(generator=generator)
        return scores.float() - waits.clamp_min(torch.finfo(torch.float32).tiny).log()


def drawing(
    sampling: Sampling, seeds: Sequence[int], device: torch.device, record: LogitsProcessor | None = None
) -> LogitsProcessorList:
    """Returns processors with which the most likely token of `generate` is a draw.

    Args:
        record: called with the logits from which each token is drawn.
    """
    found = LogitsProcessorList()
    if sampling.temperature != 1:
        found.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    if record is not None:
        found.append(record)
    found.append(Drawn(seeds, device))
    return found
