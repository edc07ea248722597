"""Runs whose matrices ranks cut: the plain loop's losses, norms and weights; checkpoints of any mesh; exports."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.peft_by_hand import adapted
from support.plain_samples import run_on_samples
from support.ranks import meet, run_on_ranks
from support.runs import losses_of
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama, with_sections
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.errors import BadInputError, ToolkitError
from toolkit.recipe.recipe import Recipe
from toolkit.run.parts.answers import NEW_TOKENS
from toolkit.sharding.fsdp2.shards import state_once
from toolkit.sharding.tensor import moves
from toolkit.training.extension import Extension

STEPS = 3
TEXTS = [" ".join(text.split()[:20]) for text in make_texts(40, seed=4)]
SAVING = {"every_steps": 2, "asynchronous": False}
Changes = dict[str, dict[str, Any]]
RUNS: dict[str, Changes] = {
    "zero3": {"training": {"gradient_accumulation_steps": 2, "micro_batch_size": 2}, "checkpoint": SAVING},
    "zero3-checkpointed": {"sharding": {"activation_checkpointing": 1, "offload_checkpoints": True}},
    "zero3-by-block": {
        "sharding": {"accumulate": "by_block", "activation_checkpointing": 1},
        "training": {"gradient_accumulation_steps": 2, "micro_batch_size": 2},
    },
    "zero3-by-config": {"sharding": {"tensor": 1}},  # the Accelerate config says it
}
PADDED: Changes = {
    "data": {"packing": False, "max_length": 63},
    "sharding": {"accumulate": "by_block", "activation_checkpointing": 1},
    "training": {"gradient_accumulation_steps": 4, "micro_batch_size": 1},
}
"""Micro-batches of different lengths, of which several are under way at once."""
DORA: Changes = {"adapter": {"kind": "lora", "r": 4, "alpha": 8.0, "use_dora": True}}
RESUMED: dict[str, Changes] = {
    "zero3-as-before": {"training": {"micro_batch_size": 4}},
    "zero3-offloaded": {"sharding": {"offload": "optimizer", "offload_executor": "cpu_torch"}},
    "zero3-uncut": {"sharding": {"tensor": 1}, "training": {"micro_batch_size": 2}},
}
"""Runs that go on after the second step of the run `zero3`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor")
    save_llama(folder / "model", TEXTS, tied=True)
    write_rows(folder / "rows.jsonl", ({"text": text} for text in TEXTS))
    return folder


def recipe(folder: Path, name: str, changes: Changes) -> Recipe:
    values = recipe_values(folder / "model", folder / "rows.jsonl", folder / name, folder / "cache")
    values["data"] |= {"packing": True, "max_length": 63, "validation": str(folder / "rows.jsonl")}
    values["schedule"] = {"kind": "constant"}
    values["training"] |= {"max_steps": STEPS, "micro_batch_size": 4}
    values["sharding"] = {"strategy": name.split("-")[0], "tensor": 2}
    return Recipe.from_mapping(with_sections(values, changes))


def runs(folder: Path, cases: dict[str, Changes], start: str = "never") -> dict[str, Any]:
    """The metrics of each run, which starts from the last checkpoint of the run `start`."""
    from toolkit import finetune

    found = {}
    for name, changes in cases.items():
        meet()
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = "2" if name.startswith("hybrid") else "1"
        os.environ["PARALLELISM_CONFIG_TP_SIZE"] = "2" if name.endswith("by-config") else "1"
        resume = {} if start == "never" else {"checkpoint": {"resume": str(folder / start)}}
        found[name] = finetune(recipe(folder, name, changes | resume)).metrics
    return found


def refused(folder: Path) -> dict[str, str]:
    """What runs say that are not possible, and one whose sums lack the other ranks' shares."""
    from toolkit import finetune

    found, sum_tokens = {}, moves._sum_tokens
    changes: dict[str, Changes] = {
        "compile": {"training": {"compile": True}},
        "by three": {"sharding": {"tensor": 3}},
        "wrong": {},
    }
    for name, change in changes.items():
        meet()
        if name == "wrong":
            moves._sum_tokens = moves._own_tokens
        try:
            finetune(recipe(folder, f"zero3-{name}", change))
        except BadInputError as error:
            found[name] = str(error)
        moves._sum_tokens = sum_tokens
    return found


CHECKPOINTS = [f"checkpoints/step_{step:08}" for step in (2, 4, 6)]


