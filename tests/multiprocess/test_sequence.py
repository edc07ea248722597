"""Rows that ranks share: the plain loop on whole rows, whatever the model, the strategy and the number of ranks."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ledger import Ledger
from support.packed_rows import Documents, packed
from support.plain_samples import run_on_samples
from support.ranks import meet, run_on_ranks
from support.runs import losses_of
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama, with_sections
from support.traffic import Traffic
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

import toolkit.run.stages.accelerator
from toolkit.data.samples.sequence_parts import Part
from toolkit.errors import BadInputError
from toolkit.model.attention.attention import attend_by_heads
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.classification import SequenceClassification
from toolkit.objectives.losses import scores
from toolkit.objectives.reward import Reward
from toolkit.planning.hardware import presets
from toolkit.planning.planner import Planner
from toolkit.planning.setup import Setup
from toolkit.planning.workload.workload import workload_of
from toolkit.recipe.recipe import Recipe
from toolkit.run.checks.sequence_check import check_parts
from toolkit.sharding import Compilation
from toolkit.sharding.parallel.sequence_parallel import form_groups, own_part
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
NARROW = {"head_dim": 8, "sliding_window": 6}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_key_value_heads": 1},  # fewer keys than ranks: repeated
    "qwen3": {**SIZES, "head_dim": 8},
    "gemma3_text": {**SIZES, **NARROW, **MIXED},
    "mistral": {**SIZES, "sliding_window": 6},
    "gpt_oss": {**SIZES, **NARROW, **MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
    "gpt2": {"vocab_size": 131, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "qwen3_moe": {**SIZES, "head_dim": 8, **EXPERTS},
}
DOCUMENTS = [7, 16, 5, 19]
"""Their lengths; of 47 tokens neither 2 nor 4 ranks have equally many."""


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **MODELS[name])
    return AutoModelForCausalLM.from_config(config).float().train()


def rows() -> dict[str, torch.Tensor]:
    """Two rows of the same documents' lengths."""
    ids = torch.randint(1, 131, (2, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS]).expand(2, -1).contiguous()
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "lengths": torch.full((2,), ids.shape[1])}


def parts_of_rows(names: list[str]) -> dict[str, Any]:
    """Of each model: this rank's logits, the loss of all ranks, and gradients summed over them."""
    ranks = dist.get_world_size()
    form_groups(ranks)
    found = {}
    for name in names:
        model = model_of(name)
        attend_by_heads(model)
        objective = CausalLM(model)
        batch = objective.on_host(Part(own_part(), ranks).of(rows()))
        logits = objective.logits(model, batch).detach()
        loss = objective.loss_sum(model, batch)
        loss.backward()
        total = loss.detach().clone()
        for tensor in (total, *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(tensor)
        found[name] = (logits, total, {name: p.grad for name, p in model.named_parameters()})
    return found


def require_whole(found: list[dict[str, Any]]) -> None:
    """That every model's parts are those of whole rows, as transformers alone computes them."""
    for name in found[0]:
        model, batch = model_of(name), rows()
        ids, positions = batch["input_ids"], batch["position_ids"]
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
        loss.backward()
        parts = torch.cat([of_rank[name][0] for of_rank in found], dim=1)[:, : ids.shape[1]]
        torch.testing.assert_close(parts, logits.detach(), rtol=0, atol=1e-6, msg=name)
        torch.testing.assert_close(found[0][name][1], loss.detach(), rtol=1e-6, atol=0, msg=name)
        largest = max(float(p.grad.abs().max()) for p in model.parameters())
        for path, parameter in model.named_parameters():
            gradient = found[0][name][2][path]
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6 * largest, msg=f"{name} {path}")


def test_parts_of_rows_are_the_rows_whole(on_2_ranks: list[dict[str, Any]]) -> None:
    require_whole([of_rank["parts"] for of_rank in on_2_ranks])


@pytest.mark.parametrize(
    "names", [["gpt_oss"], pytest.param([name for name in MODELS if name != "gpt_oss"], marks=pytest.mark.grid)]
)
def test_parts_of_rows_on_4_ranks_are_the_rows_whole(names: list[str]) -> None:
    require_whole(run_on_ranks(parts_of_rows, 4, names))


STEPS = 3
TEXTS = [" ".join(text.split()[:20]) for text in make_texts(40, seed=4)]
SAVING = {"every_steps": 2, "asynchronous": False}
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "zero3": {"training": {"gradient_accumulation_steps": 2, "micro_batch_size": 2}, "checkpoint": SAVING},
    "zero3-bf16": {"training": {"mixed_precision": "bf16"}},
}
"""Each with 4 rows of 63 tokens in a step, which 2 ranks share. test_all_pairs.py has other strategies and features."""

RESUMED: dict[str, dict[str, dict[str, Any]]] = {
    "zero3-as-before": {"training": {"gradient_accumulation_steps": 2, "micro_batch_size": 2}},
    "zero3-unshared": {"sharding": {"sequence": 1}, "training": {"micro_batch_size": 2}},
}
"""Runs that go on after the second step of the run `zero3`."""

