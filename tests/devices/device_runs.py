"""Runs of a trainer on a GPU that is not there: a tiny model, an objective and a batch for each way to train."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator, init_empty_weights
from devices.fake_gpu import simulated
from peft import LoraConfig, get_peft_model
from support.moe import mixture
from support.tiny import llama
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from toolkit.checkpoint import state
from toolkit.checkpoint.export import whole_tensors
from toolkit.data.samples.sequence_parts import KL_PREFIX, Part
from toolkit.model.attention.attention import attend_by_heads
from toolkit.model.weights.weights import materialize
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.classification import SequenceClassification
from toolkit.objectives.distillation import Distillation
from toolkit.objectives.kto import Kto
from toolkit.objectives.losses.balance import Balance, build_balance
from toolkit.objectives.losses.divergence import Divergence
from toolkit.objectives.losses.preference_losses import LOSSES
from toolkit.objectives.preference import Preference
from toolkit.objectives.reward import Reward
from toolkit.objectives.seq2seq import Seq2Seq
from toolkit.objectives.tagging import TokenClassification
from toolkit.objectives.teacher import shard_teacher
from toolkit.optim.build import build_optimizer
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import OptimizerSection, TrainingSection
from toolkit.run.parts.experts import ExpertLoads
from toolkit.run.parts.figures import Records
from toolkit.sharding import Checkpointing, OffloadSettings, sharding_kwargs
from toolkit.sharding.blocks.by_block import ByBlock
from toolkit.sharding.fsdp2.shards import local_tensor, state_once
from toolkit.sharding.launched import accumulation_plugin
from toolkit.sharding.parallel.sequence_parallel import form_groups
from toolkit.sharding.plan.strategy import STRATEGIES
from toolkit.training.trainer import Trainer

NUM_RANKS = 4
IDS = torch.arange(32).view(2, 16) % 60 + 1
"""Two rows of 16 tokens."""

Batch = dict[str, torch.Tensor]


class Zeros:
    """Weights as if they were read from files: on the host."""

    def read(self, name: str, tensor: torch.Tensor, rows: tuple[slice, ...]) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)[rows]


@dataclass(frozen=True)
class Run:
    """How a run differs from one of a Llama under zero3 with next-token prediction.

    Attributes:
        backend: arguments of `sharding_kwargs`.
        sequence: ranks that share a row.
        read: what the host reads in tensors of a shape, instead of ones.
    """

    strategy: str = "zero3"
    backend: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], Any] = lambda: _llama()
    objective: Callable[[Any, Any], Any] = lambda model, _: CausalLM(model)
    batch: Callable[[], Batch] = lambda: rows()
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)
    by_block: bool = False
    balance: dict[str, float] | None = None
    sequence: int = 1
    read: dict[tuple[int, ...], int] = field(default_factory=dict)


def rows(**more: torch.Tensor) -> Batch:
    return {"input_ids": IDS, "labels": IDS, "position_ids": torch.arange(16).expand(2, 16).contiguous(), **more}


def pairs() -> Batch:
    segments = torch.arange(2).repeat_interleave(8) + 2 * torch.arange(2)[:, None]
    return rows(segments=segments, reference=torch.zeros(2, 2), margin=torch.zeros(2))


def make_model(device: torch.device, build: Callable[[], Any]) -> Any:
    """On the meta device, with buffers on the device, as a run's model before it is sharded."""

    with init_empty_weights(include_buffers=False):
        model = build()
    for module in model.modules():
        # FSDP2 moves them by `.data`, which a fake tensor cannot take the place of a real one in.
        module._buffers.update({name: buffer.to(device) for name, buffer in module._buffers.items()})
    return model


def loader_of(model: Any) -> Any:
    """What gives the model its weights, as `LoadedModel.load_weights` does."""
    weights: Any = Zeros()
    return lambda keep=None: materialize(model, weights, keep)


def make_trainer(run: Run) -> Any:
    plugins: dict[str, Any] = sharding_kwargs(run.strategy, **run.backend)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_plugin=accumulation_plugin(2), **plugins)
    model = make_model(accelerator.device, run.model)
    plugins["fsdp_plugin"].load_weights = loader_of(model)
    form_groups(run.sequence)
    if run.sequence > 1:
        attend_by_heads(model)
    objective = run.objective(model, accelerator)
    balance = Balance([]) if run.balance is None else build_balance(ObjectiveSection(**run.balance), model)
    optimizer = run.optimizer(model)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    inner = accelerator.unwrap_model(prepared)
    settings = TrainingSection(output_dir="unused", max_steps=1, max_grad_norm=1.0)
    unused: Any = mock.Mock()
    return Trainer(
        accelerator,
        prepared,
        optimizer,
        LambdaLR(optimizer.optimizer, lambda step: 1.0),
        objective,
        settings,
        unused,
        by_block=ByBlock(inner, plugins["fsdp_plugin"].unit_plan) if run.by_block else None,
        balance=balance,
        extensions=[] if run.balance is None else [ExpertLoads(balance, unused)],
    )


def make_window(run: Run) -> list[Batch]:
    batch = run.batch()
    return [Part(0, run.sequence).of({**batch, "lengths": torch.tensor([16, 16])}) if run.sequence > 1 else batch] * 2


