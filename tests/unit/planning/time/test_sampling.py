"""The time in which a model samples what it learns from: by hand, and what reading its weights takes at least."""

from __future__ import annotations

import dataclasses

import pytest
from accelerate import init_empty_weights
from support.planning_models import config_of
from transformers import AutoModelForCausalLM

from toolkit.planning.planner import Planner
from toolkit.planning.setup import Setup
from toolkit.planning.time.hardware import hardware_of
from toolkit.planning.time.roofline import Work
from toolkit.planning.time.sampling import Sampling
from toolkit.planning.workload.workload import workload_of_model
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

H100 = dataclasses.replace(hardware_of("h100_sxm"), kernel_seconds=0.0)
BANDWIDTH = H100.memory("mid")
LINK = H100.transfer(H100.link_bandwidth, "mid")


@pytest.mark.parametrize(("once", "gather"), [(True, 0.5), (False, 0.5), (False, 8.0)])
def test_a_forward_takes_the_longer_of_reading_and_gathering(once: bool, gather: float) -> None:
    whole, token = (Work({("memory", 0, int(seconds * BANDWIDTH)): 1}) for seconds in (12.0, 2.0))
    size = int(gather * LINK * 4 / 3)  # a rank of four receives three quarters
    sampling = Sampling(whole, 0.25, token, tokens=5, batches=2, gathered=size, once=once)
    expected = 2 * (3.0 + 4 * 2.0) + gather if once else 2 * (max(3.0, gather) + 4 * max(2.0, gather))
    assert sampling.seconds(MeshShape(1, 4), H100, "bfloat16", "mid") == pytest.approx(expected, rel=1e-6)
    alone = dataclasses.replace(sampling, gathered=0)
    assert alone.seconds(MeshShape(1, 1), H100, "bfloat16", "mid") == pytest.approx(22.0, rel=1e-6)


def row_of(completion: int, ranks: int = 1) -> tuple[float, float, float]:
    """Seconds of sampling and of the step, and bytes of weights that a token reads, of eight completions a rank."""
    recipe = Recipe.from_mapping(
        {
            "model": {"name_or_path": "none"},
            "data": {"train": "rows.jsonl", "max_length": 16 + completion},
            "objective": {
                "kind": "grpo",
                "rewards": [{"name": "a", "match": "b"}],
                "max_new_tokens": completion,
                "rollout_batch_size": 2,
            },
            "optimizer": {"learning_rate": 1e-3},
            "training": {"output_dir": "run", "max_steps": 1, "micro_batch_size": 4},
        }
    )
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config_of("llama", 4, 32000, 1024))
    planner = Planner(recipe, workload_of_model(recipe, model, "bf16", None), H100)
    mesh = MeshShape(1, ranks)
    time = planner.row(Setup(STRATEGIES["zero3"], mesh, False, None, 4, 2)).time
    assert time.mid == pytest.approx(time.parts.total)
    return time.parts.sampling, time.mid, 2 * (model.num_parameters() - model.get_input_embeddings().weight.numel())


def test_a_plan_counts_a_forward_for_each_token() -> None:
    short, step, weights = row_of(20)
    long, _, _ = row_of(40)
    # Four batches of two completions; each further token reads all weights but the embeddings' once.
    assert (long - short) / (4 * 20) == pytest.approx(weights / BANDWIDTH, rel=0.1)
    assert 0.5 * step < short < step
