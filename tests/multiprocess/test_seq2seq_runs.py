"""Sequence to sequence: the run is a plain loop of transformers' own model with each row in a forward of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.plain_loop import in_turn, plain_loop
from support.ranks import run_on_ranks
from support.runs import finetuned
from support.texts import make_texts, write_rows
from support.tiny import VOCAB_SIZE, recipe_values
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BartConfig, T5Config

from toolkit.data.tokens.tokenizer import _train_byte_pairs

STEPS, ROWS_PER_STEP, PREFIX = 4, 8, "turn: "
SIZES = {"d_model": 32, "pad_token_id": 1, "eos_token_id": 0}
LAYERS = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2)
OFF = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)


def rows(count: int, seed: int) -> list[dict[str, str]]:
    """The first words of a text, in few or in many, and the same the other way round."""
    made = []
    for number, text in enumerate(make_texts(count, seed=seed)):
        words = text.split()[: 3 + 5 * number % 13]
        made.append({"document": " ".join(words), "summary": " ".join(words[::-1][: 1 + number % 4])})
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seq2seq")
    tokenizer = _train_byte_pairs(iter(make_texts(60)), VOCAB_SIZE)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    own = {**SIZES, "vocab_size": len(tokenizer)}
    configs = {
        # Relative positions, a head that is tied to the embeddings, whose inputs are scaled.
        "t5": T5Config(**own, d_kv=8, d_ff=64, num_layers=3, num_heads=4, dropout_rate=0.0, decoder_start_token_id=1),
        # Learned positions, and numbers that are added to the logits.
        "bart": BartConfig(
            **own, **LAYERS, **OFF, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
            decoder_start_token_id=0, forced_eos_token_id=None,
        ),
    }  # fmt: skip
    torch.manual_seed(1)
    for name, config in configs.items():
        model = AutoModelForSeq2SeqLM.from_config(config)
        if name == "bart":
            model.final_logits_bias.normal_()
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "scores_of_seq2seq.py").write_text(DIGEST)
    write_rows(folder / "asked.jsonl", ({"prompt": text} for text in ASKED))
    for name, count, seed in (("train", 26, 6), ("held_out", 13, 7)):
        write_rows(folder / f"{name}.jsonl", rows(count, seed))
    return folder


ANSWERED, ANSWER_TOKENS = ("t5", "bart", "ddp", "lora"), 7
ASKED = [PREFIX + text for text in ("the king", "a fox by the river and the old town", "bread", "who sang of the moon")]
DIGEST = """
def digest(completion, row):
    return sum(completion.encode()) % 997 / 997