def train(run: Run) -> dict[str, Any]:
    """Two steps, an evaluation, a copy of the state for a checkpoint, and the tensors of an export."""

    with simulated(NUM_RANKS, run.read) as seen:
        trainer = make_trainer(run)
        window = trainer._upcoming = make_window(run)
        trainer.train_step(window)
        before = len(seen.meetings)
        trainer.train_step(window)
        met = seen.meetings[before:]
        records: list[Any] = []
        trainer.extensions = [*trainer.extensions, Records(mock.Mock(evaluation=records.append))]
        trainer.evaluation = lambda: window
        trainer.evaluate()
        model, optimizer = trainer.accelerator.unwrap_model(trainer.model), trainer.optimizer.optimizer
        # Fake tensors are of a class of their own, which the toolkit takes for quantised ones.
        with mock.patch.object(state, "is_quantised", return_value=False):
            saved = state.host_copy(state.named_tensors(model, optimizer))
        exported = dict(whole_tensors(state_once(model)))
        form_groups(1)
        return {
            "met": met,
            "parameters": {parameter.device.type for parameter in model.parameters()},
            "stepped": len({id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}),
            "trained": sum(p.requires_grad for p in model.parameters()),
            "saved": {local_tensor(tensor).device.type for tensor in saved.values()},
            "exported": {tensor.device.type for tensor in exported.values()},
            "shapes": all(exported[name].shape == p.shape for name, p in model.named_parameters()),
            "evaluated": len(records),
        }


def _llama(**fields: Any) -> Any:
    return llama("sdpa", pad_token_id=0, **{"num_hidden_layers": 1, **fields})


def _labelled(number: int) -> Any:
    return _llama(num_labels=number).config


def _adapted() -> Any:
    return get_peft_model(_llama(), LoraConfig(target_modules=["q_proj", "v_proj"]))


def _t5() -> Any:
    sizes = {"vocab_size": 131, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0))


# grouped_mm wants rows of a multiple of 16 bytes.
_qwen3_moe = functools.partial(mixture, "qwen3_moe", moe_intermediate_size=16, num_hidden_layers=1)
_deepseek_v3 = functools.partial(mixture, "deepseek_v3", moe_intermediate_size=16, num_hidden_layers=1)
_gpt_oss = functools.partial(mixture, "gpt_oss", intermediate_size=16, num_hidden_layers=1)


def _distillation(_model: Any, accelerator: Accelerator) -> Any:
    teacher = make_model(accelerator.device, lambda: _llama().bfloat16()).requires_grad_(False)
    shard_teacher(teacher, STRATEGIES["zero3"], accelerator.state.device_mesh, "bf16", None, loader_of(teacher))
    return Distillation(_model, False, teacher, Divergence("forward_kl", 0.5, 1.0, 0.5))


def _muon(model: Any) -> torch.optim.Optimizer:
    return build_optimizer(model, OptimizerSection(kind="muon", learning_rate=1e-3), None)


PADDED = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
BALANCE = {"router_aux_coef": 0.1}


def judged() -> Batch:
    names = ("input_ids", "labels", "position_ids", "segments")
    others = {f"{KL_PREFIX}{name}": tensor for name, tensor in pairs().items() if name in names}
    return {**pairs(), **others, "reference": torch.zeros(4, 2), "good": torch.tensor([True, False, True, False])}


RUNS = {
    "zero1": Run("zero1"),
    "zero2": Run("zero2"),
    "zero3": Run(model=lambda: _llama(num_hidden_layers=2)),
    "hybrid": Run("hybrid", {"shard_size": 2, "replicate_size": 2}),
    "shards of a node": Run(backend={"reshard_after_forward": 2}),
    "padded": Run(batch=lambda: rows(attention_mask=torch.ones_like(IDS))),
    "checkpointed": Run(backend={"checkpointing": Checkpointing(1)}),
    "by block": Run(by_block=True),
    "rows that ranks share": Run(sequence=2),
    "offload, cpu_torch": Run(backend={"offload": OffloadSettings(executor="cpu_torch")}),
    "offload, device_stream": Run(backend={"offload": OffloadSettings(executor="device_stream")}),
    "muon": Run(optimizer=_muon),
    "lora": Run(model=_adapted),
    "classification": Run(
        model=lambda: LlamaForSequenceClassification(_labelled(2)),
        objective=lambda model, _: SequenceClassification(model, 2, [1.0, 2.0]),
        batch=lambda: {**PADDED, "labels": torch.tensor([0, 1])},
    ),
    "tagging": Run(
        model=lambda: LlamaForTokenClassification(_labelled(3)),
        objective=lambda model, _: TokenClassification(model, ["O", "B-X", "I-X"]),
        batch=lambda: {**PADDED, "labels": IDS % 3},
    ),
    "preferences": Run(objective=lambda model, _: Preference(model, LOSSES["dpo"], {}), batch=pairs),
    "rewards": Run(
        model=lambda: LlamaForSequenceClassification(_labelled(1)),
        objective=lambda model, _: Reward(model),
        batch=pairs,
    ),
    "kto": Run(objective=lambda model, _: Kto(model), batch=judged),
    "seq2seq": Run(model=_t5, objective=lambda model, _: Seq2Seq(model), batch=lambda: {**PADDED, "labels": IDS}),
    "distillation": Run(objective=_distillation),
    "experts": Run(model=_qwen3_moe, balance=BALANCE),
    "experts, by block": Run(model=_gpt_oss, balance=BALANCE, by_block=True),
    "experts, biases": Run(model=_deepseek_v3, balance=BALANCE),
    "spread experts": Run(backend={"experts": 2}, model=_qwen3_moe, balance=BALANCE, read={(2, 2): 32}),
    "spread experts, one row": Run(backend={"experts": 4}, model=_gpt_oss, balance=BALANCE, read={(2, 4): 16}),
}
