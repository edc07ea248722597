"""The memory of answers that a model writes while a run trains, against transformers' own cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from support.cases import cases
from support.planning_models import config_of
from support.tiny import tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from toolkit.errors import BadInputError
from toolkit.planning.check import plan_run
from toolkit.planning.hardware import presets
from toolkit.planning.memory.fake import Ledger
from toolkit.planning.planner import Planner
from toolkit.planning.probed import answering
from toolkit.planning.setup import Setup
from toolkit.planning.workload.workload import Workload, workload_of_model
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

ROWS, PROMPT, ANSWER = 3, 30, 11
TABLES = cases(__file__)
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = TABLES["CONFIGURATIONS"]


def configured(name: str) -> Any:
    kind, fields = CONFIGURATIONS[name]
    config = tiny_config(kind)
    own = config.to_dict() | fields
    own.pop("layer_types", None)
    return type(config)(**own)


def on_meta(config: Any) -> Any:
    with init_empty_weights(include_buffers=False):
        return auto_class(config).from_config(config)


def auto_class(config: Any) -> Any:
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def tensors(found: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """All that a cache holds, whatever it calls it."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, dict | list | tuple):
        for each in found.values() if isinstance(found, dict) else found:
            yield from tensors(each, depth)
    elif hasattr(found, "__dict__") and depth < 4:
        yield from tensors(vars(found), depth + 1)


def written(config: Any, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the cache of real answers, and the most at once beside the weights, as CUDA's allocator rounds them.

    Of an encoder-decoder the encoder's states stay, too.
    """
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=dtype).eval()
    ids = torch.randint(3, 60, (ROWS, PROMPT))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0  # padded, as batches of prompts are
    ledger = Ledger()
    for tensor in (*model.parameters(), *model.buffers()):
        ledger.see(tensor)
    before = ledger.current
    with ledger:
        # The last token is written and not read any more. A target begins with a token of its own.
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=ANSWER + (not config.is_encoder_decoder),
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
            return_dict_in_generate=True,
        )
    cache = out.get("cache")
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors(cache)}
    sizes = list(storages.values())
    if config.is_encoder_decoder:
        sizes.append(ROWS * PROMPT * config.d_model * dtype.itemsize)
    return sum(math.ceil(size / 512) * 512 for size in sizes), ledger.peak - before


@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_cache_has_the_bytes_of_transformers_own(name: str, precision: str) -> None:
    config = configured(name)
    workload = Workload(on_meta(config), None, None, precision, PROMPT + ANSWER)  # type: ignore[arg-type]
    planner = Planner(recipe_with(), workload, presets()["cpu"])
    with planner.model._without_values():
        found = answering(workload, ROWS, PROMPT, ANSWER, whole=False)
    cache, peak = written(config, torch.float32 if precision == "no" else torch.bfloat16)
    assert found.cache == cache
    assert peak <= found.peak <= 2 * peak, "it is of a forward of whole answers"


def recipe_with(**answers: Any) -> Recipe:
    return Recipe.from_mapping(
        {
            "model": {"name_or_path": "none"},
            "data": {"train": "rows.jsonl", "max_length": 64, "validation_fraction": 0.1},
            "optimizer": {"learning_rate": 1e-3},
            "training": {"output_dir": "run", "max_steps": 1, "micro_batch_size": 1},
            **({"answers": {"file": "questions.jsonl", **answers}} if answers else {}),
        }
    )


def peaks(recipe: Recipe, name: str, mixed_precision: str = "bf16") -> dict[str, int]:
    """Moment -> bytes, of an 8-layer Llama on two ranks."""
    model = on_meta(config_of("llama", 8))
    planner = Planner(recipe, workload_of_model(recipe, model, mixed_precision, None), presets()["h100_sxm"])
    strategy = STRATEGIES[name]
    mesh = MeshShape(1, 2) if strategy.sharded else MeshShape(2, 1)
    return {each.moment: each.total for each in planner.moments(Setup(strategy, mesh, False, None, 1, 1))}


@pytest.mark.parametrize(
    ("name", "held"),
    [
        pytest.param("ddp", 16 + 2, marks=pytest.mark.slow),
        ("zero2", 12 / 2 + 2),
        pytest.param("zero3", 12 / 2, marks=pytest.mark.slow),
    ],
)
def test_a_plan_counts_the_state_what_is_gathered_and_the_cache(name: str, held: float) -> None:
    rows, tokens = 64, 64 + 448
    recipe, parameters = (
        recipe_with(batch_size=rows, max_new_tokens=448),
        on_meta(config_of("llama", 8)).num_parameters(),
    )
    assert peaks(recipe_with(), name).keys() == peaks(recipe, name).keys() - {"answers to held-out prompts"}
    found = peaks(recipe, name)["answers to held-out prompts"]
    # 8 layers, keys and values, 2 heads of 16 numbers of two bytes.
    cache = 8 * 2 * rows * tokens * 2 * 16 * 2
    forward = found - held * parameters - cache
    hidden = rows * tokens * 128 * 2
    assert 2 * hidden < forward < 30 * hidden, "a few states of all tokens, in float32 under ddp, and the MLP's"


def test_a_run_whose_answers_do_not_fit_is_told_so() -> None:
    recipe = recipe_with(batch_size=10**6, max_new_tokens=10**6)
    workload = workload_of_model(recipe, on_meta(config_of("llama", 2)), "no", None)
    with pytest.raises(BadInputError, match=r"in answers to held-out prompts.*[Ll]ower answers.batch_size"):
        plan_run(recipe, workload, STRATEGIES["ddp"], MeshShape(1, 1), False, [None], torch.device("cpu"))
