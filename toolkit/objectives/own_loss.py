"""A loss of the user's on the next tokens: a function of logits or log-probabilities that returns a sum and a count."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from toolkit import ranks
from toolkit.data.samples.samples import IGNORED, Batch
from toolkit.errors import BadInputError, OwnCodeError
from toolkit.model.structure.fake_tensors import has_values
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.objective import Ingredients, Objective, RunsWindows
from toolkit.user_function import UserFunction, calls, load_function, while_training

FIELD = "objective.loss"

ARGUMENTS = ("logits", "log_probabilities", "labels", "rows", "weights", "num_rows")
"""What a function may take, by name. For N targets of R rows, as float32 and int64:

    logits (N, V), log_probabilities (N,) of the labels, labels (N,), rows (N,) from 0 to R - 1,
    weights (N,), 1 / targets of the row, and num_rows, R.
"""

OF_ROWS = ("rows", "weights", "num_rows")
PLACES, ROWS, NUM_ROWS, SUMS = "own_places", "own_rows", "own_num_rows", "own_sums"
"""Keys of a batch: where its targets are, the row of each, how many rows, and what `window_sums` returned."""


class OwnLoss(CausalLM):
    """Minimises the sum of a function over the sum of its counts, over all micro-batches and ranks of a step.

    An int is the number of targets, or of rows if the function takes `num_rows`, which is known before the forward. A
    tensor may be any count. It is known after a forward, so that each micro-batch has one more.

    Args:
        function: the user's.

    Raises:
        BadInputError: if the function takes other arguments.
    """

    def __init__(self, model: nn.Module, packed: bool, function: UserFunction) -> None:
        super().__init__(model, packed)
        self._function = function
        self._counted: list[int] = []  # numbers of calls
        self.takes = arguments_of(function)
        self.unit = "rows" if "num_rows" in self.takes else "targets"
        if "logits" in self.takes:
            self.head_loss = f"{FIELD} takes logits"

    @classmethod
    def build(cls, of: Ingredients) -> Objective:
        assert of.section.loss is not None
        return cls(of.model, of.packed, load_function(of.section.loss, FIELD))

    def count_targets(self, batch: Batch) -> int:
        return super().count_targets(batch) if self.unit == "targets" else num_rows_of(self._places(batch)[1])

    def on_host(self, batch: Batch) -> dict[str, Any]:
        known = super().on_host(batch)
        if has_values(batch["input_ids"]):
            known[PLACES], known[ROWS] = self._places(batch)
            known[NUM_ROWS] = num_rows_of(known[ROWS])  # the host would have to wait for the device to read it
        return known

    def _places(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns where the N targets are in (B * T), and the row of each, from 0, both (N,)."""
        if PLACES in batch:
            return batch[PLACES], batch[ROWS]
        places = (self.targets(batch) != IGNORED).nonzero()[:, 0]
        documents = (batch["position_ids"] == 0).flatten().cumsum(0)[places]
        return places, torch.unique_consecutive(documents, return_inverse=True)[1]

    def arguments(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Returns all that the function takes, and the labels and rows; see `ARGUMENTS`."""
        places, rows = self._places(batch)
        rows = rows.clone()  # the function may change what it is given, and the batch's are read again
        found: dict[str, Any] = {"labels": self.targets(batch)[places], "rows": rows}
        if "logits" in self.takes:
            found["logits"] = self.logits(model, batch).flatten(0, 1)[places].float()
            if "log_probabilities" in self.takes:
                found["log_probabilities"] = -F.cross_entropy(found["logits"], found["labels"], reduction="none")
        else:
            found["log_probabilities"] = -self.losses_of_tokens(model, batch)[places]
        return {**found, **of_rows(rows, int(batch[NUM_ROWS]) if NUM_ROWS in batch else None)}

    def sum_and_count(self, arguments: dict[str, Any]) -> tuple[torch.Tensor, int | torch.Tensor]:
        """Calls the function, and checks what it returns as far as the host knows it.

        Returns:
            The sum, 0-dim, and the count: an int, or a 0-dim tensor.

        Raises:
            OwnCodeError: if the function fails, or returns something else.
        """
        labels, num_rows = arguments["labels"], arguments["num_rows"]
        if not len(labels):
            return self._without_function(arguments)
        where = f"{len(labels)} targets of {num_rows} rows"
        arguments = {**arguments, "labels": labels.clone()}  # the function may reshape its own, and ours are counted
        with while_training():
            found = self._function.call(where, **{name: arguments[name] for name in self.takes})
        if not isinstance(found, tuple) or len(found) != 2:
            raise self.wrong(found, where, "a sum and a count, as in return losses.sum(), len(labels)")
        total, count = found
        if not isinstance(total, torch.Tensor) or total.dim() or not total.is_floating_point():
            raise self.wrong(total, where, "as its sum a tensor without dimensions, as losses.sum() is")
        if torch.is_grad_enabled() and not total.requires_grad:
            raise self.wrong(total, where, "a sum with a graph to its arguments; leave out detach, item and no_grad")
        if isinstance(count, int) and not isinstance(count, bool):
            expected = num_rows if self.unit == "rows" else len(labels)
            if count != expected:
                needed = "as an int count len(labels), or num_rows if it takes that; another count is a tensor"
                raise self.wrong(count, where, needed)
            return total.clone(), count  # the function may keep its own, and change it later
        if isinstance(count, float):
            count = total.new_tensor(count)
        if not isinstance(count, torch.Tensor) or count.dim() or count.is_complex():
            raise self.wrong(count, where, "as its count len(labels), num_rows, or a tensor without dimensions")
        return total.clone(), count.detach().clone()

    def _without_function(self, arguments: dict[str, Any], by: float = 1.0) -> tuple[torch.Tensor, int | torch.Tensor]:
        """Returns a sum with a graph, so that this rank's backward gathers what the others gather, and a count."""
        total: torch.Tensor = arguments["logits" if "logits" in arguments else "log_probabilities"].sum() * by
        return total, total.detach() if self.needs_whole_steps else 0

    def _of_micro_batch(self, arguments: dict[str, Any]) -> tuple[torch.Tensor, int | torch.Tensor]:
        """Returns `sum_and_count`. If it fails on one of several ranks, both are NaN, and `failure` says why."""
        try:
            total, count = self.sum_and_count(arguments)
            if isinstance(count, int) != self.needs_whole_steps:
                return total, count
            raise self.wrong(count, "a micro-batch", "a count of the kind that it returned first: an int, or a tensor")
        except OwnCodeError as error:
            if ranks.world_size() == 1:
                raise
            self.failure = str(error)
            return self._without_function(arguments, math.nan)

    def _drawn_again(self, arguments: dict[str, Any]) -> tuple[torch.Tensor, int | torch.Tensor]:
        """Calls the function with the random numbers with which the micro-batch was counted, if it was."""
        if self._counted:
            calls[FIELD] = self._counted.pop(0)
        return self._of_micro_batch(arguments)

    def wrong(self, found: Any, where: str, needed: str) -> OwnCodeError:
        """Returns the error for a value that the function returned."""
        return OwnCodeError(str(self._function.wrong(found, where, needed)))

    def settle(self, count: int | torch.Tensor) -> None:
        """Decides by the first count whether a step's count is known before its forward."""
        self.needs_whole_steps = not isinstance(count, int)

    def loss_sum(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self.training_sums(model, batch)[0]

    def training_sums(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        if not has_values(batch["input_ids"]):
            # A plan does not run the user's code; cross-entropy holds full logits, too, or none.
            loss = CausalLM.loss_sum(self, model, batch)
            return loss, loss.new_zeros(0)
        arguments = self.arguments(model, batch)
        total, count = self._drawn_again(arguments)
        if not isinstance(count, int):
            of_step = batch["window"] if "window" in batch else torch.stack([count, _like(count, arguments)])
            total = total * (of_step[1] / of_step[0])  # the trainer divides by the targets
        return total.float(), total.new_zeros(0)

    @torch.no_grad()
    def window_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the count and the number of targets of a micro-batch, (2,)."""
        if SUMS in batch:
            return batch[SUMS]
        with without_dropout(model):
            arguments = self.arguments(model, batch)
        self._counted.append(calls[FIELD])
        count = torch.as_tensor(self._of_micro_batch(arguments)[1], device=batch["input_ids"].device).float()
        return torch.stack([count, _like(count, arguments)])

    def looked_at(self, model: nn.Module, batches: list[Batch], run: RunsWindows) -> list[Batch]:
        if not self.needs_whole_steps:
            return batches
        # For all micro-batches at once: dropout is switched off for the process, not for a thread.
        with without_dropout(model):
            found = run([functools.partial(self.window_sums, model, batch) for batch in batches])
        return [{**batch, SUMS: sums} for batch, sums in zip(batches, found, strict=True)]

    def evaluation_sums(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the sum and the count of the function, the summed cross-entropy and the targets, (4,), float64."""
        arguments = self.arguments(model, batch)
        # Before the function, which may change its arguments in place.
        if "logits" in arguments:
            crossed = F.cross_entropy(arguments["logits"], arguments["labels"], reduction="sum")
        else:
            crossed = -arguments["log_probabilities"].sum()
        total, count = self._drawn_again(arguments)
        values = (total, torch.as_tensor(count), crossed, torch.tensor(len(arguments["labels"])))
        return torch.stack([value.detach().to(total.device).double() for value in values])

    def evaluation_record(self, sums: list[float]) -> dict[str, Any]:
        total, count, crossed, targets = sums
        known = super().evaluation_record([crossed, targets])
        loss = total / count if count else math.nan
        return {**known, "loss": loss, "cross_entropy": known["loss"]}

    def uniform_guess(self, model: nn.Module, class_weights: object) -> tuple[int, str] | None:
        return None


def arguments_of(function: UserFunction) -> tuple[str, ...]:
    """Returns the names of `ARGUMENTS` that a function takes.

    Raises:
        BadInputError: if it takes others that have no default, or neither logits nor log-probabilities.
    """
    what = f"{FIELD}: {function.name}"
    needed = f"; write arguments of these names: {', '.join(ARGUMENTS)}"
    try:
        parameters = inspect.signature(function.function).parameters.values()
    except (TypeError, ValueError) as error:
        raise BadInputError(f"{what} does not say what it takes ({error}){needed}") from None
    for parameter in parameters:
        named = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if not named or (parameter.name not in ARGUMENTS and parameter.default is inspect.Parameter.empty):
            raise BadInputError(f"{what} takes {str(parameter)!r}{needed}, or give others a default")
    found = tuple(parameter.name for parameter in parameters if parameter.name in ARGUMENTS)
    if "logits" not in found and "log_probabilities" not in found:
        raise BadInputError(f"{what} takes neither logits nor log_probabilities, so it has no gradient{needed}")
    return found


def of_rows(rows: torch.Tensor, num_rows: int | None = None) -> dict[str, Any]:
    """Returns the arguments that follow from the rows of the targets, (N,)."""
    num_rows = num_rows_of(rows) if num_rows is None else num_rows
    weights = 1 / torch.bincount(rows, minlength=num_rows).float()
    return {"rows": rows, "weights": weights[rows], "num_rows": num_rows}


def num_rows_of(rows: torch.Tensor) -> int:
    return int(rows[-1]) + 1 if len(rows) else 0


def _like(count: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    """Returns the number of targets as the count is held."""
    return torch.full_like(count, len(arguments["labels"]))
