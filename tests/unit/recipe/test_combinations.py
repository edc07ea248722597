"""The table of what cannot go together: every row is told, by the recipe too, and says what to do."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

import toolkit
from toolkit.errors import BadInputError, RecipeError
from toolkit.recipe.combinations import COMBINATIONS, refusals, refuse
from toolkit.recipe.features import NOWHERE, Surroundings, settings_of_backend
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.plan.strategy import STRATEGIES

BASE = "data.chat_template=null | logging.held_out_samples=0 | training.eval_every_steps=null"
GRPO = (
    "objective={kind: grpo, max_new_tokens: 8, rewards: [{name: a, match: b}]} | answers.file=a.jsonl | "
    "training.eval_every_steps=5 | data.validation_fraction=null"
)
BY_BLOCK = "sharding.accumulate=by_block | training.gradient_accumulation_steps=2"
PERHAPS = "sharding.accumulate=auto | sharding.activation_checkpointing=auto"
DDP = "sharding.strategy=ddp"
MERGED = "adapter.kind=lora | export.merge=true"
NF4 = f"{MERGED} | adapter.quantize=nf4"
CHUNKS = "sharding.chunk_tokens=64 | sharding.activation_checkpointing=1"
BEST = "checkpoint={keep_best: true, every_steps: 10}"
DISTILLATION = "objective={kind: distillation, teacher: a/b, "
CPU, LOOP = Surroundings(device="cpu"), Surroundings(own_loop=True)
ISLANDS = Surroundings(keeps_float32="router.weight")
IMAGES = Surroundings(has_images=True)

Row = str | tuple[str, Surroundings]
ROWS: tuple[Row, ...] = (
    "model={name_or_path: a, config: {model_type: llama}, tokenizer: a}",
    "model={name_or_path: a, tokenizer: a, train_tokenizer_vocab_size: 300}",
    "data={train: a, max_length: 8, validation: a, validation_fraction: 0.1}",
    "training={output_dir: a, max_steps: 1, num_epochs: 1}",
    "schedule={warmup_steps: 1, warmup_fraction: 0.1}",
    "model={config: {model_type: llama}, tokenizer: a, revision: main}",
    "model={name_or_path: a, add_tokens: [x], train_tokenizer_vocab_size: 300}",
    "model={config: {model_type: llama}}",
    "data.validation_fraction=null | data.max_validation_samples=1",
    "data.min_pixels=9 | data.max_pixels=8",
    "data.train=[{path: a, weight: 1.0}, b]",
    "data.train={path: a, weight: 2.0}",
    "data.validation={path: a, weight: 1.0}",
    "data={train: a, max_length: 8, streaming: true, validation_fraction: 0.1} | training.max_steps=1",
    "data.streaming=true | data.validation_fraction=null | data.num_proc=2 | training.max_steps=1",
    "adapter.r=8",
    f"{MERGED} | adapter.double_quantization=true",
    "optimizer.momentum=0.9",
    "schedule.decay_fraction=0.1",
    "schedule.kind=constant",
    "schedule={kind: warmup_stable_decay, warmup_fraction: 0.6, decay_fraction: 0.5}",
    "training.max_steps=4 | training.profile_steps=[3, 5]",
    "answers.max_new_tokens=8",
    "answers={file: a, raw: true, system: Hi} | training.eval_every_steps=5",
    f"{BEST} | checkpoint.keep_last=null | training.eval_every_steps=5",
    "checkpoint.keep_best=true | training.eval_every_steps=5",
    "logging.tracker_settings={wandb: {entity: me}}",
    "export={enabled: false, verify: true}",
    "export.hub_private=false",
    f"{BY_BLOCK} | {DDP}",
    "sharding.accumulate=by_block",
    f"{BY_BLOCK} | sharding.activation_checkpointing=2",
    "sharding.accumulate=auto | sharding.activation_checkpointing=2",
    f"{BY_BLOCK} | training.mixed_precision=fp16",
    f"{PERHAPS} | sharding.reshard_after_forward=2",
    f"{BY_BLOCK} | objective.kind=seq2seq",
    f"{PERHAPS} | {DISTILLATION}}}",
    f"{PERHAPS} | {GRPO} | objective.beta=0.1",
    "sharding={strategy: zero1, reshard_after_forward: 2}",
    "sharding={strategy: hybrid, reshard_after_forward: 2}",
    "sharding={experts: 2, reshard_after_forward: 2}",
    f"sharding.experts=2 | {DDP}",
    f"sharding.experts=2 | {GRPO}",
    f"sharding.tensor=2 | {DDP}",
    "sharding={strategy: zero1, tensor: 2}",
    "sharding={experts: 2, tensor: 2}",
    "sharding={sequence: 2, tensor: 2}",
    "sharding={reshard_after_forward: 2, tensor: 2}",
    f"sharding.tensor=2 | {CHUNKS}",
    "sharding.tensor=2 | training.mixed_precision=fp16",
    "sharding.tensor=2 | training.compile=true",
    "sharding.tensor=2 | optimizer.kind=muon",
    f"sharding.tensor=2 | {NF4}",
    ("sharding.tensor=2", IMAGES),
    "sharding.tensor=2 | objective.kind=seq2seq",
    f"sharding.offload=optimizer | {DDP}",
    "sharding.offload=optimizer | training.mixed_precision=fp16",
    "sharding.offload=optimizer | optimizer.kind=muon",
    ("sharding.offload=optimizer", replace(ISLANDS, sums_in_autograd=True)),
    ("sharding.offload=optimizer | sharding.experts=2", ISLANDS),
    "sharding.offload=none | sharding.device_state_gib=0.0",
    "sharding.offload_checkpoints=true",
    "sharding.chunk_tokens=64",
    f"{CHUNKS} | objective.kind=seq2seq",
    f"sharding.prefetch=2 | {DDP}",
    f"training.compile=true | {NF4}",
    f"training.compile=true | {GRPO}",
    ("training.compile=true", IMAGES),
    ("training.mixed_precision=fp16", CPU),
    (f"sharding.activation_checkpointing=1 | {DDP}", LOOP),
    (f"training.compile=true | {DDP}", LOOP),
    "objective.beta=0.2",
    "objective={kind: preference, loss: grpo}",
    "objective={kind: preference, loss: ipo, gamma: 1.0}",
    f"{DISTILLATION}divergence: reverse_kl, beta: 0.5}}",
    f"{DISTILLATION}divergence: jsd, beta: 1.0}}",
    f"objective.router_bias_rate=0.01 | {MERGED}",
    "sharding.sequence=2 | objective.kind=seq2seq",
    f"sharding.sequence=2 | {GRPO}",
    ("sharding.sequence=2", IMAGES),
    "sharding.sequence=2 | objective.loss=mine.py:loss",
    f"{NF4} | objective.kind=seq2seq",
    "data.packing=true | objective.kind=token_classification",
    "data.streaming=true | data.validation_fraction=null | training.max_steps=1 | objective.kind=token_classification",
    "data.streaming=true | data.validation_fraction=null | training.max_steps=1 | objective.kind=kto",
    f"data.streaming=true | training.max_steps=1 | {GRPO}",
    "data.long_rows=split | objective.kind=token_classification",
    "data.long_rows=truncate | objective.kind=kto",
    "data.targets=all | objective.kind=token_classification",
    "data.targets=all | objective.kind=kto",
    f"data.targets=all | {GRPO}",
    "data.template_arguments={a: 1} | objective.kind=token_classification",
    "data.add_bos=false | objective.kind=token_classification",
    "data.train={path: a, name: a} | objective.kind=reward",
    "data.train={path: a, name: a} | objective.loss=mine.py:loss",
    "data.train={path: a, name: a} | data.streaming=true | data.validation_fraction=null | training.max_steps=1",
    "data.columns.target=body",
    "data.columns.margin=gap | objective.kind=preference",
    "logging.held_out_samples=1 | objective.kind=reward",
    "answers.file=a | training.eval_every_steps=5 | objective.kind=reward",
    "data.streaming=true | data.validation_fraction=null",
    "training.eval_every_steps=5 | data.validation_fraction=null",
    "logging.held_out_samples=1 | data.validation_fraction=null",
    "answers.file=a | data.validation_fraction=null",
    "training.patience=2",
    BEST,
    f"{BEST} | training.eval_every_steps=3",
    "training.best_by=answers | answers.file=a",
    "training.best_by=answers | training.patience=2 | training.eval_every_steps=5",
    "export.merge=true",
    "model={name_or_path: a, add_tokens: [x]} | adapter.kind=lora",
    f"{MERGED} | adapter.start_from=ADAPTER",
    "adapter.kind=lora",
    f"{GRPO} | data.validation=a",
    f"{GRPO} | training.patience=2",
    f"{GRPO} | logging.held_out_samples=1",
    f"{GRPO} | adapter={{kind: lora, dropout: 0.1}} | export.merge=true",
)
"""Overrides of `BASE` that the row of the table in the same place refuses, and what else is so."""


def found_in(row: Row) -> list[str]:
    words, around = (row, NOWHERE) if isinstance(row, str) else row
    try:
        recipe = Recipe.load("quickstart", f"{BASE} | {words}".split(" | "))
    except RecipeError as error:
        return error.problems
    return list(map(str, refusals(recipe, around)))


def test_every_row_is_told_alone_and_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").touch()
    config = '{"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"}'
    (tmp_path / "adapter_config.json").write_text(config)
    wrong = []
    for combination, row in zip(COMBINATIONS, ROWS, strict=True):
        told = found_in(row.replace("ADAPTER", str(tmp_path)) if isinstance(row, str) else row)
        verb = "has no effect with" if combination.is_idle else "is not possible with"
        ends = verb in told[0] and told[0].endswith(f"; {combination.mend}") if len(told) == 1 else False
        wrong += [] if ends and not re.search(r"[{}]|None", told[0]) else [(row, told)]
    assert wrong == []


KEY = re.compile(rf"\b({'|'.join(Recipe.model_fields)})\.[a-z_]+")
PACKAGE = Path(toolkit.__file__).parent


def refused_elsewhere(source: str) -> list[str]:
    """Texts that refuse settings of two sections; those of `contradiction` know nothing but settings."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise):
            parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            text = " ".join(part for part in parts if isinstance(part, str))
            is_of_settings = re.search(
                "has no effect|is not possible|exclude", text
            ) or "contradiction(" in ast.unparse(node)
            if is_of_settings and len({key.split(".")[0] for key in (m[0] for m in KEY.finditer(text))}) > 1:
                found.append(text)
    return found


