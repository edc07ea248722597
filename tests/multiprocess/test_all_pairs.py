"""Every pair of features that may go together, in one run or another: each is the plain loop, step by step.

The rows are covering arrays over what the table of combinations allows. The plain loop is written out here, on one
process; for all objectives, with adapters, quantised bases and other optimizers, in support/plain_objectives.py.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import plain_objectives
from support.covering import Row, covering_array, pairs_of
from support.plain_loop import Trained, plain_loop, require_no_drift
from support.plain_rows import plain_rows
from support.ranks import meet, run_on_ranks
from support.tiny import VOCAB_SIZE, recipe_values, save_llama
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from toolkit.recipe.combinations import refusals
from toolkit.recipe.features import Surroundings, settings_of_backend
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.recipe.schema import AdapterSection, OptimizerSection, Sections, ShardingSection

STEPS, LEARNING_RATE, DECAY = 3, 2e-3, 0.1
ROWS_PER_STEP = {2: 4, 4: 8}
"""Ranks -> rows: one for each rank and micro-batch at least."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "strategy": ("ddp", "zero1", "zero2", "zero3"),
    "offload": ("none", "optimizer"),
    "accumulate": ("one", "by_micro_batch", "by_block"),
    "activation_checkpointing": (None, 1, 2),
    "offload_checkpoints": (False, True),
    "experts": (0, 1, 2),
    "sequence": (1, 2),
    "tensor": (1, 2),
    "tied": (False, True),
    "max_grad_norm": (None, 0.5),
    "ema": (None, 0.9),
}
"""Experts: 0 for a dense model."""

FEWER: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("activation_checkpointing", "ema"), (None,)),
    "strategy": ("ddp", "zero3"),
    "accumulate": ("one", "by_block"),
    "offload_checkpoints": (False,),
    "experts": (0,),
    "max_grad_norm": (0.5,),
    "compile": (False,),
    "optimizer": ("adamw",),
}
"""Of objectives in the first tier, which has all of `FACTORS` for `causal_lm`."""

ON_FOUR = {**FACTORS, "strategy": ("zero1", "zero3", "hybrid"), "reshard_after_forward": (None, 2)}

WITH_OBJECTIVES = {
    **FACTORS,
    "tied": (False,),
    "adapter": ("none", "lora", "nf4"),
    "compile": (False, True),
    "optimizer": ("adamw", "adamw_8bit", "muon"),
    "objective": tuple(plain_objectives.OBJECTIVES),
}


IN_TENSOR_GROUPS: list[Row] = [
    {
        **{name: values[0] for name, values in WITH_OBJECTIVES.items()},
        **{"strategy": "zero3", "tensor": 2, "max_grad_norm": 0.5, "accumulate": "by_micro_batch"} | changes,
    }
    for changes in [
        *(
            {"objective": kind}
            for kind in ("distillation", "reward", "sequence_classification", "token_classification")
        ),
        {"objective": "distillation", "adapter": "lora", "accumulate": "one"},
        {"objective": "reward", "adapter": "lora", "activation_checkpointing": 1, "offload": "optimizer"},
        {"objective": "sequence_classification", "adapter": "lora", "accumulate": "one"},
        {"objective": "token_classification", "adapter": "lora", "accumulate": "one"},
        {"objective": "distillation", "activation_checkpointing": 1, "offload": "optimizer"},
    ]
]
"""What the matrices of some objectives need at once, which pairs alone might not have."""


def settings_of(row: Row) -> Sections:
    adapter, kind = row.get("adapter", "none"), row.get("objective", "causal_lm")
    count = 1 if row["accumulate"] == "one" else 2
    made = settings_of_backend(
        compiled=row.get("compile", False),
        accumulate="by_block" if row["accumulate"] == "by_block" else "by_micro_batch",
        experts=row["experts"] or 1,
        **{key: row[key] for key in ShardingSection.model_fields if key in row.keys() - {"accumulate", "experts"}},
    )
    sections = {
        "objective": ObjectiveSection.model_construct(kind=kind),
        "adapter": AdapterSection(kind="none" if adapter == "none" else "lora"),
        "optimizer": OptimizerSection(kind=row.get("optimizer", "adamw"), learning_rate=1.0),
        "training": made.training.model_copy(update={"gradient_accumulation_steps": count}),
    }
    return made.model_copy(update=sections)


def is_allowed(row: Row) -> bool:
    # This mixture is not tied, and T5 has no experts.
    is_idle = row["experts"] and (row["tied"] or row.get("objective") == "seq2seq")
    # Nor are mixtures cut; and four ranks in groups of two have no two replicas of two.
    is_uncut = row["tensor"] > 1 and (row["experts"] or row["strategy"] == "hybrid")
    return (
        not refusals(settings_of(row), Surroundings(is_quantised=row.get("adapter") == "nf4"))
        and not is_idle
        and not is_uncut
    )


