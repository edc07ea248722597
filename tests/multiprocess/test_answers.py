"""Answers to held-out prompts while a run trains: those of the export afterwards, on one and two ranks."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.cases import cases
from support.four_bits import as_dequantised
from support.moe import mixture
from support.ranks import meet, run_on_ranks
from support.runs import records_of
from support.texts import make_texts, write_rows
from support.tiny import llama, recipe_values, with_sections
from transformers import AutoModelForCausalLM, AutoTokenizer

import toolkit
from toolkit.data.templates.templates import MARKERS, use_template
from toolkit.data.tokens.tokenizer import _train_byte_pairs
from toolkit.recipe.schema import AnswersSection

FACTS = {
    "Where does the king walk?": "by the river",
    "Who sang?": "a fox",
    "What of?": "bread and wine",
    "And the moon?": "it was high over the whole of the old town",
    "Then?": "all lay",
}
"""Five of them: in batches of two, one of two ranks has none in the last round."""
SCORES = """
def equal(completion, row):
    return completion.strip() == row["messages"][-1]["content"]
"""
MAX_TOKENS = 12
FIGURES = ("answer_accuracy", "answer_stopped", "answer_mean_tokens")
ADAPTED: dict[str, dict[str, Any]] = {
    "model": {"name_or_path": "zero3/export"},  # adapters of random weights learn little
    "adapter": {"kind": "lora", "r": 4},
    "optimizer": {"learning_rate": 2e-3},
}
NF4 = {**ADAPTED, "adapter": {"kind": "lora", "r": 4, "quantize": "nf4", "double_quantization": True}}
TABLES = cases(__file__)
RUNS: dict[str, dict[str, dict[str, Any]]] = TABLES["RUNS"]


def recipe_of(folder: Path, name: str, **sections: dict[str, Any]) -> toolkit.Recipe:
    values = recipe_values(folder / "model", folder / "facts.jsonl", folder / name, folder / "cache", max_steps=24)
    values["data"] |= {"validation": str(folder / "facts.jsonl"), "max_length": 64}
    values["training"] |= {"eval_every_steps": 8, "micro_batch_size": 2}
    values["optimizer"] = {"learning_rate": 2e-2}
    values["answers"] = {"file": str(folder / "facts.jsonl"), "max_new_tokens": MAX_TOKENS, "batch_size": 2}
    values = with_sections(values, sections)
    values["model"]["name_or_path"] = str(folder / values["model"]["name_or_path"])
    return toolkit.Recipe.from_mapping(values)


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [line for line in records_of(run) if line["split"] == "eval"]


def curve(run: Path) -> list[list[Any]]:
    return [[line.get(key) for key in ("step", *FIGURES)] for line in evaluations(run)]


ON_FOUR: dict[str, dict[str, dict[str, Any]]] = {
    "nf4-zero3-4": {"sharding": {"strategy": "zero3"}, **NF4},
    "nf4-ddp-4": {"sharding": {"strategy": "ddp"}, **NF4},
    "shared-4": {"sharding": {"strategy": "zero3", "sequence": 2}, "training": {"micro_batch_size": 2}},
    "tensor-4": {"sharding": {"strategy": "zero3", "tensor": 2}, "training": {"micro_batch_size": 2}},
    "experts-4": {"model": {"name_or_path": "experts_model"}, "sharding": {"strategy": "zero3", "experts": 2}},
}
"""With rows of two, one of four ranks has no prompt of its own."""


def on_four_ranks(folder: Path) -> None:
    for name, sections in ON_FOUR.items():
        meet()
        toolkit.finetune(recipe_of(folder, name, **{"training": {"micro_batch_size": 1}, **sections}))


def on_two_ranks(folder: Path, names: list[str]) -> None:
    for name in names:
        meet()
        toolkit.finetune(recipe_of(folder, name, **RUNS[name]))
    if os.environ["RANK"] == "0":  # the others have no such module
        sys.path.insert(0, str(folder))
    scored = {"compare": "scores_of_a_test:equal"}
    meet()
    unasked = recipe_of(folder, "unasked", **RUNS["experts"])
    toolkit.finetune(unasked.model_copy(update={"answers": AnswersSection()}))
    begun = recipe_of(folder, "begun", checkpoint={"every_steps": 8}, answers=scored, **RUNS["zero3"])
    meet()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.run.parts.answers.Answers.at_evaluation", fail_at(3))
        with pytest.raises(RuntimeError, match="the power is out"):
            toolkit.finetune(begun)
    assert [line["step"] for line in evaluations(folder / "begun")] == [0, 8]
    meet()
    toolkit.finetune(begun)
    # By the answers, which are those of the second evaluation as of the third, the first of the two is the best.
    kept = {"every_steps": 1, "keep_last": 1, "keep_best": True}
    training = {"max_steps": 4, "eval_every_steps": 1, "best_by": "answers", "patience": 2}
    meet()
    toolkit.finetune(
        recipe_of(folder, "chosen", checkpoint=kept, training=training, optimizer={"learning_rate": 1e-30})
    )


def fail_at(evaluation: int) -> Any:
    from toolkit.run.parts.answers import Answers

    at_evaluation = Answers.at_evaluation
    calls: list[None] = []

    def failing(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == evaluation:
            raise RuntimeError("the power is out")
        return at_evaluation(*args)

    return failing


def save_chat_model(folder: Path) -> None:
    """A Llama and a mixture of experts of random weights, whose tokenizer has chatml's markers."""
    tokenizer = _train_byte_pairs(iter([*make_texts(20), *FACTS, *FACTS.values()]), 330, MARKERS["chatml"])
    tokenizer.eos_token = "<|endoftext|>"
    use_template(tokenizer, "chatml")
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 48, "intermediate_size": 96}
    llama(**sizes, bos_token_id=None, eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    experts = folder.with_name("experts_model")
    tokenizer.save_pretrained(experts)
    mixture(
        "qwen3_moe", **sizes, max_position_embeddings=64, pad_token_id=None, eos_token_id=tokenizer.eos_token_id
    ).save_pretrained(experts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    save_chat_model(folder / "model")
    turns = (({"role": "user", "content": q}, {"role": "assistant", "content": a}) for q, a in FACTS.items())
    write_rows(folder / "facts.jsonl", ({"messages": row} for row in turns))
    (folder / "scores_of_a_test.py").write_text(SCORES)
    run_on_ranks(on_two_ranks, 2, folder, list(RUNS))
    return folder


def loaded(export: Path) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(export)
    if not (export / "adapter_config.json").exists():
        return tokenizer, AutoModelForCausalLM.from_pretrained(export).eval()
    base = json.loads((export / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = AutoModelForCausalLM.from_pretrained(base)
    if "nf4" in export.parent.name:
        as_dequantised(model, kept=["lm_head"], double=True)
    return tokenizer, peft.PeftModel.from_pretrained(model, export).eval()


def asked(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@torch.no_grad()
def by_hand(export: Path) -> list[float]:
    """The figures of the export, each answer alone, token by token, without padding and without a cache."""
    tokenizer, model = loaded(export)
    stops = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    right, stopped, tokens = 0, 0, 0
    for question, answer in FACTS.items():
        ids = tokenizer(asked(question))["input_ids"]
        found: list[int] = []
        while len(found) < MAX_TOKENS:
            token = int(model(input_ids=torch.tensor([ids + found])).logits[0, -1].argmax())
            if token in stops:
                stopped += 1
                break
            found.append(token)
        right += tokenizer.decode(found, skip_special_tokens=True).strip() == answer
        tokens += len(found)
    return [right / len(FACTS), stopped / len(FACTS), tokens / len(FACTS)]


@pytest.mark.parametrize("name", RUNS)
def test_the_last_figures_are_those_of_the_export(folder: Path, name: str) -> None:
    require_figures_of_the_export(folder, name)


@pytest.mark.grid
def test_four_ranks_have_the_figures_of_the_export_and_the_curve_of_two(folder: Path) -> None:
    run_on_ranks(on_four_ranks, 4, folder)
    for name in ON_FOUR:
        require_figures_of_the_export(folder, name)
        assert curve(folder / name) == curve(folder / name.split("-")[0]), name


def require_figures_of_the_export(folder: Path, name: str) -> None:
    assert [step for step, *_ in curve(folder / name)] == [0, 8, 16, 24]
    last = evaluations(folder / name)[-1]
    assert last["answer_accuracy"] > 0, "it has learned something that other weights would not say"
    assert [last[key] for key in FIGURES] == by_hand(folder / name / "export")
    found = toolkit.evaluate(folder / name, folder / "facts.jsonl", max_new_tokens=MAX_TOKENS, batch_size=2)
    assert {key: last[f"answer_{key}"] for key in ("accuracy", "stopped", "mean_tokens")} == found.shares()


def test_answers_change_nothing_that_is_learned(folder: Path) -> None:
    """Neither balance losses nor loads of experts count the tokens of answers."""
    one, other = (folder / f"{name}/export/model.safetensors" for name in ("experts", "unasked"))
    assert one.read_bytes() == other.read_bytes()
    told = [
        [
            [line.get(key) for key in ("loss", "grad_norm", "balance_loss", "expert_load")]
            for line in records_of(folder / name)
        ]
        for name in ("experts", "unasked")
    ]
    assert told[0] == told[1]
    assert told[0][1][3] is not None
    assert "answer_accuracy" not in evaluations(folder / "unasked")[-1]


def test_averaged_weights_answer_where_they_are_evaluated(folder: Path) -> None:
    """The last weights themselves are those of the run without averages: ZeRO 2 and 3 train alike."""
    assert curve(folder / "averaged") != curve(folder / "zero3")


def test_a_run_that_fails_between_its_answers_goes_on_to_the_same_curve(folder: Path) -> None:
    """A function of the user's, of rank 0 alone, scores its answers, where they are compared in the other run."""
    assert curve(folder / "begun") == curve(folder / "zero3")
    source = hashlib.sha256(SCORES.encode()).hexdigest()
    assert json.loads((folder / "begun/export/training.json").read_text())["code"]["answers.compare"] == source
    manifests = [json.loads(path.read_text()) for path in (folder / "begun/checkpoints").glob("step_*/manifest.json")]
    assert {manifest["named"]["answers.compare"] for manifest in manifests} == {source}
    assert f"answers.compare scores_of_a_test:equal (SHA-256 {source[:16]})" in (
        (folder / "begun/export/README.md").read_text()
    )


def test_one_rank_has_the_curve_of_two(folder: Path) -> None:
    toolkit.finetune(recipe_of(folder, "alone", training={"micro_batch_size": 4}))
    assert curve(folder / "alone") == curve(folder / "zero3")


def test_answers_decide_about_the_end(folder: Path) -> None:
    found = [line["answer_accuracy"] for line in evaluations(folder / "chosen")]
    assert found == [by_hand(folder / "chosen/export")[0]] * 3, "and the patience was over"
    assert [path.name for path in sorted((folder / "chosen/checkpoints").iterdir())] == [
        "step_00000001",
        "step_00000002",
    ]
    page = (folder / "chosen/report.html").read_text()
    assert "no higher share of right answers in 2 evaluations (training.patience)" in page
    assert 'id="chart-answers"' in (folder / "zero3/report.html").read_text()