class OneRankChanges(Extension):
    """Adds the least bit to a weight of the last norm on one rank, after a step."""

    def __init__(self, rank: int, step: int) -> None:
        self._rank, self._step = rank, step

    def after_step(self, trainer: Any, step: Any) -> None:
        if trainer.global_step == self._step and dist.get_rank() == self._rank:
            local = state_once(trainer.model)["model.norm.weight"].to_local().detach()  # with offload, the master
            local[:1] = torch.nextafter(local[:1], local[:1] + 1)


def parted(folder: Path, num_ranks: int) -> dict[str, tuple[str, int, list[str]]]:
    """Of runs in which a rank's copy of a norm changes: the error, its exit code, and the folders that are left."""
    from toolkit import finetune

    found, saving = {}, {"training": {"max_steps": 6}, "checkpoint": {**SAVING, "keep_last": 9}}
    never = {"training": {"max_steps": 6}, "checkpoint": {"every_minutes": "never"}}
    offload = {"sharding": {"offload": "optimizer", "offload_executor": "cpu_torch"}}
    for name, changes in {"saving": saving, "never": never, "offloaded": {**saving, **offload}}.items():
        meet()
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"], os.environ["PARALLELISM_CONFIG_TP_SIZE"] = "1", "1"
        own = recipe(folder, f"zero3-parted-{name}-{num_ranks}", changes)
        try:
            finetune(own, extensions=[OneRankChanges(num_ranks - 1, 3)])
        except ToolkitError as error:
            left = [name for name in ("export", *CHECKPOINTS) if (Path(own.training.output_dir) / name).exists()]
            found[name] = str(error), error.exit_code, left
    return found


def test_copies_that_differ_are_not_saved_and_not_exported(folder: Path) -> None:
    """By one bit, on one of the ranks that hold a norm whole: every rank raises, and the earlier checkpoint stays."""
    for num_ranks in (2, 4):
        for found in run_on_ranks(parted, num_ranks, folder, num_ranks):
            for name, step, left in (
                ("saving", "after step 4", CHECKPOINTS[:1]),
                ("offloaded", "after step 4", CHECKPOINTS[:1]),
                ("never", "at the end", []),
            ):
                told, code, there = found[name]
                assert f"ranks {num_ranks - 2}, {num_ranks - 1} of a tensor group" in told, (name, told)
                assert "model.norm.weight: ranks" in told, name
                assert f"hold different copies {step}" in told, name
                assert (code, there) == (1, left), name


def rehearsed(folder: Path) -> dict[str, str]:
    """The summary of a dry run whose tensor groups only the Accelerate config names."""
    from toolkit.run import run

    meet()
    facts_of, told = run.facts_of, list[dict[str, str]]()
    os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"], os.environ["PARALLELISM_CONFIG_TP_SIZE"] = "1", "2"
    run.facts_of = lambda *of: told.append(facts_of(*of)) or told[-1]  # type: ignore[func-returns-value]
    try:
        run.rehearse(recipe(folder, "zero3-rehearsed", {"sharding": {"tensor": 1}}))
    finally:
        run.facts_of = facts_of
    return told[0]


def on_two_ranks(folder: Path) -> dict[str, Any]:
    found = {
        "runs": runs(folder, RUNS),
        "dora": runs(folder, {"zero3-dora": DORA}),
        "padded": runs(folder, {"zero3-padded": PADDED}),
    }
    return {
        **found,
        "resumed": runs(folder, RESUMED, "zero3"),
        "refused": refused(folder),
        "rehearsed": rehearsed(folder),
    }


@pytest.fixture(scope="module")
def on_2_ranks(folder: Path) -> dict[str, Any]:
    return run_on_ranks(on_two_ranks, 2, folder)[0]


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    return plain_run(folder, {})


def plain_run(folder: Path, changes: Changes, adapt: Callable[[Any], Any] = lambda model: model) -> dict[str, Any]:
    """AdamW on one process, 4 rows a step; losses, norms, weights, and the first and last held-out loss."""
    return run_on_samples(folder / "model", recipe(folder, "zero3", changes).data, STEPS, adapt)


def require_plain(metrics: list[dict[str, Any]], plain: dict[str, Any], name: str) -> None:
    steps = [record for record in metrics if record["split"] == "train"]
    assert [record["loss"] for record in steps] == pytest.approx(plain["loss"], rel=1e-6), name
    assert [record["grad_norm"] for record in steps] == pytest.approx(plain["norm"], rel=1e-5), name
    assert steps[-1]["tokens"] == plain["tokens"], name
    held_out = losses_of(metrics, "eval")
    assert [held_out[0], held_out[-1]] == pytest.approx(plain["eval"], rel=1e-6), name


