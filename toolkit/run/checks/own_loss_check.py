"""The check before the first step that a loss of the user's is a sum: of the parts of a batch it gives the same."""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn

from toolkit import ranks
from toolkit.data.samples.samples import Samples
from toolkit.errors import BadInputError
from toolkit.model.structure.without_dropout import without_dropout
from toolkit.objectives.objective import Objective
from toolkit.objectives.own_loss import FIELD, OF_ROWS, OwnLoss, of_rows
from toolkit.run.stages.part import RunPart
from toolkit.run.stages.stages import BuiltRun

TOLERANCE = 1e-4
"""Allowed difference of a sum from that of its two parts, as a share of it; float32's rounding is a hundredth of it."""


class HeadLossPart(RunPart):
    """What computes the losses, and whether a loss of the user's is a sum."""

    def check(self, run: BuiltRun) -> None:
        training, device = self.recipe.training, self.opened.device
        fact = run.objective.check_head_loss(run.model, device, self.opened.in_16_bits) or ""
        own = check_own_loss(run.model, run.objective, run.data.train, training.micro_batch_size, device)
        self.facts["loss"] = fact if own is None else f"{self.recipe.objective.loss}, {own}; {fact}"


def check_own_loss(
    model: nn.Module, objective: Objective, samples: Samples, micro_batch_size: int, device: torch.device
) -> str | None:
    """Tries the user's loss on the first rows. Every rank calls this, on the same samples.

    Returns:
        What divides the sum, for the run summary; None without a loss of the user's.

    Raises:
        BadInputError: on every rank, if the loss fails, is not finite or has no gradient, or if its sum, its count or
            its gradient differ from those of two parts.
    """
    if not isinstance(objective, OwnLoss):
        return None
    with without_dropout(model), torch.no_grad():
        batch = samples.batch(range(min(max(2, micro_batch_size), len(samples))))
        found = objective.arguments(model, send_to_device(objective.on_host(batch), device))
    random: list[str] = []
    ranks.on_every_rank(lambda: random.append(_check(objective, found)), f"try {FIELD}")
    how = f"the {objective.unit} of a step"
    if objective.needs_whole_steps:
        how = "its own count, for which each micro-batch has a forward more"
    return f"divided by {how}{random[0]}"


def _check(objective: OwnLoss, found: dict[str, Any]) -> str:
    """Returns what the summary says apart from what divides the sum."""
    (whole, count, gradient), (again, *_) = _tried(objective, found), _tried(objective, found)
    objective.settle(count)
    if again != whole:
        return "; it draws random numbers, so it is not compared with its parts"
    per_row = any(name in objective.takes for name in OF_ROWS)
    # A row stays whole where the loss may be one of rows.
    place = found["rows"] if per_row else torch.arange(len(found["labels"]), device=found["labels"].device)
    half = (int(place[-1]) + 1) // 2 if len(place) else 0
    parts = [place < half, place >= half]
    if not all(part.any() for part in parts):
        return ""
    tried = [_tried(objective, _part_of(found, part)) for part in parts]
    total, of_both = sum(each[0] for each in tried), sum(float(each[1]) for each in tried)
    told = f"{FIELD}: {whole:.6g} for all targets of the first batch at once, and {total:.6g} in two parts"
    scale = max(abs(whole), *(abs(each[0]) for each in tried))
    if not math.isclose(whole, total, rel_tol=TOLERANCE, abs_tol=TOLERANCE * scale):
        raise BadInputError(
            f"{told}: the loss would depend on how a step is split into micro-batches and ranks; return the sum over "
            "the targets, not their mean, and let no row depend on others"
        )
    if not math.isclose(float(count), of_both, rel_tol=TOLERANCE):
        raise BadInputError(
            f"{FIELD}: the count is {float(count):.6g} for the first batch at once, and {of_both:.6g} in two parts; "
            "return a count that adds up, such as len(labels)"
        )
    parted = torch.cat([each[2] for each in tried])
    if not torch.allclose(gradient, parted, rtol=1e-3, atol=TOLERANCE * float(gradient.abs().max())):
        raise BadInputError(
            f"{FIELD}: the gradient of a target depends on what else is in its micro-batch; let no row depend on others"
        )
    return ""


def _tried(objective: OwnLoss, arguments: dict[str, Any]) -> tuple[float, int | torch.Tensor, torch.Tensor]:
    """Returns the sum, the count and the gradient by what the loss is of."""
    names: list[str] = [name for name in ("logits", "log_probabilities") if name in objective.takes]
    leaves = {name: arguments[name].detach().requires_grad_() for name in names}
    with torch.enable_grad():
        copies = {name: value.clone() for name, value in {**arguments, **leaves}.items() if hasattr(value, "clone")}
        total, count = objective.sum_and_count({**arguments, **copies})  # the function may change them in place
        where = f"the first batch, of {len(arguments['labels'])} targets"
        if not math.isfinite(total.item()) or not float(count) > 0 or not math.isfinite(float(count)):
            raise objective.wrong((total.item(), float(count)), where, "a finite sum, and a count above 0")
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    gradients = [each for each in found if each is not None]
    if not gradients or not all(bool(each.isfinite().all()) for each in gradients):
        raise BadInputError(f"{FIELD}: the gradient on {where} is missing or not finite; correct the function")
    return total.item(), count, torch.cat([each.view(len(each), -1) for each in gradients], dim=1)


def _part_of(found: dict[str, Any], part: torch.Tensor) -> dict[str, Any]:
    """Returns the arguments for some of the targets, whose rows are numbered anew."""
    chosen = {name: value[part] for name, value in found.items() if isinstance(value, torch.Tensor)}
    rows = torch.unique_consecutive(chosen["rows"], return_inverse=True)[1]
    return {**chosen, **of_rows(rows)}