def plain_losses(folder: Path, rows: torch.Tensor, size: int, max_norm: float | None) -> Trained:
    """The mean over all targets, clipping, AdamW with decay of matrices alone.

    Args:
        size: rows of a step.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").train()

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        ids, labels, positions = batch.unbind(1)
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)

    return plain_loop(model, rows.split(size)[:STEPS], loss_of, rates=LEARNING_RATE, decay=DECAY, max_norm=max_norm)


def model_of(row: Row) -> str:
    return "experts" if row["experts"] else "tied" if row["tied"] else "dense"


def runs(folder: Path, data: Path, rows: list[Row]) -> list[list[dict[str, Any]]]:
    """The records of each row's run."""
    from toolkit import Recipe, finetune

    ranks, found = int(os.environ["WORLD_SIZE"]), []
    if ranks == 4:  # two hosts, as far as the replicas of hybrid with offload go
        os.environ.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    for number, row in enumerate(rows):
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = "2" if row["strategy"] == "hybrid" else "1"
        meet()
        # torchao compiles its step, for half a minute.
        torch.compiler.set_stance("default" if row.get("compile") else "force_eager")
        micro_batches = 1 if row["accumulate"] == "one" else 2
        values = recipe_values(
            folder / model_of(row),
            data,
            run_folder(folder, ranks, number, row),
            folder / "cache",
            max_steps=STEPS,
            micro_batch_size=ROWS_PER_STEP[ranks] * row["sequence"] * row["tensor"] // ranks // micro_batches,
            gradient_accumulation_steps=micro_batches,
            max_grad_norm=row["max_grad_norm"],
            ema=row["ema"],
        )
        values["schedule"] = {"kind": "constant"}
        values["export"] = {"enabled": "objective" not in row}
        if row["experts"]:
            values["objective"] = {"router_aux_coef": 0.0}
        if "objective" in row:
            add_objective(values, folder, row)
        if row["offload"] == "optimizer":
            values["sharding"] = {"offload_executor": "cpu_torch"}
        names = ("strategy", "offload", "activation_checkpointing", "offload_checkpoints")
        values["sharding"] = {
            **values.get("sharding", {}),
            **{name: row[name] for name in (*names, "sequence", "tensor")},
            "accumulate": "by_block" if row["accumulate"] == "by_block" else "by_micro_batch",
            "experts": max(1, row["experts"]),
            "reshard_after_forward": row.get("reshard_after_forward"),
        }
        found.append(finetune(Recipe.from_mapping(values)).metrics)
    return found


def run_folder(folder: Path, ranks: int, number: int, row: Row) -> Path:
    """Of a row's run, in a folder that other tests share."""
    return folder / f"run-{ranks}-{number}-{zlib.crc32(repr(row).encode())}"


def add_objective(values: dict[str, Any], folder: Path, row: Row) -> None:
    """The objective, its rows and its model; the adapter and the optimizer."""
    kind = row["objective"]
    rows, _, _, settings = plain_objectives.OBJECTIVES[kind]
    if "teacher" in settings:
        settings = {**settings, "teacher": str(folder / "teacher")}
    values["objective"] = {"kind": kind, **settings, **values.get("objective", {})}
    values["model"] = {"name_or_path": str(folder / f"{'experts' if row['experts'] else 'dense'}-{kind}")}
    values["data"] |= {"train": str(folder / f"{rows}.jsonl"), "validation": str(folder / f"{rows}-held-out.jsonl")}
    values["data"]["max_length"] = 96
    if kind == "seq2seq":
        values["data"]["source_prefix"] = plain_objectives.PREFIX
    if kind not in ("sequence_classification", "token_classification", "seq2seq"):
        values["data"]["packing"] = False
    values["training"] |= {"seed": plain_objectives.SEED, "compile": row["compile"]}
    values["optimizer"] |= {"kind": row["optimizer"], "eps": plain_objectives.EPS}
    if row["adapter"] != "none":
        names = ["q", "v"] if kind == "seq2seq" else ["q_proj", "v_proj"]
        quantize = "nf4" if row["adapter"] == "nf4" else "none"
        values["adapter"] = {"kind": "lora", "r": 4, "target_modules": names, "quantize": quantize}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    folder = tmp_path_factory.mktemp("combinations")
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    for name in ("dense", "tied"):
        save_llama(folder / name, texts, tied=name == "tied")
    tokenizer = AutoTokenizer.from_pretrained(folder / "dense")
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"moe_intermediate_size": 24, "max_position_embeddings": 64, "tie_word_embeddings": False}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes, **ends)).save_pretrained(
        folder / "experts"
    )
    tokenizer.save_pretrained(folder / "experts")
    return folder


@pytest.mark.first
def test_the_array_has_every_pair_that_is_allowed() -> None:
    rows = covering_array(FACTORS, is_allowed)
    covered = set().union(*map(pairs_of, rows))
    assert all(is_allowed(row) for row in rows)
    assert {frozenset([("strategy", "ddp"), ("experts", 2)])}.isdisjoint(covered)
    for pair in (("strategy", "zero3"), ("accumulate", "by_block")), (("sequence", 2), ("offload", "optimizer")):
        assert frozenset(pair) in covered
    assert len(rows) < 25