RUNS_ON_4: dict[str, dict[str, dict[str, Any]]] = {
    "hybrid": {"training": {"micro_batch_size": 2}, "checkpoint": SAVING},
    "hybrid-by-4": {"sharding": {"sequence": 4}},
    "zero3-by-4": {"sharding": {"sequence": 4}},
    "zero3-compiled": {"sharding": {"sequence": 4}, "training": {"compile": True}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sequence")
    save_llama(folder / "model", TEXTS, tied=False)
    write_rows(folder / "rows.jsonl", ({"text": text} for text in TEXTS))
    return folder


def recipe(folder: Path, name: str, changes: dict[str, dict[str, Any]]) -> Recipe:
    values = recipe_values(folder / "model", folder / "rows.jsonl", folder / name, folder / "cache")
    values["data"] |= {"packing": True, "max_length": 63, "validation": str(folder / "rows.jsonl")}
    values["schedule"] = {"kind": "constant"}
    values["training"] |= {"max_steps": STEPS, "micro_batch_size": 4}
    values["sharding"] = {"strategy": name.split("-")[0], "sequence": 2}
    return Recipe.from_mapping(with_sections(values, changes))


def runs(folder: Path, cases: dict[str, dict[str, dict[str, Any]]], start: str = "never") -> dict[str, Any]:
    """The metrics of each run, which starts from the last checkpoint of the run `start`."""
    from toolkit import finetune

    # Inductor takes minutes.
    toolkit.run.stages.accelerator.Compilation = functools.partial(Compilation, "aot_eager")  # type: ignore[misc]
    found = {}
    for name, changes in cases.items():
        meet()
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = "2" if name.startswith("hybrid") else "1"
        resume = {} if start == "never" else {"checkpoint": {"resume": str(folder / start)}}
        found[name] = finetune(recipe(folder, name, changes | resume)).metrics
    return found


def runs_on_4_ranks(folder: Path) -> dict[str, Any]:
    return {
        "runs": runs(folder, RUNS_ON_4),
        "resumed": runs(folder, {"zero3-resumed-by-4": RUNS_ON_4["zero3-by-4"]}, "hybrid"),
    }


def plain_run(folder: Path) -> dict[str, Any]:
    """AdamW on whole rows, 4 a step; the losses, the norms, and the first and last held-out loss."""
    return run_on_samples(folder / "model", recipe(folder, "zero3", {}).data, STEPS)


def measured() -> dict[str, int]:
    """Bytes of activations at most, whole and in 2 parts, and bytes handed to exchanges by parts."""
    form_groups(2)
    found = {}
    for count in (1, 2):
        model = model_of("qwen3")
        attend_by_heads(model)
        objective = CausalLM(model, packed=False)
        ids = torch.arange(4096)[None] % 131
        batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(4096)[None]}
        batch = objective.on_host(Part(own_part(), count).of({**batch, "lengths": torch.tensor([4096])}))
        with Ledger() as ledger, Traffic() as traffic:
            objective.loss_sum(model, batch).backward()
        found[f"of {count}"] = ledger.peak - sum(p.nbytes for p in model.parameters())
    return {**found, "exchanged": traffic.bytes["alltoall_base_"]}


def test_memory_is_halved_and_traffic_is_what_the_plan_says(on_2_ranks: list[dict[str, Any]]) -> None:
    found = on_2_ranks[0]["measured"]
    # An exchange that ends late, on a busy machine, holds its buffers while the next operator runs.
    assert found["of 2"] == pytest.approx(found["of 1"] / 2, rel=0.1)
    # float32 queries and outputs of 4 heads, keys and values of 2, each 8 wide; there and back.
    assert found["exchanged"] == 2 * 2 * (2 * 4 + 2 * 2) * 8 * 2048 * 4
    changes = {"sharding.sequence": 2, "data.max_length": 4096, "data.packing": False, "training.mixed_precision": "no"}
    model = {"model_type": "qwen3", **MODELS["qwen3"], "vocab_size": 1024}
    values = Recipe.load("pretrain", {"model.config": model, "training.micro_batch_size": 1, **changes})
    planner = Planner(values, workload_of(values, "no"), presets()["cpu"])
    setup = Setup(STRATEGIES["zero3"], MeshShape(1, 2), False, None, 1, 1)
    assert planner.row(setup).traffic.exchanged == found["exchanged"] // 2, "half of it stays on the rank"


def on_ranks(folder: Path) -> dict[str, Any]:
    return {
        "parts": parts_of_rows(list(MODELS)),
        "refused": refused(),
        "measured": measured(),
        "runs": runs(folder, RUNS),
        "resumed": runs(folder, RESUMED, "zero3"),
    }


@pytest.fixture(scope="module")
def on_2_ranks(folder: Path) -> list[dict[str, Any]]:
    return run_on_ranks(on_ranks, 2, folder)


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    return plain_run(folder)


def require_plain(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """That every run is the plain loop: to the rounding of 16 bits where it computes in them."""
    for name, records in found.items():
        loss, norm = (5e-4, 5e-2) if name.endswith("bf16") else (1e-6, 1e-5)
        steps = [record for record in records if record["split"] == "train"]
        assert [record["loss"] for record in steps] == pytest.approx(plain["loss"], rel=loss), name
        assert [record["grad_norm"] for record in steps] == pytest.approx(plain["norm"], rel=norm), name
        evaluated = losses_of(records, "eval")
        assert evaluated == pytest.approx(plain["eval"], rel=loss), name
        assert (steps[-1]["tokens"], steps[-1]["samples"]) == (plain["tokens"], 4 * STEPS), name


def require_carried(found: dict[str, Any], first: list[dict[str, Any]]) -> None:
    """That every run went on after the second step of `first`, whose records it took over, times and all."""
    for name, records in found.items():
        assert records[:3] == first[:3], name
        assert records[3] != first[3], name


def test_runs_on_shared_rows_are_the_plain_loop(plain: dict[str, Any], on_2_ranks: list[dict[str, Any]]) -> None:
    found = on_2_ranks[0]["runs"]
    require_plain(found, plain)
    rounded = [found[name][-1]["loss"] for name in ("zero3-bf16", "zero3")]
    assert rounded[0] != pytest.approx(rounded[1], rel=1e-6), "16 bits were really computed in"


def test_a_run_on_shared_rows_goes_on_with_the_same_and_with_another_number_of_ranks_a_row(
    plain: dict[str, Any], on_2_ranks: list[dict[str, Any]]
) -> None:
    whole, resumed = on_2_ranks[0]["runs"]["zero3"], on_2_ranks[0]["resumed"]
    require_plain(resumed, plain)
    require_carried(resumed, whole)
    exact = [[(r["loss"], r.get("grad_norm")) for r in records] for records in (resumed["zero3-as-before"], whole)]
    assert exact[0] == exact[1]


@pytest.mark.grid
def test_runs_on_4_ranks_that_share_rows_by_2_and_by_4_are_the_plain_loop(folder: Path, plain: dict[str, Any]) -> None:
    found = run_on_ranks(runs_on_4_ranks, 4, folder)[0]
    require_plain(found["runs"], plain)
    require_plain(found["resumed"], plain)
    require_carried(found["resumed"], found["runs"]["hybrid"])


def refused() -> str:
    """What the check before the first step says of a model whose attention is not transformers' interface."""
    form_groups(2)
    config = AutoConfig.for_model("falcon", vocab_size=131, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(config)
    attend_by_heads(model)
    samples, device = packed(Documents(9)), torch.device("cpu")
    with pytest.raises(BadInputError) as error:
        check_parts(model, CausalLM(model), samples, Part(own_part(), 2), device, False)
    return str(error.value)


def test_a_model_that_mixes_tokens_elsewhere_is_refused_before_the_first_step(on_2_ranks: list[dict[str, Any]]) -> None:
    told = on_2_ranks[0]["refused"]
    assert told.startswith("sharding.sequence: FalconForCausalLM with attention 'sdpa' mixes the tokens of a row")
    assert told == on_2_ranks[1]["refused"]


GROUPS_OF: dict[str, Any] = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
GROUPS_OF |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
KINDS = {"reward": "numbers of documents differ by", "classification": "logits differ by"}
"""Objective -> what the check says."""


class Samples:
    """What the check asks of samples: pairs of documents in a row, or padded rows with a class each."""

    has_images = False

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def few(self, tokens: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(3)
        if self._kind == "classification":
            lengths = torch.tensor([31, 20])
            mask = (torch.arange(31) < lengths[:, None]).long()
            ids = torch.randint(1, 131, (2, 31), generator=draw) * mask
            return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([2, 0]), "lengths": lengths}
        lengths = torch.tensor([7, 16, 5, 19])
        ids = torch.randint(1, 131, (1, 47), generator=draw)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        return {
            "input_ids": ids,
            "labels": ids.masked_fill(positions < 3, -100),
            "position_ids": positions,
            "segments": torch.arange(4).repeat_interleave(lengths)[None],
            "lengths": torch.tensor([47]),
            "reference": torch.zeros(2, 2),
            "margin": torch.zeros(2),
        }


def checked(kind: str) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(**GROUPS_OF, num_labels=1 if kind == "reward" else 3)
    model = AutoModelForSequenceClassification.from_config(config).float().train()
    attend_by_heads(model)
    objective: Any = Reward(model, 0.05) if kind == "reward" else SequenceClassification(model, 3, None)
    part = Part(own_part(), dist.get_world_size())
    try:
        check_parts(model, objective, Samples(kind), part, torch.device("cpu"), False)
    except BadInputError as error:
        return str(error)
    return ""


def whole_and_broken() -> list[tuple[str, str]]:
    form_groups(dist.get_world_size())
    with pytest.MonkeyPatch.context() as patch:
        right = [checked(kind) for kind in KINDS]
        patch.setattr(scores, "summed_over_group", lambda mine: mine)
        return list(zip(right, map(checked, KINDS), strict=True))


def test_the_check_finds_numbers_of_documents_that_are_not_exchanged() -> None:
    first, second = run_on_ranks(whole_and_broken, 2)
    assert first == second
    for (right, broken), told in zip(first, KINDS.values(), strict=True):
        assert right == ""
        assert told in broken
