"""Experts that their ranks do not divide are sharded along their matrices' rows: nothing is padded, a step is exact."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from support.backend import accelerated
from support.moe import mixture
from support.moe_steps import Case, require_plain, sharded_step, steps_of
from support.ranks import run_on_ranks
from support.runs import finetuned
from support.tiny import recipe_values, save_llama, with_sections
from support.traffic import Traffic
from torch.distributed.tensor import distribute_tensor
from transformers import AutoTokenizer

from toolkit.checkpoint.export import gather_on_rank_zero
from toolkit.optim.build import build_optimizer
from toolkit.planning.traffic import traffic
from toolkit.planning.workload.unit_shapes import unit_shapes
from toolkit.recipe.schema import OptimizerSection
from toolkit.sharding import plan_units
from toolkit.sharding.fsdp2 import shards
from toolkit.sharding.fsdp2.fsdp import fsdp_groups
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

EXPERTS = {"mixtral": {"num_local_experts": 3}, "gpt_oss": {"num_local_experts": 3}, "qwen3_moe": {"num_experts": 3}}
"""Along experts a third of what 2 or 4 ranks hold, gather and reduce would be padding."""


def three(kind: str, *case: Any) -> Case:
    return Case(kind, *case, fields=tuple(EXPERTS[kind].items()))


CASES = [
    three("mixtral", "zero3", 1, True),
    three("gpt_oss", "zero2", 3),
    three("qwen3_moe", "zero1", 3, True),
    three("mixtral", "hybrid", 2),
    three("gpt_oss", "zero3", 2, True, True),
]


def prepared(strategy: str, model: Any, optimizer: torch.optim.Optimizer) -> Any:
    return accelerated(strategy).prepare(model, optimizer)[0]


def held() -> tuple[int, bool]:
    """Bytes that this rank holds of the parameters, padding included; whether rank 0 gathers them as they were."""
    plain = CASES[0].model()
    model = CASES[0].model()
    model = prepared("zero3", model, torch.optim.AdamW(model.parameters()))
    whole = [gather_on_rank_zero(parameter) for parameter in model.parameters()]
    same = all(a is None or torch.equal(a, b) for a, b in zip(whole, plain.parameters(), strict=True))
    records = [parameter for group in fsdp_groups(model) for parameter in group.fsdp_params]
    dims = {p.fsdp_placement.dim for p in records if p.sharded_param.ndim == 3}
    assert dims == {1}
    return sum(record._sharded_param_data.nbytes for record in records), same


def muon_steps() -> dict[str, torch.Tensor]:
    """Weights after three steps on given gradients."""
    section = OptimizerSection(kind="muon", learning_rate=1e-3, weight_decay=0.1)
    model = CASES[0].model()
    optimizer = build_optimizer(model, section)
    model = prepared("zero3", model, optimizer)
    for step in range(3):
        for name, parameter in model.named_parameters():
            parameter.grad = distribute_tensor(
                gradient_of(name, parameter, step), parameter.device_mesh, parameter.placements
            )
        optimizer.step()
    return {
        name: parameter.full_tensor().detach() for name, parameter in model.named_parameters() if ".layers." in name
    }


def gradient_of(name: str, parameter: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name) * 10 + step)
    return torch.randn(parameter.shape, generator=generator)


def first_job() -> Any:
    with Traffic() as found:
        first = sharded_step(CASES[0])
    steps = [first, *steps_of(CASES[1:])]
    del os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"]
    return steps, dict(found.bytes), held(), muon_steps()


def test_a_step_is_that_of_a_plain_loop_and_each_rank_holds_and_sends_its_share() -> None:
    results = run_on_ranks(first_job, 4)
    steps, sent, (_, same), stepped = results[0]
    for case, found in zip(CASES, steps, strict=True):
        require_plain(case, found, 4)
    assert same
    model = mixture("mixtral", **EXPERTS["mixtral"])
    # The vocabulary of 67 and the router's 3 rows are padded.
    padded = sum(p.numel() if p.ndim == 3 else p.numel() // len(p) * -(-len(p) // 4) * 4 for p in model.parameters())
    assert {result[2][0] for result in results} == {padded}  # 4 bytes each, on each of 4 ranks
    planned = traffic(
        unit_shapes(model, plan_units(model), "no"), STRATEGIES["zero3"], MeshShape(1, 4), compute_bytes=None
    )
    assert sent["reduce_scatter"] == planned.whole["reduce_scatter"] == 4 * padded
    assert sent["send"] == planned.all_gather + planned.reduce_scatter
    compare_muon(model, stepped)


def compare_muon(model: Any, found: dict[str, torch.Tensor]) -> None:
    """Holds weights against those of torch.optim.Muon on each expert's matrices."""
    for name, parameter in model.named_parameters():
        if parameter.ndim != 3:
            continue
        matrices = [torch.nn.Parameter(matrix.detach().clone()) for matrix in parameter]
        plain = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        for step in range(3):
            for matrix, gradient in zip(matrices, gradient_of(name, parameter, step), strict=True):
                matrix.grad = gradient
            plain.step()
        torch.testing.assert_close(found[name], torch.stack(matrices).detach(), rtol=0, atol=1e-6, msg=name)
        assert float((found[name] - parameter).abs().max()) > 5e-4, "it must have moved"


WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "zero3": {},
    "offload": {"sharding": {"offload": "optimizer", "offload_executor": "cpu_torch"}},
}


def losses_of(folder: Path, data: Path, name: str, changes: dict[str, dict[str, Any]]) -> list[float]:
    values = recipe_values(folder / "model", data, folder / name, folder / "cache", max_steps=5, max_grad_norm=None)
    values["sharding"] = {"strategy": "zero3"}
    values["checkpoint"] = {"every_steps": 3}
    records = finetuned(with_sections(values, changes)).metrics
    return [record["loss"] for record in records]


def runs(folder: Path, data: Path, ways: list[str]) -> dict[str, list[float]]:
    """Losses of runs; of one with padded stacks, and of one that goes on from its checkpoint without."""
    found = {way: losses_of(folder, data, way, WAYS[way]) for way in ways}
    with patch.object(shards, "MAX_PADDING", float("inf")):
        found["padded"] = losses_of(folder, data, "padded", {})
    first = str(folder / "padded" / "checkpoints" / "step_00000003")
    return found | {"resumed": losses_of(folder, data, "resumed", {"checkpoint": {"resume": first}})}


def resumed(folder: Path, data: Path) -> list[float]:
    first = str(folder / "zero3" / "checkpoints" / "step_00000003")
    more = {"checkpoint": {"resume": first}, "training": {"gradient_accumulation_steps": 2}}
    return losses_of(folder, data, "on two", more)


@pytest.fixture
def folder(tmp_path: Path, text_file: Path) -> Path:
    """Has a GPT-OSS in `model`, whose files hold its experts stacked."""
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    model = save_llama(tmp_path / "model", texts, tied=True)  # for its tokenizer
    size = len(AutoTokenizer.from_pretrained(model))
    mixture("gpt_oss", vocab_size=size, **EXPERTS["gpt_oss"]).save_pretrained(model)
    return tmp_path


def compare_runs(folder: Path, found: dict[str, list[float]]) -> None:
    """Holds losses and exports against those of the run that FSDP2 pads, to the last bit."""
    padded = load_file(folder / "padded" / "export" / "model.safetensors")
    for way, losses in found.items():
        assert losses == found["padded"][-len(losses) :], way
        tensors = load_file(folder / way / "export" / "model.safetensors")
        assert all(torch.equal(tensors[name], padded[name]) for name in padded), way
    assert not (folder / "resumed" / "checkpoints" / "step_00000003").exists(), "it began behind it"


def test_a_run_is_the_padded_one_with_offload_and_from_its_checkpoint(folder: Path, text_file: Path) -> None:
    compare_runs(folder, run_on_ranks(runs, 2, folder, text_file, ["offload"])[0])


@pytest.mark.grid
def test_a_run_is_the_padded_one_on_more_ranks_and_goes_on_on_fewer(folder: Path, text_file: Path) -> None:
    found = run_on_ranks(runs, 4, folder, text_file, list(WAYS))[0]
    compare_runs(folder, found)
    assert run_on_ranks(resumed, 2, folder, text_file)[0] == pytest.approx(found["padded"], rel=1e-6)