def test_runs_are_the_plain_loop(folder: Path, on_2_ranks: dict[str, Any], plain: dict[str, Any]) -> None:
    for name, metrics in on_2_ranks["runs"].items():
        require_plain(metrics, plain, name)
        exported = load_file(folder / name / "export" / "model.safetensors")
        for path, weight in exported.items():
            difference = (weight - plain["weights"][path]).norm() / plain["weights"][path].norm()
            assert difference < 1e-5, (name, path)


def test_a_run_with_dora_is_pefts(folder: Path, on_2_ranks: dict[str, Any]) -> None:
    """Its first magnitudes are the norms of whole rows, read from the base."""
    settings = {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": "all-linear"}
    plain = plain_run(folder, DORA, lambda model: adapted(model, settings, 0))
    require_plain(on_2_ranks["dora"]["zero3-dora"], plain, "dora")


def test_micro_batches_of_different_lengths_are_the_plain_loop(folder: Path, on_2_ranks: dict[str, Any]) -> None:
    require_plain(on_2_ranks["padded"]["zero3-padded"], plain_run(folder, PADDED), "padded")


def test_a_dry_run_has_the_groups_of_the_run(on_2_ranks: dict[str, Any]) -> None:
    assert on_2_ranks["rehearsed"]["matrices"].startswith("cut by 2 ranks; checked: ")


def test_what_is_not_right_is_refused(on_2_ranks: dict[str, Any]) -> None:
    told = on_2_ranks["refused"]
    assert "sharding.tensor is not possible with training.compile" in told["compile"]
    assert "3 does not divide the 2 ranks of a node" in told["by three"]
    assert "LlamaForCausalLM does not compute the same with matrices that ranks cut (" in told["wrong"]


RUNS_ON_4: dict[str, Changes] = {
    "zero3-of-4": {"sharding": {"tensor": 2}, "training": {"micro_batch_size": 2}},
    "zero3-lora": {
        "sharding": {"tensor": 4},
        "adapter": {"kind": "lora", "r": 4},
        "export": {"merge": True},
        "training": {"ema": 0.9},
    },
}
RESUMED_ON_4: dict[str, Changes] = {
    "zero3-to-2x2": {"training": {"micro_batch_size": 2}},
    "zero3-to-4": {"sharding": {"tensor": 4}},
    "zero3-to-none": {"sharding": {"tensor": 1}, "training": {"micro_batch_size": 1}},
}


def on_four_ranks(folder: Path) -> dict[str, Any]:
    return {"runs": runs(folder, RUNS_ON_4), "resumed": runs(folder, RESUMED_ON_4, "zero3")}


def test_runs_on_4_ranks_are_the_plain_loop_from_any_checkpoint(
    folder: Path, on_2_ranks: dict[str, Any], plain: dict[str, Any]
) -> None:
    found = run_on_ranks(on_four_ranks, 4, folder)[0]
    require_plain(found["runs"]["zero3-of-4"], plain, "zero3-of-4")
    for name, metrics in found["resumed"].items():
        require_plain(metrics, plain, name)


def test_checkpoints_go_on_with_any_cut(on_2_ranks: dict[str, Any], plain: dict[str, Any]) -> None:
    for name, metrics in on_2_ranks["resumed"].items():
        require_plain(metrics, plain, name)


def shown(folder: Path) -> None:
    logging = {"logging": {"held_out_samples": 2}, "data": {"packing": None}}
    runs(folder, {"zero3-shown": {**logging, "training": {"eval_every_steps": 2}}})


def test_held_out_samples_are_those_of_transformers(tmp_path: Path) -> None:
    """Before the first step and after the last one; of weights that do not write one token all the time."""
    save_llama(tmp_path / "model", TEXTS, tied=False)
    write_rows(tmp_path / "rows.jsonl", ({"text": text} for text in TEXTS))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "model")
    run_on_ranks(shown, 2, tmp_path)
    tokens = AutoTokenizer.from_pretrained(tmp_path / "model")
    samples = json.loads((tmp_path / "zero3-shown" / "samples.json").read_text())
    assert len(samples) == 2
    for moment, path in (("before", tmp_path / "model"), ("after", tmp_path / "zero3-shown" / "export")):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for sample in samples:
            ids = tokens(sample["prompt"], return_tensors="pt").input_ids
            written = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :]
            # Written no further than the row itself goes.
            told = [tokens.decode(written[:number]) for number in range(5, NEW_TOKENS + 1)]
            ends = f"({re.escape(tokens.pad_token)})+|{re.escape(tokens.eos_token)}.*"
            assert sample[moment] in [re.sub(f"^({ends})|({ends})$", "", text) for text in told], (moment, sample)
