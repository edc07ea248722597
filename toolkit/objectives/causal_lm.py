"""Next-token cross-entropy."""

from __future__ import annotations

import inspect
import math
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.data.samples.samples import IGNORED, Batch
from toolkit.data.samples.sequence_parts import predictions_of
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import base_of
from toolkit.model.attention.attention import is_flash, kernels_take_documents, known_packing
from toolkit.model.attention.image_inputs import Sight
from toolkit.model.attention.positions import first_position, takes_positions
from toolkit.model.structure.fake_tensors import has_values
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.objectives.losses.find_head import find_head_loss
from toolkit.objectives.losses.fused_linear_cross_entropy import HeadLoss, numbers_of_targets
from toolkit.objectives.losses.preference_losses import log_probabilities_by_document, summed_by_document
from toolkit.objectives.objective import Ingredients, Objective
from toolkit.sharding.fsdp2.fsdp import class_name
from toolkit.sharding.parallel.sequence_parallel import WholeRows, rows_shared, summed_over_group

HEAD_LOSS_TOLERANCE = {False: 1e-5, True: 1e-2}
"""The largest relative difference from the loss of full logits, by whether compute is in 16 bits."""


class CausalLM(Objective):
    """Next-token cross-entropy. `labels` are aligned with `input_ids`, as transformers has them.

    Its losses come from the head's inputs, without full logits, if the model allows for that.

    Args:
        packed: whether documents share samples.
        sources: names of the sources whose losses are reported separately; a batch's `sources` (B, T) number them.

    Attributes:
        head_loss: computes the losses from the head's inputs; if full logits are needed, this is the reason.

    Raises:
        BadInputError: if samples are packed and the model takes no position_ids.
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
        # These kernels separate documents in a single row only; in several rows documents would see each other.
        self._in_one_row = self._has_states or (packed and is_flash(model))
        self._takes_bounds = self._in_one_row and _accepts_any_keyword(base_of(model))
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
        """Adds to the batch what the host would otherwise have to fetch from the device.

        This is which tokens have targets (`counted`), whether documents share rows (`shared`) and, for flash attention,
        where documents begin (`bounds`) and how long the longest is (`longest`). transformers reads these in every
        layer.
        """
        if not has_values(batch["input_ids"]):
            return batch
        known: dict[str, Any] = {**batch, **self._sight.on_host(batch)}
        if isinstance(self.head_loss, HeadLoss):
            known["counted"] = numbers_of_targets(self.targets(batch))
        positions = batch.get("whole_positions", batch["position_ids"])
        known["shared"] = self._packed and bool((self._in_model_shape(positions).diff(dim=1) != 1).any())
        if self._takes_bounds:
            known |= bounds_of(positions)
        return known

    def logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns logits (B, T, V)."""
        with rows_of(batch):
            logits = model(**self.inputs(batch)).logits
        return logits.view(*batch["input_ids"].shape, logits.shape[-1])  # type: ignore[no-any-return]

    def predictions(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        targets = self.targets(batch)
        places = (targets != IGNORED).nonzero()[:, 0]
        return self.logits(model, batch).flatten(0, 1)[places].float(), targets[places]

    def _in_model_shape(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor (B, T) as the model takes it: (1, B * T) if the kernels need a single row."""
        return tensor.view(1, -1) if self._in_one_row else tensor

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Returns the arguments of the model's forward; `input_ids` are (B, T), or (1, B * T) in a single row."""
        # No attention mask and no cache: only then do restarting positions keep documents apart. Rows of one document
        # use the model's own positions, in which transformers then looks for no other documents. Parts of rows begin
        # at any position.
        told = self._packed or "whole_positions" in batch
        names = ("input_ids", "position_ids") if told else ("input_ids",)
        inputs: dict[str, Any] = {name: self._in_model_shape(batch[name]) for name in names if name in batch}
        if "position_ids" in inputs and self._first_position:
            inputs["position_ids"] = inputs["position_ids"] + self._first_position
        if "position_ids" in inputs:
            inputs["position_ids"] = self._sight.positions(inputs["position_ids"])
        if self._has_states and "position_ids" in batch and "bounds" not in batch and has_values(batch["input_ids"]):
            batch = {**batch, **bounds_of(batch["position_ids"])}  # flash attention finds the bounds itself
        if "bounds" in batch and self._takes_bounds:  # a teacher may not take them although its student does
            inputs |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), batch["bounds"])
            inputs |= dict.fromkeys(("max_length_q", "max_length_k"), batch["longest"])
            if self._has_states:
                inputs["seq_idx"] = (self._in_model_shape(batch["position_ids"]) == 0).cumsum(dim=1).int() - 1
        return {**inputs, **self._sight.inputs(batch, self._in_one_row), "use_cache": False}

    def targets(self, batch: Batch) -> torch.Tensor:
        """Returns what each position predicts, (B * T,), int64.

        It is `IGNORED` at positions without a target, such as the last one of a document.
        """
        return predictions_of(batch)[0].flatten()

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if isinstance(self.head_loss, HeadLoss):
            with rows_of(batch):
                return self.head_loss.summed(model, self.inputs(batch), self.targets(batch), batch.get("counted"))
        return self._loss_of_whole_logits(model, batch)

    def training_sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the summed loss, 0-dim, and the sums of losses and then the numbers of targets by source, (2 S,)."""
        if "sources" not in batch:
            loss = self.loss_sum(model, batch)
            return loss, loss.new_zeros(2 * len(self._sources))
        losses = self.losses_of_tokens(model, batch)
        return losses.sum(), self._sums_by_source(losses.detach(), batch).flatten().float()

    def losses_of_tokens(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the loss of each token, (B * T,), float32; it is 0 without a target."""
        if isinstance(self.head_loss, HeadLoss):
            with rows_of(batch):
                return self.head_loss.by_token(model, self.inputs(batch), self.targets(batch), batch.get("counted"))
        logits = self.logits(model, batch).float().flatten(0, 1)
        return F.cross_entropy(logits, self.targets(batch), ignore_index=IGNORED, reduction="none")

    def _sums_by_source(self, losses: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the summed losses and the numbers of targets of each named source, (2, S), float64."""
        # The last column takes tokens of no named source.
        owners = batch["sources"].flatten().remainder(len(self._sources) + 1)
        terms = torch.stack([losses.double(), (self.targets(batch) != IGNORED).double()])
        return terms.new_zeros(2, len(self._sources) + 1).index_add(1, owners, terms)[:, :-1]

    def training_record(self, means: list[float]) -> dict[str, Any]:
        return self._losses_by_source(means)

    def _losses_by_source(self, sums: list[float]) -> dict[str, float]:
        """Returns the mean loss of each source that has targets.

        Args:
            sums: the rows of `_sums_by_source`, one after the other; both may be divided by the same number.
        """
        number = len(self._sources)
        pairs = zip(self._sources, sums[:number], sums[number:], strict=True)
        return {f"loss/{name}": loss / targets for name, loss, targets in pairs if targets}

    def _loss_of_whole_logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = self.logits(model, batch)
        return F.cross_entropy(logits.float().flatten(0, 1), self.targets(batch), ignore_index=IGNORED, reduction="sum")

    def segment_log_probabilities(
        self, model: nn.Module, batch: Batch, num_segments: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the log-probabilities of each document of `batch["segments"]`, (S,), and its target tokens, (S,).

        S is `num_segments`; see `log_probabilities_by_document`.
        """
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
        """Tries the loss on a few tokens, and falls back to full logits if these differ. Every rank calls this.

        Returns:
            A description of how the loss is computed, for the run summary.
        """
        if isinstance(self.head_loss, HeadLoss):
            batch = self.few_tokens(self.head_loss.vocabulary, device)
            with without_dropout(model):
                found, whole = (
                    CausalLM.loss_sum(self, model, batch).item(),
                    self._loss_of_whole_logits(model, batch).item(),
                )
            # `not <=`, so that a NaN from the head's inputs is a difference too.
            if math.isfinite(whole) and not abs(found - whole) <= HEAD_LOSS_TOLERANCE[in_16_bits] * abs(whole):
                self.head_loss = f"on a few tokens the head's inputs give {found:.6g}, and full logits {whole:.6g}"
        if isinstance(self.head_loss, str):
            return f"from full logits: {self.head_loss}"
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
        losses = self.losses_of_tokens(model, batch)
        return torch.cat([torch.stack([losses.double().sum(), counted]), self._sums_by_source(losses, batch).flatten()])

    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        loss = sums[0] / max(1.0, sums[1])
        # From 710 on exp overflows float64, which Python makes an error.
        perplexity = math.exp(loss) if loss < 700 else math.inf
        by_source = self._losses_by_source(sums[2:]) if len(sums) > 2 else {}
        return {"loss": loss, "target_tokens": int(sums[1]), "perplexity": perplexity, **by_source}


def bounds_of(positions: torch.Tensor) -> dict[str, Any]:
    """Returns flash attention's cu_seq_lens and longest document.

    Args:
        positions: (B, T), 0 where a document begins.

    Returns:
        `bounds`, where each of the D documents begins and the last one ends, (D + 1,), int32; and `longest`, the tokens
        of the longest document.
    """
    begins = (positions.flatten() == 0).nonzero().flatten()
    bounds = F.pad(begins, (0, 1), value=positions.numel()).int()
    return {"bounds": bounds, "longest": int(bounds.diff().max())}


def rows_of(batch: Batch) -> ExitStack:
    """Returns a context with what `on_host` found, and with whole rows if a group of ranks shares them."""
    stack = ExitStack()
    if "shared" in batch:  # without `on_host` the value comes from the device
        stack.enter_context(known_packing(bool(batch["shared"])))
    if "whole_positions" in batch:
        whole = batch["whole_positions"]
        stack.enter_context(rows_shared(WholeRows(whole, whole.shape[1] // batch["input_ids"].shape[1])))
    return stack


def _accepts_any_keyword(model: nn.Module) -> bool:
    """Returns whether the model's forward takes any keyword, which transformers' models hand on to their attention."""
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