"""
"""A score by which any other text would be noticed."""
CHECKPOINTED = {"strategy": "zero3", "activation_checkpointing": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", {"sharding": CHECKPOINTED}),
    "bart": ("bart", {}),
    "ddp": ("t5", {"sharding": {"strategy": "ddp"}}),
    "half": ("t5", {}),
    "resumed": ("t5", {}),
    "lora": ("bart", {"adapter": {"kind": "lora", "r": 2}, "export": {"merge": True}}),
}


def runs(folder: Path, names: list[str]) -> dict[str, Any]:
    ranks, found = int(os.environ["WORLD_SIZE"]), {}
    sys.path.insert(0, str(folder))
    for name in names:
        kind, sections = CASES[name]
        values = recipe_values(folder / kind, folder / "train.jsonl", folder / f"{name}-{ranks}", folder / f"c-{ranks}")
        values["data"] |= {
            "max_length": 64,
            "max_target_length": 32,
            "source_prefix": PREFIX,
            "validation": str(folder / "held_out.jsonl"),
        }
        values["objective"] = {"kind": "seq2seq"}
        values["optimizer"] = {"learning_rate": 3e-3, "weight_decay": 0.0, "eps": 1e-4}
        values["schedule"] = {"kind": "constant"}
        size = ROWS_PER_STEP // (2 * ranks)
        values["training"] |= {"max_steps": STEPS, "micro_batch_size": size, "gradient_accumulation_steps": 2}
        if name == kind:
            values["logging"] = {"held_out_samples": 2}
        if name in ("half", "resumed"):
            values["training"]["max_steps"] = 2 if name == "half" else STEPS
            values["checkpoint"] = {"every_steps": 2}
            if name == "resumed":
                values["checkpoint"] = {"resume": str(folder / f"half-{ranks}/checkpoints/step_00000002")}
        if name in ANSWERED:
            values["answers"] = {"file": str(folder / "asked.jsonl"), "compare": "scores_of_seq2seq:digest"}
            values["answers"] |= {"max_new_tokens": ANSWER_TOKENS, "batch_size": 2}
        result = finetuned({**values, "sharding": {"strategy": "zero3"}, **sections})
        written = None
        if name == kind:
            written = json.loads((folder / f"{name}-{ranks}/samples.json").read_text())[0]["after"]
        found[name] = (result.metrics, result.logits_difference, written)
    return found


def plain(folder: Path, kind: str) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder / kind)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / kind, dtype=torch.float32).train()

    def loss_of(batch: list[dict[str, str]]) -> torch.Tensor:
        """Of all targets."""
        losses, count = [], 0
        for row in batch:
            source = torch.tensor([tokenizer(PREFIX + row["document"])["input_ids"]])
            labels = torch.tensor([[*tokenizer(row["summary"])["input_ids"], tokenizer.eos_token_id]])
            logits = model(input_ids=source, labels=labels).logits  # the model shifts the labels itself
            losses.append(F.cross_entropy(logits[0], labels[0], reduction="sum"))
            count += labels.numel()
        return torch.stack(losses).sum() / count

    steps, held_out = in_turn(rows(26, 6), ROWS_PER_STEP, STEPS), rows(13, 7)
    trained = plain_loop(model, steps, loss_of, rates=3e-3, eps=1e-4)
    with torch.no_grad():
        loss = loss_of(held_out).item()
    first = tokenizer(PREFIX + held_out[0]["document"], return_tensors="pt", return_token_type_ids=False)
    written = model.eval().generate(**first, max_new_tokens=31, do_sample=False, num_beams=1)[0, 1:]
    return {
        "losses": trained.losses,
        "norms": trained.norms,
        "held_out": loss,
        "tokens": sum(len(tokenizer(row["summary"])["input_ids"]) + 1 for row in held_out),
        "text": tokenizer.decode(written, skip_special_tokens=True),
    }


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.grid) for n in (1, 4))])
def test_the_run_is_a_plain_loop(ranks: int, folder: Path) -> None:
    names = list(CASES) if ranks == 2 else ["t5", "bart"]
    found = run_on_ranks(runs, ranks, folder, names)[0]
    expected = {kind: plain(folder, kind) for kind in ("t5", "bart")}
    for name in (name for name in names if name not in ("half", "lora")):
        metrics, difference, written = found[name]
        right = expected[CASES[name][0]]
        steps = [record for record in metrics if record["split"] == "train"]
        losses, norms = right["losses"][-len(steps) :], right["norms"][-len(steps) :]
        assert [record["loss"] for record in steps] == pytest.approx(losses, rel=1e-5), name
        assert [record["grad_norm"] for record in steps] == pytest.approx(norms, rel=1e-4), name
        last = [record for record in metrics if record["split"] == "eval"][-1]
        assert last["loss"] == pytest.approx(right["held_out"], rel=1e-5), name
        assert last["target_tokens"] == right["tokens"], name
        assert difference < 1e-5, name
        if name in expected:
            assert written == right["text"], name
    if ranks == 2:
        assert [record["step"] for record in found["resumed"][0] if record["split"] == "train"][-1] == STEPS
        first = next(record for record in found["lora"][0] if record["split"] == "train")
        assert first["loss"] == pytest.approx(expected["bart"]["losses"][0], rel=1e-5)
        before, *_, after = (record["loss"] for record in found["lora"][0] if record["split"] == "eval")
        assert after < before
        assert found["lora"][1] < 1e-4
        generated(folder, expected["t5"]["text"])
        for name in ANSWERED:
            last = [record for record in found[name][0] if record["split"] == "eval"][-1]
            figures = [last[f"answer_{figure}"] for figure in ("accuracy", "stopped", "mean_tokens")]
            assert figures == pytest.approx(answered_by_hand(folder / f"{name}-2/export"), rel=1e-12), name


@torch.no_grad()
def answered_by_hand(export: Path) -> list[float]:
    """The figures of the export, each target alone, token by token, without padding and without a cache."""
    tokenizer, model = AutoTokenizer.from_pretrained(export), AutoModelForSeq2SeqLM.from_pretrained(export).eval()
    scores, stopped, lengths = [], 0, []
    for question in ASKED:
        source, target = tokenizer(question, return_tensors="pt")["input_ids"], [model.config.decoder_start_token_id]
        while len(target) <= ANSWER_TOKENS:
            token = int(model(input_ids=source, decoder_input_ids=torch.tensor([target])).logits[0, -1].argmax())
            if token == tokenizer.eos_token_id:
                stopped += 1
                break
            target.append(token)
        text = tokenizer.decode(target[1:], skip_special_tokens=True)
        scores.append(sum(text.encode()) % 997 / 997)
        lengths.append(len(target) - 1)
    return [sum(scores) / len(ASKED), stopped / len(ASKED), sum(lengths) / len(ASKED)]


def generated(folder: Path, expected: str) -> None:
    """`toolkit generate` writes what transformers' generate does, whatever prompts stand beside it."""
    from toolkit.generation.api import generate

    prompts = [PREFIX + row["document"] for row in rows(13, 7)[:3]]
    for batch_size in (1, 3):
        found = generate(folder / "t5-2", prompts, temperature=0.0, max_new_tokens=31, batch_size=batch_size)
        assert found[0] == expected
    alone = generate(folder / "bart-2", prompts, temperature=0.0, max_new_tokens=9, batch_size=1)
    assert generate(folder / "bart-2", prompts, temperature=0.0, max_new_tokens=9, batch_size=3) == alone
