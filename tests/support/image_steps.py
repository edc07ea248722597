"""Steps of the trainer on rows with images, and the same steps as a plain loop on transformers' own model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import DistributedDataParallelKwargs
from torch.optim.lr_scheduler import LambdaLR

from support.backend import accelerated, close
from support.images_by_hand import Row, num_targets, random_rows, samples_of, seeing_model, summed_loss
from toolkit.data.samples.samples import Batch
from toolkit.model.attention.attention import settle_attention
from toolkit.model.structure.model_parts import LANGUAGE, PROJECTOR, VISION, freeze_untrained, may_leave_unused
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.losses.balance import Balance, build_balance
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import TrainingSection
from toolkit.sharding import Checkpointing, OffloadSettings, plan_units
from toolkit.sharding.apply import prepare_blocks
from toolkit.sharding.blocks.by_block import ByBlock
from toolkit.sharding.fsdp2.shards import whole_tensor
from toolkit.training.trainer import Trainer

LONGEST = 128
TAKEN = 1e-6
"""Less than this, taken from a weight of 1, is rounding."""

LANGUAGE_NAMES = ("language_model", "lm_head", "embed_tokens", "text_model")
PROJECTOR_NAMES = ("multi_modal_projector", "connector", "merger", "embed_vision")
NOTHING: Any = type("Told", (), {"warn": staticmethod(print)})()

Step = tuple[float, dict[str, torch.Tensor]]
"""The loss, and the gradients as the optimizer sees them."""

Mix = Sequence[Sequence[Sequence[Sequence[int]]]]
"""Images of each row: by rank, micro-batch, sample and row."""


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        text: changed fields of the language model's configuration.
        experts: ranks of a group that spreads its experts.
        coef: of the balance loss of its routers; `top_k` experts of a token.
    """

    kind: str
    packed: bool = True
    strategy: str = "zero3"
    parts: tuple[str, ...] = (LANGUAGE, PROJECTOR, VISION)
    checkpointed: bool = False
    by_block: bool = False
    offload: bool = False
    text: dict[str, Any] = field(default_factory=dict)
    experts: int = 1
    coef: float = 0.0
    top_k: int = 2

    def __str__(self) -> str:
        plain = Case(self.kind)
        told = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(plain, name)]
        return " ".join([self.kind, *told])


def rows_of(case: Case, mix: Mix) -> list[list[list[list[Row]]]]:
    """By rank, micro-batch and sample."""
    counts = [count for rank in mix for micro in rank for sample in micro for count in sample]
    rows = iter(random_rows(case.kind, counts, seed=len(counts)))
    return [[[[next(rows) for _ in sample] for sample in micro] for micro in rank] for rank in mix]


def batches_of(case: Case, mix: Mix, rank: int) -> list[Batch]:
    """The micro-batches of a rank."""
    mine = rows_of(case, mix)[rank]
    samples = samples_of(case.kind, [sample for micro in mine for sample in micro], case.packed, LONGEST)
    found, number = [], 0
    for micro in mine:
        found.append(samples.batch(range(number, number + len(micro))))
        number += len(micro)
    return found


class PlainLoop:
    """Row by row on transformers' model. What no row reaches has a gradient of 0 if an image would reach it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = seeing_model(case.kind, case.text).train()
        for name, parameter in self.model.named_parameters():
            # By names as read in transformers' files, not by the toolkit's rules.
            part = LANGUAGE if any(word in name for word in LANGUAGE_NAMES) else VISION
            part = PROJECTOR if any(word in name for word in PROJECTOR_NAMES) else part
            parameter.requires_grad_(part in case.parts)
        self.routed: dict[str, list[torch.Tensor]] = {}
        for name, module in self.model.named_modules():
            if case.coef and name.endswith("mlp.gate"):
                module.register_forward_hook(partial(self._look, name))

    def _look(self, name: str, router: Any, inputs: Any, _: Any) -> None:
        """The router's logits of a row, (tokens, experts)."""
        logits = F.linear(inputs[0].flatten(0, -2), router.weight)
        self.routed.setdefault(name, []).append(logits)

    def _balance(self) -> torch.Tensor:
        """The balance loss over all tokens of the step, as the Switch Transformer has it, averaged over layers."""
        found = []
        for logits in (torch.cat(of_rows) for of_rows in self.routed.values()):
            chosen = F.one_hot(logits.detach().topk(self.case.top_k).indices, logits.shape[1]).sum(dim=1).float()
            found.append(logits.shape[1] * (chosen.mean(dim=0) * logits.softmax(dim=1).mean(dim=0)).sum())
        return torch.stack(found).mean() if found else torch.zeros(())

    def step(self, mix: Mix) -> Step:
        kind = self.case.kind
        rows = [row for rank in rows_of(self.case, mix) for micro in rank for sample in micro for row in sample]
        self.model.zero_grad()
        (0.0 * summed_loss(self.model, kind, random_rows(kind, [1], seed=99)[0])).backward()
        self.routed.clear()
        loss = torch.stack([summed_loss(self.model, kind, row) for row in rows]).sum() / num_targets(rows)
        (loss + self.case.coef * self._balance()).backward()
        gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        return loss.item(), gradients