@pytest.mark.parametrize(
    ("ranks", "factors"),
    [pytest.param(2, FACTORS, marks=pytest.mark.first), pytest.param(4, ON_FOUR, marks=pytest.mark.grid)],
    ids=["2 ranks", "4 ranks"],
)
def test_every_allowed_pair_is_the_plain_loop(
    ranks: int, factors: dict[str, tuple[Any, ...]], folder: Path, text_file: Path
) -> None:
    rows = covering_array(factors, is_allowed)
    packed = plain_rows(folder / "dense", text_file)
    assert len(packed) >= STEPS * ROWS_PER_STEP[ranks], "no row is seen twice"
    plain = {
        (model, norm): plain_losses(folder / model, packed, ROWS_PER_STEP[ranks], norm)
        for model in ("dense", "tied", "experts")
        for norm in FACTORS["max_grad_norm"]
    }
    found = run_on_ranks(runs, ranks, folder, text_file, rows)[0]
    for number, (row, steps) in enumerate(zip(rows, found, strict=True)):
        expected = plain[model_of(row), row["max_grad_norm"]]
        assert [step["loss"] for step in steps] == pytest.approx(expected.losses, rel=2e-6), row
        assert [step["grad_norm"] for step in steps] == pytest.approx(expected.norms, rel=1e-5), row
        if row["ema"] is None:
            require_exported(run_folder(folder, ranks, number, row), expected, row)


def require_exported(run: Path, expected: Trained, row: Row) -> None:
    """AdamW divides by a gradient's own size: where that is next to nothing, rounding moves the weight."""
    model = AutoModelForCausalLM.from_pretrained(run / "export")
    pairs = ((parameter, expected.weights[name]) for name, parameter in model.named_parameters())
    differences = torch.cat([(found.detach() - weight).flatten() for found, weight in pairs])
    assert float(differences.abs().max()) < 3e-5, row
    assert int((differences.abs() > 1e-5).sum()) <= 2, f"{row}: of {len(differences)} elements"
    require_no_drift(differences, row)


TOLERANCES = {"adamw": 1e-5, "adamw_8bit": 1e-2, "muon": 1e-3}
"""Optimizer -> of losses. Moments of few bits are compared with whole ones; Newton-Schulz rounds to 16 bits."""

OF_HELD_OUT_ROWS = ("accuracy", "f1")
"""Figures that a training step does not report."""


def wrong_figures(row: Row, records: list[dict[str, Any]], expected: plain_objectives.Expected) -> list[str]:
    """What a run reports otherwise than the plain loop does: of its steps, and of held-out rows before and after."""
    exact, kind = TOLERANCES[row["optimizer"]], row["objective"]
    steps, held_out = ([record for record in records if record["split"] == split] for split in ("train", "eval"))
    pairs = [
        (step, {"loss": loss, "grad_norm": norm, **figures})
        for step, loss, norm, figures in zip(steps, expected.losses, expected.norms, expected.figures, strict=True)
    ]
    # After the steps, those of averaged weights are others; and KTO's KL is of rows beside each other in a batch.
    compared = slice(1 if row["ema"] or kind == "kto" else 2)
    pairs += list(zip(held_out[compared], expected.held_out[compared], strict=True))
    wrong = []
    for record, figures in pairs:
        for name, figure in figures.items():
            if name in OF_HELD_OUT_ROWS and record["split"] == "train":
                continue
            tolerance = exact if name == "loss" else 10 * exact  # a margin is a small difference of large sums
            if record.get(name) != pytest.approx(figure, rel=tolerance, abs=1e-5):
                wrong.append(f"{record['split']} {record['step']} {name}: {record.get(name)}, not {figure}")
    return wrong


@pytest.mark.parametrize(
    ("ranks", "more", "besides"),
    [
        pytest.param(2, FEWER, [], marks=pytest.mark.first),
        (2, {"compile": (False,)}, IN_TENSOR_GROUPS),
        pytest.param(2, {}, [], marks=pytest.mark.grid),
        pytest.param(4, {**ON_FOUR, "tied": (False,), "compile": (False,)}, [], marks=pytest.mark.grid),
    ],
    ids=["few factors", "eager", "compiled", "4 ranks"],
)
def test_every_allowed_pair_of_objectives_adapters_and_optimizers_is_the_plain_loop(
    ranks: int, more: dict[str, tuple[Any, ...]], besides: list[Row], with_objectives: Path
) -> None:
    rows = [*covering_array({**WITH_OBJECTIVES, **more}, is_allowed), *besides]
    found = run_on_ranks(runs, ranks, with_objectives, with_objectives / "text.jsonl", rows)[0]
    wrong = []
    for row, records in zip(rows, found, strict=True):
        model = model_of(row)
        expected = plain_objectives.expected_run(
            *(with_objectives, row["objective"], model, row["adapter"], row["optimizer"], row["max_grad_norm"]),
            *(STEPS, ROWS_PER_STEP[ranks]),
        )
        wrong += [f"{row}: {each}" for each in wrong_figures(row, records, expected)]
    assert not wrong, "\n".join(wrong)
