"""Training steps on a GPU that is not there: tensors lie where they have to, and host and device meet once a step."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import alone, run_on_ranks
from tiny import llama

OFFLOADS = ("cpu_torch", "device_stream")
RUNS = ("zero1", "zero2", "zero3", "hybrid", "padded", "classification", "preferences", "lora", *OFFLOADS)
WRONG = {
    "a host tensor in the forward": "FakeTensorDeviceMismatchError",
    "a batch that is left on the host": "FakeTensorDeviceMismatchError",
    "a value that is read in the forward": "DataDependentOutputException",
    "a size that is read in the forward": "DynamicOutputShapeException",
    "a host tensor over the devices' network": "WrongDeviceError",
    "a device tensor over the hosts' network": "WrongDeviceError",
}


class Zeros:
    """Weights as if they were read from files: on the host."""

    def read(self, name: str, tensor: torch.Tensor, rows: slice) -> torch.Tensor:
        return torch.zeros((rows.stop - rows.start, *tensor.shape[1:]), dtype=tensor.dtype)


def make_model(device: torch.device, kind: str) -> Any:
    from accelerate import init_empty_weights
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForSequenceClassification

    from toolkit.model.weights import materialize

    with init_empty_weights(include_buffers=False):
        model: Any = llama("sdpa", pad_token_id=0)
        if kind == "classification":
            model = LlamaForSequenceClassification(model.config)
        if kind == "lora":
            model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
    for module in model.modules():
        # FSDP2 moves them by `.data`, which a fake tensor cannot take the place of a real one in.
        module._buffers.update({name: buffer.to(device) for name, buffer in module._buffers.items()})
    weights: Any = Zeros()
    model.materialize_weights = lambda keep=None: materialize(model, weights, keep)
    return model


def make_window(kind: str) -> list[dict[str, torch.Tensor]]:
    ids = torch.arange(32).view(2, 16) % 100 + 1
    if kind == "classification":
        return [{"input_ids": ids, "labels": torch.tensor([0, 1]), "attention_mask": torch.ones_like(ids)}] * 2
    more = {"attention_mask": torch.ones_like(ids)} if kind == "padded" else {}
    if kind == "preferences":
        segments = torch.arange(2).repeat_interleave(8) + 2 * torch.arange(2)[:, None]
        more = {"segments": segments, "reference": torch.zeros(2, 2)}
    return [{"input_ids": ids, "labels": ids, "position_ids": torch.arange(16).expand(2, 16).contiguous(), **more}] * 2


def make_trainer(kind: str) -> Any:
    from accelerate import Accelerator
    from torch.optim.lr_scheduler import LambdaLR

    from toolkit.objectives.causal_lm import CausalLM
    from toolkit.objectives.classification import SequenceClassification
    from toolkit.objectives.preference import Preference
    from toolkit.objectives.preference_losses import LOSSES
    from toolkit.recipe.schema import TrainingSection
    from toolkit.sharding import OffloadSettings, sharding_kwargs
    from toolkit.sharding.launched import accumulation_plugin
    from toolkit.training.trainer import Trainer

    strategy = kind if kind in ("zero1", "zero2", "hybrid") else "zero3"
    more: dict[str, Any] = {"shard_size": 2, "replicate_size": 2} if strategy == "hybrid" else {}
    if kind in OFFLOADS:
        more = {"offload": OffloadSettings(executor=kind)}  # type: ignore[arg-type]
    accelerator = Accelerator(
        mixed_precision="bf16",
        gradient_accumulation_plugin=accumulation_plugin(2),
        **sharding_kwargs(strategy, **more),  # type: ignore[arg-type]
    )
    model = make_model(accelerator.device, kind)
    objective: Any = CausalLM(model)
    if kind == "classification":
        objective = SequenceClassification(model, 2, [1.0, 2.0])
    elif kind == "preferences":
        objective = Preference(model, LOSSES["dpo"], {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    settings = TrainingSection(output_dir="unused", max_steps=1, max_grad_norm=1.0)
    unused: Any = None
    schedule = LambdaLR(optimizer.optimizer, lambda step: 1.0)
    return Trainer(accelerator, model, optimizer, schedule, objective, settings, unused, unused)


def train(kind: str) -> dict[str, Any]:
    """Two steps, an evaluation, a copy of the state for a checkpoint, and the tensors of an export."""
    from devices.fake_gpu import simulated

    from toolkit.checkpoint import state
    from toolkit.checkpoint.export import whole_tensors
    from toolkit.sharding.shards import local_tensor, state_once

    with simulated(4) as seen:
        trainer = make_trainer(kind)
        window = trainer._upcoming = make_window(kind)
        trainer.train_step(window)
        before = len(seen.meetings)
        trainer.train_step(window)
        met = seen.meetings[before:]
        records: list[Any] = []
        trainer.metrics = mock.Mock(evaluation=records.append)
        trainer.evaluation = lambda: window
        trainer.evaluate()
        model, optimizer = trainer.accelerator.unwrap_model(trainer.model), trainer.optimizer.optimizer
        # Fake tensors are of a class of their own, which the toolkit takes for quantised ones.
        with mock.patch.object(state, "is_quantised", return_value=False):
            saved = state.host_copy(state.named_tensors(model, optimizer))
        exported = dict(whole_tensors(state_once(model)))
        return {
            "met": met,
            "parameters": {parameter.device.type for parameter in model.parameters()},
            "saved": {local_tensor(tensor).device.type for tensor in saved.values()},
            "exported": {tensor.device.type for tensor in exported.values()},
            "shapes": [tensor.shape for tensor in exported.values()] == [p.shape for p in model.parameters()],
            "evaluated": len(records),
        }


def go_wrong(what: str) -> str:
    import torch.distributed as dist
    from devices.fake_gpu import simulated

    from toolkit import ranks

    with simulated(4):
        trainer = make_trainer("zero3")
        device = trainer.accelerator.device

        def in_forward(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            if "host tensor" in what:
                return output + torch.ones(output.shape[-1])
            return output * (output.sum().item() if "value" in what else len(output.flatten().nonzero()))

        try:
            if "host tensor over" in what:
                dist.all_reduce(torch.ones(1))
            elif "hosts' network" in what:
                dist.all_reduce(torch.ones(1, device=device), group=ranks.host_group())
            elif "batch" in what:
                with mock.patch("toolkit.training.trainer.send_to_device", lambda batch, device, **_: batch):
                    trainer.train_step(make_window("zero3"))
            else:
                trainer.model.model.layers[0].mlp.register_forward_hook(in_forward)
                trainer.train_step(make_window("zero3"))
        except Exception as error:
            # torch 2.11 has no class of its own for it.
            mismatch = "Unhandled FakeTensor Device Propagation" in str(error)
            return "FakeTensorDeviceMismatchError" if mismatch else type(error).__name__
    return "nothing"


@alone
def run_all() -> tuple[dict[str, Any], dict[str, str]]:
    from devices.fake_gpu import install

    install()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    return {kind: train(kind) for kind in RUNS}, {what: go_wrong(what) for what in WRONG}


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, Any], dict[str, str]]:
    return run_on_ranks(run_all, 1)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", RUNS)
def test_tensors_lie_where_they_have_to(found: tuple[dict[str, Any], dict[str, str]], kind: str) -> None:
    run = found[0][kind]
    assert run["parameters"] == {"gpu"}
    assert run["saved"] == {"cpu"}
    assert run["exported"] == {"gpu"}
    assert run["shapes"]
    assert run["evaluated"] == 1


@pytest.mark.parametrize("kind", RUNS)
def test_host_and_device_meet_once_a_step(found: tuple[dict[str, Any], dict[str, str]], kind: str) -> None:
    met = found[0][kind]["met"]
    assert [shape[0] for shape in met] == [4], "a row of each rank"


@pytest.mark.parametrize("what", WRONG)
def test_what_a_gpu_would_refuse_is_refused(found: tuple[dict[str, Any], dict[str, str]], what: str) -> None:
    assert found[1][what] == WRONG[what]
