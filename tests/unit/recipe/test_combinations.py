"""The table of what cannot go together: every row is told, by the recipe too, and says what to do."""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import toolkit
from toolkit.errors import BadInputError, RecipeError
from toolkit.recipe.combinations import COMBINATIONS, refusals, refuse
from toolkit.recipe.features import FEATURES, Settings
from toolkit.recipe.objectives.registry import SPECS
from toolkit.recipe.recipe import Recipe
from toolkit.sharding.plan.strategy import STRATEGIES

BASE = [
    "data.packing=null",
    "data.chat_template=null",
    "logging.held_out_samples=0",
    "training.eval_every_steps=null",
]


def given(*fields: str) -> dict[str, Any]:
    return {"given": frozenset(fields)}


def of(kind: str) -> dict[str, Any]:
    return {"objective": SPECS[kind]}


WORDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "ddp": ({"strategy": "ddp"}, ["sharding.strategy=ddp"]),
    "zero1, zero2": ({"strategy": "zero2"}, ["sharding.strategy=zero2"]),
    "hybrid": ({"strategy": "hybrid"}, ["sharding.strategy=hybrid"]),
    "offload": ({"offload": True}, ["sharding.offload=optimizer"]),
    "offload's details": (given("sharding.device_state_gib"), ["sharding.device_state_gib=1.0"]),
    "no offload": ({"offload": False}, ["sharding.offload=none"]),
    "by block": (
        {"accumulate": "by_block", "checkpointing": 1},
        ["sharding.accumulate=by_block", "training.gradient_accumulation_steps=2"],
    ),
    "by block, if faster": (
        {"accumulate": "auto", "checkpointing": "auto"},
        ["sharding.accumulate=auto", "sharding.activation_checkpointing=auto"],
    ),
    "one micro-batch": ({"micro_batches": 1}, ["training.gradient_accumulation_steps=1"]),
    "checkpoints": ({"checkpointing": 1}, ["sharding.activation_checkpointing=1"]),
    "no checkpoints": ({"checkpointing": None}, ["sharding.activation_checkpointing=null"]),
    "fewer than all checkpoints": ({"checkpointing": 2}, ["sharding.activation_checkpointing=2"]),
    "no checkpoints of all": ({"checkpointing": 2}, ["sharding.activation_checkpointing=2"]),
    "checkpoints on the host": (
        {"offload_checkpoints": True, "checkpointing": 1},
        ["sharding.offload_checkpoints=true", "sharding.activation_checkpointing=1"],
    ),
    "chunks": (
        {"chunk_tokens": True, "checkpointing": 1},
        ["sharding.chunk_tokens=64", "sharding.activation_checkpointing=1"],
    ),
    "fp16": ({"precision": "fp16"}, ["training.mixed_precision=fp16"]),
    "the CPU": ({"device": "cpu"}, []),
    "other optimizers": ({"optimizer": "muon"}, ["optimizer.kind=muon"]),
    "adapters": ({"adapter": True}, ["adapter.kind=lora", "export.merge=true"]),
    "quantised base": (
        {"is_quantised": True, "adapter": True},
        ["adapter.kind=lora", "adapter.quantize=nf4", "export.merge=true"],
    ),
    "compile": ({"compiled": True}, ["training.compile=true"]),
    "experts": ({"experts": True}, ["sharding.experts=2"]),
    "sequence": ({"sequence": True}, ["sharding.sequence=2"]),
    "tensor": ({"tensor": True}, ["sharding.tensor=2"]),
    "reshard_after_forward": ({"reshard_after_forward": 2}, ["sharding.reshard_after_forward=2"]),
    "prefetch": ({"prefetch": True}, ["sharding.prefetch=2"]),
    "float32 islands": ({"keeps_float32": "router.weight"}, []),
    "torch 2.15": ({"sums_in_autograd": True}, []),
    "own loop": ({"own_loop": True}, []),
    "moved biases": ({"moves_biases": True}, ["objective.router_bias_rate=0.01"]),
    "images": ({"has_images": True}, []),
    "seq2seq": (of("seq2seq"), ["objective.kind=seq2seq"]),
    "distillation": (of("distillation"), ["objective={kind: distillation, teacher: a/b}"]),
    "reference": (
        {**of("grpo"), **given("answers.file", "objective.beta")},
        [
            "objective={kind: grpo, max_new_tokens: 8, beta: 0.1, rewards: [{name: a, match: b}]}",
            "answers.file=a.jsonl",
            "training.eval_every_steps=5",
            "data.validation_fraction=null",
            "data.max_validation_samples=null",
        ],
    ),
    "padded rows": (of("token_classification"), ["objective.kind=token_classification"]),
    "compared completions": (of("kto"), ["objective.kind=kto"]),
    "no text written": (of("reward"), ["objective.kind=reward"]),
    "objectives but seq2seq": (of("causal_lm"), ["objective.kind=causal_lm"]),
    "objectives but reward": (of("preference"), ["objective.kind=preference"]),
    "no losses by source": (of("reward"), ["objective.kind=reward"]),
    "named sources": (given("data.train: name"), ["data.train=[{path: a.jsonl, name: a}]"]),
    "own loss": (given("objective.loss of your own"), ["objective.loss=mine.py:loss"]),
    "packing": (given("data.packing"), ["data.packing=true"]),
    "streaming": (
        given("data.streaming"),
        ["data.streaming=true", "data.validation_fraction=null", "data.max_validation_samples=null"],
    ),
    "split rows": (given("data.long_rows split"), ["data.long_rows=split"]),
    "truncated rows": (given("data.long_rows truncate"), ["data.long_rows=truncate"]),
    "epochs": (given("training.num_epochs"), ["training.num_epochs=1", "training.max_steps=null"]),
    "targets": (given("data.targets"), ["data.targets=all"]),
    "chat template": (given("data.template_arguments"), ["data.template_arguments={a: 1}"]),
    "BOS": (given("data.add_bos"), ["data.add_bos=false"]),
    "margins": (given("data.columns.margin"), ["data.columns.margin=gap"]),
    "sources and targets": (given("data.columns.target"), ["data.columns.target=body"]),
    "answers": (given("answers.file"), ["answers.file=a.jsonl"]),
    "answers beside rows": (given("answers.file"), ["answers.file=a.jsonl"]),
    "samples": (given("logging.held_out_samples"), ["logging.held_out_samples=1"]),
    "no adapters": ({"adapter": False}, ["adapter.kind=none"]),
    "adapters unmerged": ({"adapter": True}, ["adapter.kind=lora", "export.merge=false"]),
    "evaluations": (given("training.eval_every_steps"), ["training.eval_every_steps=5"]),
    "no evaluations": (given(), ["training.eval_every_steps=null"]),
    "held-out rows": (given("data.validation"), []),
    "own samples": (
        {**of("grpo"), **given("answers.file")},
        [
            "objective={kind: grpo, max_new_tokens: 8, rewards: [{name: a, match: b}]}",
            "answers.file=a.jsonl",
            "training.eval_every_steps=5",
            "data.validation_fraction=null",
            "data.max_validation_samples=null",
        ],
    ),
    "best by loss": (given(), ["training.best_by=loss"]),
    "dropout": (
        {"adapter": True, **given("adapter.dropout")},
        ["adapter={kind: lora, dropout: 0.1}", "export.merge=true"],
    ),
    "no held-out rows": (given(), ["data.validation_fraction=null", "data.max_validation_samples=null"]),
    "checkpoints between evaluations": (
        {"eval_steps": 3, "save_steps": 10},
        ["training.eval_every_steps=3", "checkpoint.every_steps=10"],
    ),
    "early stopping": (given("training.patience"), ["training.patience=2"]),
    "best checkpoint": (given("checkpoint.keep_best"), ["checkpoint={keep_best: true, every_steps: 10}"]),
    "best by answers": (given("training.best_by answers"), ["training.best_by=answers"]),
    "no use of the best": (given("answers.file"), ["answers.file=a.jsonl"]),
    "no answers": (given(), ["training.patience=2", "training.eval_every_steps=5"]),
    "held-out samples": (given("logging.held_out_samples"), ["logging.held_out_samples=2"]),
    "export": (given(), ["export.enabled=true"]),
    "no export": (given("export.enabled: false"), ["export={enabled: false}"]),
    "merged export": (given("export.merge"), ["export.merge=true"]),
    "added tokens": (
        given("model.add_tokens"),
        ["model.name_or_path=a/b", "model.train_tokenizer_vocab_size=null", "model.add_tokens=[x]"],
    ),
    "random weights": (given("model.config"), ["model.config={model_type: llama}"]),
    "started adapter": (given("adapter.start_from"), []),
}
"""Feature -> the settings that ask for it alone, and the words of a recipe, if it has any."""