def test_settings_of_two_sections_are_refused_by_the_table_alone() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert {name: found for name, source in sources.items() if (found := refused_elsewhere(source))} == {}


def test_a_refusal_outside_the_table_is_found() -> None:
    source = """
raise contradiction("training.patience needs data.validation; set it")
raise BadInputError(f"export.merge has no effect {why}; set adapter.kind=lora")
raise contradiction("data.min_pixels is more than data.max_pixels")
raise RecipeError(path, ["checkpoint.resume: undo it, or choose another training.output_dir"])
"""
    assert len(refused_elsewhere(source)) == 2


def test_by_block_is_refused_for_the_strategies_that_gather_once_a_step() -> None:
    for strategy in STRATEGIES.values():
        by_block = settings_of_backend(strategy=strategy.name, accumulate="by_block", activation_checkpointing=1)
        told = any("strategy" in refusal.problem for refusal in refusals(by_block))
        assert told == (not strategy.reshard_each_micro_batch), strategy.name
        for setting in ({"experts": 2}, {"offload": "optimizer"}, {"prefetch": 2}):
            settings = settings_of_backend(strategy=strategy.name, **setting)
            assert bool(refusals(settings)) == (not strategy.sharded), strategy.name
    with pytest.raises(BadInputError, match=r"offload optimizer is not possible with sharding.strategy ddp"):
        refuse(settings_of_backend(strategy="ddp", offload="optimizer"))


def test_several_at_once_are_told_at_once() -> None:
    with pytest.raises(RecipeError) as error:
        Recipe.load("quickstart", ["sharding={experts: 2, strategy: ddp, prefetch: 1}"])
    assert [line.partition(" is not")[0].partition(" has no")[0] for line in error.value.problems] == [
        "sharding.experts",
        "sharding.prefetch",
    ]


def test_by_block_checkpoints_every_block_without_being_asked() -> None:
    words = ["sharding.accumulate=by_block", "training.gradient_accumulation_steps=2"]
    recipe = Recipe.load("quickstart", words)
    assert recipe.sharding.activation_checkpointing == 1
    assert recipe.origins()["sharding.activation_checkpointing"] == (1, "implied by sharding.accumulate")
    assert Recipe.load("quickstart", [*words, "sharding.activation_checkpointing=auto"]).sharding == recipe.sharding
    with pytest.raises(RecipeError, match=r"by_block is not possible with sharding.activation_checkpointing 2"):
        Recipe.load("quickstart", [*words, "sharding.activation_checkpointing=2"])
