"""Backward that gathers inside nodes: the run of zero3, to the last bit, whatever else is on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import meet, run_on_ranks
from support.texts import make_texts
from support.tiny import llama, recipe_values, save_llama
from torch.distributed.device_mesh import init_device_mesh

from toolkit.errors import BadInputError
from toolkit.recipe.recipe import Recipe
from toolkit.sharding import plan_units
from toolkit.sharding.apply import apply, groups_of
from toolkit.sharding.fsdp2.fsdp import fsdp_groups
from toolkit.sharding.plan.strategy import STRATEGIES

STEPS = 3
TEXTS = [" ".join(text.split()[:16]) for text in make_texts(40, seed=2)]
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "checkpointed, evaluated": {
        "training": {"mixed_precision": "bf16", "gradient_accumulation_steps": 2, "eval_every_steps": 1},
        "sharding": {"activation_checkpointing": 1},
    },
    "offload, prefetch": {"sharding": {"offload": "optimizer", "offload_executor": "cpu_torch", "prefetch": 2}},
    "lora": {"adapter": {"kind": "lora", "r": 2}, "training": {"mixed_precision": "bf16"}},
    "shared rows": {"sharding": {"sequence": 2}},
    "quantised": {"adapter": {"kind": "lora", "r": 2, "quantize": "nf4"}, "training": {"mixed_precision": "bf16"}},
}


def recipe(folder: Path, name: str, node: int | None, changes: dict[str, dict[str, Any]]) -> Recipe:
    data = folder / "rows.jsonl"
    values = recipe_values(folder / "model", data, folder / f"{name}-{node}", folder / "cache", max_steps=STEPS)
    values["data"]["validation"] = str(data)
    values["sharding"] = {"strategy": "zero3", "reshard_after_forward": node}
    for section, fields in changes.items():
        values[section] = {**values.get(section, {}), **fields}
    return Recipe.from_mapping(values)


def runs(folder: Path) -> dict[str, Any]:
    """Records of every case with and without groups; of a run that resumes; and what is refused."""
    from toolkit import finetune

    found: dict[str, Any] = {}
    for case, changes in CASES.items():
        for node in (None, 2):
            meet()
            found[case, node] = told(finetune(recipe(folder, case, node, changes)))
    first = str(folder / "whole-2" / "checkpoints" / "step_00000002")
    for name, checkpoint in (("whole", {"every_steps": 2}), ("resumed", {"resume": first})):
        meet()
        found[name] = told(finetune(recipe(folder, name, 2, {"checkpoint": checkpoint})))
    for strategy, node in (("zero3", 3), ("zero3", 4), ("zero2", 2)):
        with pytest.raises(BadInputError) as error:
            finetune(recipe(folder, "refused", node, {"sharding": {"strategy": strategy}}))
        found[strategy, node] = str(error.value)
    return found


def told(result: Any) -> list[Any]:
    return [(record["split"], record["step"], record["loss"]) for record in result.metrics]


@pytest.mark.grid
def test_a_run_in_nodes_is_the_run_of_zero3(tmp_path: Path) -> None:
    save_llama(tmp_path / "model", TEXTS, tied=False, layers=3)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    found = run_on_ranks(runs, 4, tmp_path)[0]
    for case in CASES:
        assert found[case, 2] == found[case, None], case
        assert len(found[case, 2]) > STEPS
    assert found["resumed"][-2:] == found["whole"][-2:]
    assert "3 is not a group" in found["zero3", 3]
    assert "4 is not a group" in found["zero3", 4], "all ranks of one node"
    assert "no effect with strategy zero2" in found["zero2", 2]


def test_experts_have_ranks_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"reshard_after_forward is not possible with sharding.experts"):
        recipe(tmp_path, "experts", 2, {"sharding": {"experts": 2}})


def copies() -> list[tuple[int, int]]:
    """Bytes that the units keep for backward: after a forward, after its backward, after an evaluation."""
    mesh = init_device_mesh("cpu", (4,))
    model = llama(num_hidden_layers=3)
    apply(model, plan_units(model), STRATEGIES["zero3"], mesh, "bf16", lambda: True, backward_mesh=groups_of(mesh, 2))
    ids = torch.arange(16)[None]
    found = []
    loss = model(input_ids=ids, labels=ids).loss
    found.append(kept(model))
    loss.backward()
    found.append(kept(model))
    with torch.no_grad():
        model(input_ids=ids)
    return [*found, kept(model)]


def kept(model: Any) -> tuple[int, int]:
    """Bytes, and the process groups in which they lie."""
    parameters = [parameter for group in fsdp_groups(model) for parameter in group.fsdp_params]
    tensors = [data for p in parameters if (data := getattr(p, "_sharded_post_forward_param_data", None)) is not None]
    groups = {id(group.post_forward_mesh_info.mesh) for group in fsdp_groups(model) if group.post_forward_mesh_info}
    return sum(data.nbytes for data in tensors), len(groups)


def test_a_node_keeps_a_copy_in_the_type_of_compute_from_forward_to_backward() -> None:
    model = llama(num_hidden_layers=3)
    tail = sum(p.numel() for part in (model.lm_head, model.model.norm) for p in part.parameters())
    whole = sum(p.numel() for p in model.parameters())
    # The embeddings of 131 tokens are padded to 132; one group of processes serves all units.
    expected = 2 * (whole - tail + 32) // 2
    assert run_on_ranks(copies, 4) == [[(expected, 1), (0, 1), (0, 1)]] * 4