USUAL = {"data.validation", "training.eval_every_steps", "training.patience"}
LACKS = {
    "own samples": {"data.validation", "training.patience"},
    "reference": {"data.validation", "training.patience"},
    "no held-out rows": USUAL,
    "no evaluations": {"training.eval_every_steps", "training.patience"},
    "no use of the best": {"training.patience"},
}
"""Feature -> the usual fields that it leaves out."""


def asked(names: tuple[str, ...]) -> Settings:
    """The settings of several features; what comes last counts, as the first is refused because of it."""
    settings = {key: value for name in names for key, value in WORDS[name][0].items()}
    usual = USUAL.difference(*(LACKS.get(name, set()) for name in names))
    return Settings(**{**settings, "given": usual.union(*(WORDS[name][0].get("given", ()) for name in names))})


def test_every_feature_is_asked_for_by_its_settings_alone() -> None:
    assert set(WORDS) == set(FEATURES)
    for name, (settings, _) in WORDS.items():
        assert FEATURES[name].is_asked(Settings(**settings)), name
    # These are on where nothing is said.
    plain = {name for name, feature in FEATURES.items() if feature.is_asked(Settings())}
    checkpoints = {"no checkpoints", "fewer than all checkpoints", "no checkpoints of all"}
    lacking = {"best by loss", "no adapters", "no answers", "no evaluations", "no held-out rows", "no use of the best"}
    assert plain == {*checkpoints, *lacking, "objectives but seq2seq", "objectives but reward", "export"}


