"""Draws the rows of added tokens that the base has spare rows for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from toolkit.data.tokens.tokenizer import new_ids
from toolkit.model.adapters.adapters import generator_of
from toolkit.model.weights.weights import Weights, all_rows
from toolkit.recipe.schema import ModelSection
from toolkit.sharding.fsdp2.shards import Rows

SPREAD = 3e-5
"""Deviation of new rows from the mean, as a share of that of the old rows; as transformers' `mean_resizing`."""


def with_new_rows(
    weights: Weights,
    model: PreTrainedModel,
    section: ModelSection,
    base: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> Weights:
    """Returns a source of parameters that draws the rows of `model.add_tokens`; `weights` if there is none to draw.

    Args:
        weights: the source of the base's parameters.
        model: the model on the meta device.
        base: the configuration of the base, before its embeddings were enlarged.
    """
    if section.name_or_path is None:  # all rows are new
        return weights
    # Where the embeddings are enlarged, transformers draws the rows.
    ids = [each for each in new_ids(tokenizer) if each < base.get_text_config().vocab_size]
    return NewRows(weights, model, ids, seed) if ids else weights


class NewRows:
    """Reads parameters from their source, with new rows in the embeddings and in an untied head.

    Bases often have more rows than tokens, and nothing has trained these. A new row is drawn around the mean of the
    rows of the base's tokens, as rows are that enlarge the embeddings.

    Args:
        base: the source of the parameters.
        model: the model on the meta device.
        ids: the rows to draw. Tokens of the base have the numbers before them.
    """

    def __init__(self, base: Weights, model: PreTrainedModel, ids: Sequence[int], seed: int) -> None:
        self._base = base
        self._ids = list(ids)
        self._seed = seed
        layers = (model.get_input_embeddings(), model.get_output_embeddings())
        of_tokens = {id(parameter) for layer in layers if layer is not None for parameter in layer.parameters()}
        named = model.named_parameters(remove_duplicate=False)
        self._names = {name for name, parameter in named if id(parameter) in of_tokens}

    def read(self, name: str, like: torch.Tensor, rows: Rows) -> torch.Tensor:
        """See `toolkit.model.weights.weights.Weights`."""
        if name not in self._names:
            return self._base.read(name, like, rows)
        # In float32: 16 bits would make all new rows equal.
        whole = self._base.read(name, like, all_rows(like)).to(torch.float32, copy=True)
        old = whole[: min(self._ids)]
        noise = torch.randn(len(self._ids), *whole.shape[1:], generator=generator_of(self._seed, name))
        whole[self._ids] = (old.mean(0) + SPREAD * old.std(0) * noise).to(whole.device)
        return whole[rows]