def sharded_steps(case: Case, mixes: Sequence[Mix]) -> list[Step]:
    """Steps of the trainer, each from the same weights; one with offload. Collective."""
    model = seeing_model(case.kind, case.text)
    model.config.architectures = [type(model).__name__]  # as a file has it
    freeze_untrained(model, case.parts)
    settle_attention(model, "auto", torch.device("cpu"), False, case.packed, False)
    checkpointing, sharded = Checkpointing(1) if case.checkpointed else None, case.strategy != "ddp"
    offload: Any = OffloadSettings("cpu_torch") if case.offload else "none"
    settings: dict[str, Any] = {"checkpointing": checkpointing, "offload": offload} if sharded else {}
    settings |= {"experts": case.experts} if case.experts > 1 else {}
    accelerator = accelerated(case.strategy, len(mixes[0][0]), **settings)
    if not sharded:
        prepare_blocks(model, plan_units(model), checkpointing, None)
        accelerator.ddp_handler = DistributedDataParallelKwargs(
            find_unused_parameters=may_leave_unused(model, case.parts)
        )
    objective = CausalLM(model, packed=case.packed)
    balance = build_balance(ObjectiveSection(router_aux_coef=case.coef), model) if case.coef else Balance([])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # With offload, which takes gradients away as they come, the first step takes g / (|g| + 1) from a weight.
    made = torch.optim.AdamW(trained, lr=float(case.offload), eps=1.0, weight_decay=0.0)
    prepared, optimizer = accelerator.prepare(model, made)
    inner, seen = accelerator.unwrap_model(prepared), {}

    def look(*_: Any) -> None:
        gradients = {name: parameter.grad for name, parameter in inner.named_parameters()}
        seen.update({name: whole_tensor(grad).clone() for name, grad in gradients.items() if grad is not None})

    optimizer.optimizer.register_step_pre_hook(look)
    trainer = Trainer(
        accelerator,
        prepared.train(),
        optimizer,
        LambdaLR(made, lambda step: 1.0),
        objective,
        TrainingSection(output_dir="unused", max_steps=1, max_grad_norm=None),
        NOTHING,
        by_block=ByBlock(inner, accelerator.state.fsdp_plugin.unit_plan) if case.by_block else None,
        balance=balance,
    )
    found: list[Step] = []
    for mix in mixes:
        seen.clear()
        loss = trainer.train_step(batches_of(case, mix, dist.get_rank())).loss
        if case.offload:
            accelerator.state.fsdp_plugin.engine.flush()
            seen |= _gradients_by_weights(case, inner)
        found.append((loss, dict(seen)))
    close(accelerator)
    return found


def _gradients_by_weights(case: Case, stepped: Any) -> dict[str, torch.Tensor]:
    """What the gradients were, from what the first step took from the weights."""
    before, found = seeing_model(case.kind, case.text), {}
    for name, parameter in stepped.named_parameters():
        taken = before.get_parameter(name).detach() - whole_tensor(parameter.detach())
        if taken.abs().max() > TAKEN:
            found[name] = taken / (1 - taken.abs())
    return found


@dataclass(frozen=True)
class Difference:
    """Of a step from the plain loop's.

    Attributes:
        loss: as a share of the loss.
        gradient: the largest of all parameters, as a share of its largest gradient if that is above 1.
        where: the parameter that has it.
        one_side: parameters with a gradient in one of them alone.
    """

    loss: float
    gradient: float
    where: str
    one_side: tuple[str, ...]


def compare(case: Case, found: Step, plain: Step) -> Difference:
    (loss, gradients), (plain_loss, plain_gradients) = found, plain
    if case.offload:
        plain_gradients = {name: g for name, g in plain_gradients.items() if g.abs().max() > TAKEN}
    off = {
        name: (gradients[name] - gradient).abs().max().item() / max(1.0, gradient.abs().max().item())
        for name, gradient in plain_gradients.items()
        if name in gradients
    }
    where = max(off, key=off.__getitem__)
    one_side = tuple(sorted(gradients.keys() ^ plain_gradients.keys()))
    return Difference(abs(loss - plain_loss) / abs(plain_loss), off[where], where, one_side)


def differences(work: Sequence[tuple[Case, Sequence[Mix]]]) -> list[list[Difference]]:
    """Of the steps of each case from the plain loop's, which rank 0 runs: for `run_on_ranks`."""
    torch.set_num_threads(1)
    found = []
    for case, mixes in work:
        try:
            steps = sharded_steps(case, mixes)
        except Exception as error:
            error.add_note(f"{case}: {mixes}")
            raise
        if int(os.environ["RANK"]) == 0:
            loop = PlainLoop(case)
            found.append([compare(case, step, loop.step(mix)) for step, mix in zip(steps, mixes, strict=True)])
    return found