def test_every_row_is_told_and_says_what_to_do() -> None:
    for combination in COMBINATIONS:
        told = [str(refusal) for refusal in refusals(asked(combination.names))]
        assert len(told) == 1, ("one pair, one sentence", combination.names)
        (sentence,) = told
        assert not re.search(r"[{}]|None", sentence)
        assert sentence.endswith(combination.mend)
        assert ("has no effect" if combination.is_idle else "is not possible") in sentence
        with pytest.raises(BadInputError, match=re.escape(sentence)):
            refuse(asked(combination.names))


def test_a_recipe_refuses_it_by_the_tables_sentence() -> None:
    wrong = []
    for names in (found.names for found in COMBINATIONS if all(WORDS[name][1] for name in found.names)):
        (refusal,) = refusals(asked(names))
        try:
            Recipe.load("quickstart", [*BASE, *(word for name in names for word in WORDS[name][1])])
            wrong.append((names, "taken"))
        except RecipeError as error:
            wrong += [(names, str(error))] if str(refusal) not in str(error) else []
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


def test_no_row_stands_twice_and_all_fields_are_looked_at() -> None:
    pairs = [frozenset(found.names) for found in COMBINATIONS]
    assert len(set(pairs)) == len(pairs)
    set_by_words = {key for settings, _ in WORDS.values() for key in settings}
    assert {field.name for field in fields(Settings)} == set_by_words


def test_by_block_is_refused_for_the_strategies_that_gather_once_a_step() -> None:
    for strategy in STRATEGIES.values():
        settings = Settings(strategy=strategy.name, accumulate="by_block", checkpointing=1)
        assert bool(refusals(settings)) == (not strategy.reshard_each_micro_batch), strategy.name
        for setting in ({"experts": True}, {"offload": True}, {"prefetch": True}):
            assert bool(refusals(Settings(strategy=strategy.name, **setting))) == (not strategy.sharded)  # type: ignore[arg-type]


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


def test_pairs_that_are_not_in_the_table_are_allowed() -> None:
    """No feature drags another refusal in: what two features are refused for is in the table, for both of them."""
    table = [set(found.names) for found in COMBINATIONS]
    for names in itertools.combinations(WORDS, 2):
        settings = asked(names)
        shown = {name for name, feature in FEATURES.items() if feature.is_asked(settings)}
        assert bool(refusals(settings)) == any(pair <= shown for pair in table), names
    assert refusals(replace(Settings(), strategy="zero3", offload=True, sequence=True, experts=True)) == []
