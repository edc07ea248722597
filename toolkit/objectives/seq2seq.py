"""Next-token cross-entropy of a target, given a source."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from toolkit.data.samples.samples import IGNORED, Batch
from toolkit.errors import BadInputError, first_line
from toolkit.model.adapters.adapters import base_of
from toolkit.model.structure.fake_tensors import has_values, unset_fake_temporarily
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.losses.find_head import find_head_loss
from toolkit.objectives.losses.fused_linear_cross_entropy import HeadLoss, numbers_of_targets
from toolkit.objectives.objective import Ingredients, Objective
from toolkit.sharding.fsdp2.fsdp import class_name


class Seq2Seq(CausalLM):
    """Next-token cross-entropy of targets, given their sources, in an encoder-decoder.

    `labels` are the targets; the decoder takes them shifted to the right, by the model's own function.

    Raises:
        BadInputError: if the model cannot shift them, or its losses would differ from those of single rows.
    """

    def __init__(self, model: nn.Module) -> None:
        base = base_of(model)
        _require_exact(base)
        self._sources = ()
        self._shifted = _label_shift_of(base)
        with unset_fake_temporarily():
            self._padding = _checked_padding_token(base, self._shifted)
        self.head_loss = find_head_loss(model)

    @classmethod
    def build(cls, of: Ingredients) -> Objective:
        return cls(of.model)

    def count_targets(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def on_host(self, batch: Batch) -> dict[str, Any]:
        """Adds the positions of the batch's targets (`counted`), so that they need not be fetched from a GPU."""
        if not isinstance(self.head_loss, HeadLoss) or not has_values(batch["labels"]):
            return batch
        return {**batch, "counted": numbers_of_targets(self.targets(batch))}

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns logits (B, T, V)."""
        return model(**self.inputs(batch)).logits  # type: ignore[no-any-return]

    def decoder_inputs(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns the decoder's inputs (B, T): the labels shifted right, after the token that begins a target."""
        # A rank that has no sample left has rows without a target, and mBART looks in them for the last token.
        empty = (labels == IGNORED).all(dim=1, keepdim=True)
        return self._shifted(labels.masked_fill(empty, int(self._padding == 0)))

    def inputs(self, batch: Batch) -> dict[str, Any]:
        given = batch.get("decoder_input_ids")
        return {
            "input_ids": batch["input_ids"],
            "attention_mask": batch["attention_mask"],
            # The decoder needs no mask: padding follows a target, and no token of the target sees it.
            "decoder_input_ids": self.decoder_inputs(batch["labels"]) if given is None else given,
            "use_cache": False,
        }

    def targets(self, batch: Batch) -> torch.Tensor:
        """Returns the targets (B * T,)."""
        return batch["labels"].flatten()

    def few_tokens(self, vocabulary: int, device: torch.device) -> Batch:
        ids = torch.arange(1, 17, device=device)[None] % vocabulary
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.flip(1)[:, :8]}


Shift = Callable[[torch.Tensor], torch.Tensor]


def _label_shift_of(base: Any) -> Shift:
    """Returns the model's own function from labels to the decoder's inputs, both (B, T)."""
    own = getattr(base, "prepare_decoder_input_ids_from_labels", None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    # M2M100, NLLB and Blenderbot shift in their forward alone, by a function of their module.
    shift = getattr(inspect.getmodule(type(base)), "shift_tokens_right", None)
    if shift is None:
        raise BadInputError(
            f"objective.kind: seq2seq needs a model that shifts labels to the right, and {class_name(base)} has no "
            "function for it; use another model"
        )
    config = base.config
    return lambda labels: shift(labels, config.pad_token_id, config.decoder_start_token_id)


def _checked_padding_token(base: Any, shift: Shift) -> int:
    """Returns the model's padding token, after checking how the model shifts labels."""
    config, rows = base.config, int(base.get_input_embeddings().weight.shape[0])
    padding = config.pad_token_id
    tokens = [token for token in range(3) if token != padding][:2]
    try:
        found, problem = shift(torch.tensor([[*tokens, IGNORED]]))[0].tolist(), ""
    except Exception as error:  # whatever the code of a model raises
        found, problem = [], f" ({first_line(error)})"
    if found[1:] != tokens or not 0 <= found[0] < rows:
        raise BadInputError(
            "objective.kind: seq2seq shifts targets to the right, after the token decoder_start_token_id. In the "
            f"configuration of {class_name(base)} this is {config.decoder_start_token_id} of {rows:,} tokens, and "
            f"pad_token_id is {padding}{problem}; correct them there. For T5 both are the padding token"
        )
    return int(padding)


def _require_exact(base: Any) -> None:
    """Raises BadInputError if a row's loss would depend on other rows, or ranks would skip different blocks."""
    skipped = {key: getattr(base.config, key, None) for key in ("encoder_layerdrop", "decoder_layerdrop")}
    for key, share in skipped.items():
        if share:
            raise BadInputError(
                f"objective.kind: seq2seq runs all blocks on every rank, and the configuration of {class_name(base)} "
                f"skips {share:.0%} of them at random; set {key} to 0 there"
            )
    if getattr(base.config, "num_experts", None):
        raise BadInputError(
            f"objective.kind: seq2seq is not possible with {class_name(base)}, whose experts have a capacity, so "
            "that a row's loss depends on the rows next to it; use a model without experts"
        )
