"""Next-token cross-entropy."""

from __future__ import annotations

import inspect
import math
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.data.cut import predictions_of
from toolkit.data.samples import IGNORED, Batch
from toolkit.errors import BadInputError
from toolkit.model.adapters import base_of
from toolkit.model.attention import is_flash, known_packing
from toolkit.model.fake_tensors import has_values
from toolkit.model.positions import first_position, takes_positions
from toolkit.model.recurrent import kernels_take_documents
from toolkit.model.sight import Sight
from toolkit.objectives.find_head import find_head_loss
from toolkit.objectives.fused_linear_cross_entropy import HeadLoss, numbers_of_targets
from toolkit.objectives.objective import Ingredients, Objective
from toolkit.objectives.preference_losses import log_probabilities_by_document, summed_by_document
from toolkit.sharding.fsdp import class_name
from toolkit.sharding.sequence_parallel import WholeRows, rows_shared, summed_over_group

HEAD_LOSS_TOLERANCE = {False: 1e-5, True: 1e-2}
"""By whether compute is in 16 bits: the largest difference from whole logits' loss, as a share of it."""


class CausalLM(Objective):
    """Next-token cross-entropy. `labels` are aligned with `input_ids`, as transformers has them.

    Its losses come from the head's inputs, without whole logits, where the model allows for that.

    Args:
        packed: whether documents share samples.
        sources: names of the sources whose losses are told apart, by the numbers in a batch's `sources` (B, T).

    Attributes:
        head_loss: what the losses come from; where that is whole logits, the reason.
    """

    def __init__(self, model: nn.Module, packed: bool = True, sources: tuple[str, ...] = ()) -> None:
        self._packed = packed
        self._sources = sources
        if packed and not takes_positions(model):
            raise BadInputError(
                f"data.packing: {class_name(base_of(model))} takes no position_ids, so rows that share a sample would "
                "see each other; set data.packing=false"
            )
        self._first_position = first_position(base_of(model))
        self._has_states = packed and kernels_take_documents(model)
        # These kernels tell documents apart in a single row only; in several they would leak.
        self._in_one_row = self._has_states or (packed and is_flash(model))
        self._takes_bounds = self._in_one_row and _takes_anything(base_of(model))
        self.head_loss = find_head_loss(model)
        self._sight = Sight(model)

    @classmethod
    def build(cls, of: Ingredients) -> Objective:
        return cls(of.model, of.packed, of.sources)

    @property
    def figures(self) -> tuple[str, ...]:
        return tuple(f"{what} of {name}" for what in ("loss", "targets") for name in self._sources)

    def count_targets(self, batch: Batch) -> int:
        return int((predictions_of(batch)[0] != IGNORED).sum())

    def on_host(self, batch: Batch) -> dict[str, Any]:
        """The batch with what the host would otherwise have to ask the device for, and wait.

        Which tokens have targets (`counted`), whether documents share rows (`shared`) and, for flash attention, where
        they begin (`bounds`) and how long they are at most (`longest`): transformers asks for that in every layer.
        """
        if not has_values(batch["input_ids"]):
            return batch
        known: dict[str, Any] = {**batch, **self._sight.on_host(batch)}
        if isinstance(self.head_loss, HeadLoss):
            known["counted"] = numbers_of_targets(self.targets(batch))
        positions = batch.get("whole_positions", batch["position_ids"])
        known["shared"] = self._packed and bool((self._in_rows(positions).diff(dim=1) != 1).any())
        if self._takes_bounds:
            known |= bounds_of(positions)
        return known

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """(B, T, V)."""
        with rows_of(batch):
            logits = model(**self.inputs(batch)).logits
        return logits.view(*batch["input_ids"].shape, -1)  # type: ignore[no-any-return]

    def _in_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor (B, T) as the model is given it."""
        return tensor.view(1, -1) if self._in_one_row else tensor

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Of the model's forward."""
        # No attention mask and no cache: only then do restarting positions keep documents apart. Rows of one document
        # have the model's own positions, and transformers then does not look at them for others; parts of rows begin
        # anywhere.
        told = self._packed or "whole_positions" in batch
        names = ("input_ids", "position_ids") if told else ("input_ids",)
        inputs: dict[str, Any] = {name: self._in_rows(batch[name]) for name in names if name in batch}
        if "position_ids" in inputs and self._first_position:
            inputs["position_ids"] = inputs["position_ids"] + self._first_position
        if "position_ids" in inputs:
            inputs["position_ids"] = self._sight.positions(inputs["position_ids"])
        if self._has_states and "position_ids" in batch and "bounds" not in batch and has_values(batch["input_ids"]):
            batch = {**batch, **bounds_of(batch["position_ids"])}  # flash attention finds them by itself
        if "bounds" in batch and self._takes_bounds:  # a teacher may not, where its student does
            inputs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), batch["bounds"])
            inputs |= dict.fromkeys(("max_length_q", "max_length_k"), batch["longest"])
            if self._has_states:
                inputs["seq_idx"] = (self._in_rows(batch["position_ids"]) == 0).cumsum(dim=1).int() - 1
        return {**inputs, **self._sight.inputs(batch, self._in_one_row), "use_cache": False}

    def targets(self, batch: Batch) -> torch.Tensor:
        """What each position predicts, (B * T,); `IGNORED` for nothing, as across the documents of a preference."""
        return predictions_of(batch)[0].flatten()

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if isinstance(self.head_loss, HeadLoss):
            with rows_of(batch):
                return self.head_loss.summed(model, self.inputs(batch), self.targets(batch), batch.get("counted"))
        return self._sum_of_logits(model, batch)

    def training_sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and by named source the sums of losses and then the numbers of targets, (2 S,)."""
        if "sources" not in batch:
            loss = self.loss_sum(model, batch)
            return loss, loss.new_zeros(2 * len(self._sources))
        losses = self._losses_of_tokens(model, batch)
        return losses.sum(), self._by_source(losses.detach(), batch).flatten().float()

    def _losses_of_tokens(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of each token, (B * T,), float32; 0 if it has no target."""
        if isinstance(self.head_loss, HeadLoss):
            with rows_of(batch):
                return self.head_loss.by_token(model, self.inputs(batch), self.targets(batch), batch.get("counted"))
        logits = self.logits(model, batch).float().flatten(0, 1)
        return F.cross_entropy(logits, self.targets(batch), ignore_index=IGNORED, reduction="none")

    def _by_source(self, losses: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Summed losses and numbers of targets of each named source, (2, S), float64."""
        # The last place takes what is of no named source.
        owners = batch["sources"].flatten().remainder(len(self._sources) + 1)
        terms = torch.stack([losses.double(), (self.targets(batch) != IGNORED).double()])
        return terms.new_zeros(2, len(self._sources) + 1).index_add(1, owners, terms)[:, :-1]

    def training_record(self, means: list[float]) -> dict[str, Any]:
        return self._losses_by_source(means)

    def _losses_by_source(self, sums: list[float]) -> dict[str, float]:
        """The mean loss of each source that has targets, from what `_by_source` gives, whatever both are divided by."""
        number = len(self._sources)
        pairs = zip(self._sources, sums[:number], sums[number:], strict=True)
        return {f"loss/{name}": loss / targets for name, loss, targets in pairs if targets}

    def _sum_of_logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = self.logits(model, batch)
        return F.cross_entropy(logits.float().flatten(0, 1), self.targets(batch), ignore_index=IGNORED, reduction="sum")

    def segment_log_probabilities(
        self, model: nn.Module, batch: Batch, num_segments: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each document of `batch["segments"]`; see `sequence_log_probabilities`."""
        targets, owners = predictions_of(batch)
        assert owners is not None, "preferences have segments"
        if isinstance(self.head_loss, HeadLoss):
            with rows_of(batch):
                losses = self.head_loss.by_token(model, self.inputs(batch), targets.flatten(), batch.get("counted"))
            sums, counts = summed_by_document(-losses, owners.flatten(), num_segments)
        else:
            sums, counts = log_probabilities_by_document(self.logits(model, batch), targets, owners, num_segments)
        if "whole_positions" in batch:  # a document may lie in the parts of several ranks
            return summed_over_group(sums), summed_over_group(counts)
        return sums, counts

    @torch.no_grad()
    def check_head_loss(self, model: nn.Module, device: torch.device, in_16_bits: bool) -> str:
        """Tries the loss on a few tokens, and goes by whole logits where these give another. Every rank calls this.

        Returns:
            How the loss is made, to be told.
        """
        if isinstance(self.head_loss, HeadLoss):
            was_training = model.training
            # Without dropout, which would draw another mask for each of the two.
            model.eval()
            batch = self.few_tokens(self.head_loss.vocabulary, device)
            found, whole = self.loss_sum(model, batch).item(), self._sum_of_logits(model, batch).item()
            model.train(was_training)
            # `not <=`, so that a NaN from the head's inputs is a difference too.
            if math.isfinite(whole) and not abs(found - whole) <= HEAD_LOSS_TOLERANCE[in_16_bits] * abs(whole):
                self.head_loss = f"on a few tokens the head's inputs give {found:.6g}, and whole logits {whole:.6g}"
        if isinstance(self.head_loss, str):
            return f"from whole logits: {self.head_loss}"
        return f"from the head's inputs, logits of {self.head_loss.chunk_tokens:,} tokens at a time"

    def uniform_guess(self, model: nn.Module, class_weights: object) -> tuple[int, str] | None:
        return int(base_of(model).config.get_text_config().vocab_size), "tokens"

    def few_tokens(self, vocabulary: int, device: torch.device) -> Batch:
        ids = torch.arange(1, 17, device=device)[None] % vocabulary
        return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(16, device=device)[None]}

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        counted = (self.targets(batch) != IGNORED).sum().double()
        if "sources" not in batch:
            return torch.stack([self.loss_sum(model, batch).double(), counted])
        losses = self._losses_of_tokens(model, batch)
        return torch.cat([torch.stack([losses.double().sum(), counted]), self._by_source(losses, batch).flatten()])

    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        loss = sums[0] / max(1.0, sums[1])
        # From 710 on exp overflows float64, which Python makes an error.
        perplexity = math.exp(loss) if loss < 700 else math.inf
        by_source = self._losses_by_source(sums[2:]) if len(sums) > 2 else {}
        return {"loss": loss, "target_tokens": int(sums[1]), "perplexity": perplexity, **by_source}


def bounds_of(positions: torch.Tensor) -> dict[str, Any]:
    """Where each document begins and the last one ends, flash attention's cu_seq_lens, and the longest one's tokens.

    Args:
        positions: (B, T), 0 where a document begins.
    """
    begins = (positions.flatten() == 0).nonzero().flatten()
    bounds = F.pad(begins, (0, 1), value=positions.numel()).int()
    return {"bounds": bounds, "longest": int(bounds.diff().max())}


def rows_of(batch: Batch) -> ExitStack:
    """What `on_host` has found, and whole rows where a group of ranks shares them."""
    stack = ExitStack()
    if "shared" in batch:  # the device is asked where `on_host` was not called
        stack.enter_context(known_packing(bool(batch["shared"])))
    if "whole_positions" in batch:
        whole = batch["whole_positions"]
        stack.enter_context(rows_shared(WholeRows(whole, whole.shape[1] // batch["input_ids"].shape[1])))
    return stack


def _takes_anything(model: nn.Module) -> bool:
    """Whether the model's forward hands unknown arguments on, as transformers' do to their attention."""
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
