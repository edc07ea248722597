"""`toolkit generate --eval` with models that have a head: figures as a loop over transformers' model finds them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict
from pydantic import ValidationError
from support.texts import write_rows
from transformers import BertConfig, BertForTokenClassification, LlamaConfig, LlamaForSequenceClassification
from transformers import BertForSequenceClassification as Bert

from toolkit.data.templates.templates import MARKERS, use_template
from toolkit.data.tokens import tokenizer as tokenizers
from toolkit.errors import BadInputError
from toolkit.generation.api import evaluate
from toolkit.generation.text.command import run
from toolkit.generation.text.heads import Scores
from toolkit.generation.text.options import Options
from toolkit.objectives.tagging import entities
from toolkit.recipe.schema import DataSection
from toolkit.run.run import finetune

TEXTS = [f"the {who} said {what}" for who in ("king", "fox", "dog") for what in ("no", "yes to it", "that it rains")]
NAMES = ["red", "green", "blue"]
WIDTHS = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 128}
HEADS = {**WIDTHS, "num_hidden_layers": 1, "num_attention_heads": 2, "initializer_range": 0.8}


def saved(folder: Path, kind: Any, names: list[str], problem: str | None = None, **fields: Any) -> tuple[Any, Any]:
    """Saves a random model and its tokenizer into a folder; returns both, the model to evaluate."""
    tokens = tokenizers._train_byte_pairs(iter(TEXTS), 320, MARKERS["chatml"])
    use_template(tokens, "chatml")
    torch.manual_seed(3)
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
    config = LlamaConfig if kind is LlamaForSequenceClassification else BertConfig
    model = kind(config(**HEADS, **labels, problem_type=problem, pad_token_id=tokens.pad_token_id, **fields))
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return model.eval(), tokens


def logits_of(model: Any, tokens: Any, text: str) -> torch.Tensor:
    """The logits of a text by itself, so that nothing is padded."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens(text, return_tensors="pt")["input_ids"]).logits[0]
    return found


def scored(capsys: pytest.CaptureFixture[str], folder: Path, file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the command prints with --json, and the predictions that it writes."""
    run(Options(str(folder), evaluation=file, output=file.with_suffix(".said"), as_json=True, batch_size=4))
    said = file.with_suffix(".said").read_text(encoding="utf-8").splitlines()
    return json.loads(capsys.readouterr().out), [json.loads(line) for line in said]


def shares(right: int, said: int, true: int) -> dict[str, Any]:
    of_sides = {"precision": right / max(1, said), "recall": right / max(1, true)}
    return {**of_sides, "f1": 2 * right / max(1, said + true), "rows": true}


def test_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokens = saved(tmp_path / "m", Bert, NAMES)
    rows = [{"text": text, "label": NAMES[n * n % 3]} for n, text in enumerate(TEXTS)]
    logits = torch.stack([logits_of(model, tokens, row["text"]) for row in rows])
    said = [NAMES[number] for number in logits.argmax(dim=-1).tolist()]
    assert len(set(said)) > 1, "the case shows more than one class"
    true = [row["label"] for row in rows]
    counts = {a: {b: sum(pair == (a, b) for pair in zip(true, said, strict=True)) for b in NAMES} for a in NAMES}
    by_class = {n: shares(counts[n][n], said.count(n), true.count(n)) for n in NAMES if n in (*said, *true)}
    lines = ["text,label", *(f"{row['text']},{row['label']}" for row in rows), "a row of another class,pink"]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "m/recipe.yaml").write_text(
        "objective: {kind: sequence_classification, class_weights: balanced}\ndata: {max_dropped_fraction: 0.2}\n"
    )
    found, predictions = scored(capsys, tmp_path / "m", tmp_path / "t.csv")
    hits = sum(counts[name][name] for name in NAMES)
    assert found == {
        "samples": 9,
        "accuracy": hits / 9,
        "f1_macro": pytest.approx(sum(of["f1"] for of in by_class.values()) / len(by_class)),
        "confusion": [[counts[a][b] for b in NAMES] for a in NAMES],
        "by_class": by_class,
        "left_out": {"the label is not one of the classes": 1},
    }
    assert [(row["row"], row["label"], row["predicted"]) for row in predictions] == [
        (f"t.csv:{n}", a, b) for n, (a, b) in enumerate(zip(true, said, strict=True), 1)
    ]
    assert [row["score"] for row in predictions] == pytest.approx(logits.softmax(dim=-1).amax(dim=-1).tolist())
    assert evaluate(tmp_path / "m", rows).accuracy == hits / 9, "rows in memory"
    run(Options(str(tmp_path / "m"), evaluation=tmp_path / "t.csv"))
    told = capsys.readouterr().out
    assert f"Accuracy: {hits / 9:.1%}\n" in told
    assert "left out: the label is not one of the classes: 1\n" in told
    assert told.splitlines()[-1].split() == ["blue", *(str(counts["blue"][b]) for b in NAMES)]


def test_several_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokens = saved(tmp_path / "m", Bert, NAMES, "multi_label_classification")
    rows = [{"text": text, "label": NAMES[n % 3 : n % 4]} for n, text in enumerate(TEXTS)]
    logits = torch.stack([logits_of(model, tokens, row["text"]) for row in rows])
    labels = torch.tensor([[float(name in row["label"]) for name in NAMES] for row in rows])
    said, true = logits.sigmoid() > 0.5, labels.bool()
    sides = (said & true, said, true)
    by_class = {name: shares(*(int(of[:, n].sum()) for of in sides)) for n, name in enumerate(NAMES)}
    found, predictions = scored(capsys, tmp_path / "m", write_rows(tmp_path / "t.jsonl", rows))
    assert found == {
        # transformers' own loss of such a model
        "loss": pytest.approx(torch.nn.BCEWithLogitsLoss()(logits, labels).item()),
        "samples": 9,
        "accuracy": int((said == true).all(dim=1).sum()) / 9,
        "f1_macro": pytest.approx(sum(of["f1"] for of in by_class.values()) / 3),
        "by_class": {name: of for name, of in by_class.items() if of["rows"] or of["precision"]},
        "left_out": {},
    }
    assert [[name in row["predicted"] for name in NAMES] for row in predictions] == said.tolist()


def test_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokens = saved(tmp_path / "m", Bert, ["score"], "regression")
    rows = [{"text": text, "label": n * n / 7} for n, text in enumerate(TEXTS)]
    x = torch.stack([logits_of(model, tokens, row["text"]) for row in rows])[:, 0].double()
    y = torch.tensor([row["label"] for row in rows], dtype=torch.float64)
    found, predictions = scored(capsys, tmp_path / "m", write_rows(tmp_path / "t.jsonl", rows))
    assert found == {
        "loss": pytest.approx((x - y).square().mean().item(), rel=1e-5),
        "samples": 9,
        "mean_absolute_error": pytest.approx((x - y).abs().mean().item(), rel=1e-5),
        "pearson": pytest.approx(torch.corrcoef(torch.stack([x, y]))[0, 1].item(), rel=1e-4),
        "by_class": {},
        "left_out": {},
    }
    assert [row["predicted"] for row in predictions] == pytest.approx(x.tolist(), rel=1e-4)


TAGS = ["O", "B-PER", "I-PER"]


def test_tags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokens = saved(tmp_path / "m", BertForTokenClassification, TAGS)
    rows = [{"tokens": text.split(), "tags": [TAGS[len(word) % 3] for word in text.split()]} for text in TEXTS]
    said, hits = [], 0
    for row in rows:
        words = row["tokens"]
        text, tags = " ".join(words), logits_of(model, tokens, " ".join(words)).argmax(dim=-1)
        offsets = tokens(text, return_offsets_mapping=True)["offset_mapping"]
        starts = [len(" ".join(words[:n])) for n in range(len(words))]
        # The first token of a word, which may begin with the space before it.
        firsts = [next(n for n, (a, b) in enumerate(offsets) if a <= start < b) for start in starts]
        said.append([TAGS[number] for number in tags[firsts].tolist()])
        row["tags"] = said[-1] if row is rows[0] else row["tags"]
        hits += sum(a == b for a, b in zip(said[-1], row["tags"], strict=True))
    found, predictions = scored(capsys, tmp_path / "m", write_rows(tmp_path / "t.jsonl", rows))
    assert [row["predicted"] for row in predictions] == said
    both = [(entities(a), entities(row["tags"])) for a, row in zip(said, rows, strict=True)]
    right, claimed, true = (sum(map(len, parts)) for parts in zip(*((a & b, a, b) for a, b in both), strict=True))
    assert right, "the case shows an entity that is found"
    assert found.pop("by_class") == {"PER": (whole := shares(right, claimed, true))}
    assert {**whole, **found, "accuracy": hits / sum(map(len, said))} == {**found, **whole}


def test_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokens = saved(tmp_path / "m", LlamaForSequenceClassification, ["reward"], "regression")
    asked = [[{"role": "user", "content": text}] for text in TEXTS]
    yes, no = ([{"role": "assistant", "content": words}] for words in ("yes", "no to it"))
    rows = [{"prompt": each, "chosen": yes, "rejected": no} for each in asked]
    rewards = []
    for row in rows:
        for side in ("chosen", "rejected"):
            text = tokens.apply_chat_template(row["prompt"] + row[side], tokenize=False)
            rewards.append(logits_of(model, tokens, text)[0].item())
    pairs = torch.tensor(rewards).view(-1, 2)
    found, predictions = scored(capsys, tmp_path / "m", write_rows(tmp_path / "t.jsonl", rows))
    sides = [[row["chosen_reward"], row["rejected_reward"]] for row in predictions]
    assert torch.allclose(torch.tensor(sides), pairs, atol=1e-5)
    assert found["accuracy"] == (pairs[:, 0] > pairs[:, 1]).double().mean().item()
    losses = -torch.nn.functional.logsigmoid(pairs[:, 0] - pairs[:, 1])
    assert found["loss"] == pytest.approx(losses.mean().item(), rel=1e-4)


BY_TEXT: dict[str, Callable[[int], Any]] = {
    "class": lambda n: n % 3,
    "several": lambda n: NAMES[n % 3 : n % 4],
    "number": lambda n: n % 7 / 2,
}


@pytest.mark.parametrize("what", BY_TEXT)
def test_a_run_on_rows_of_memory_is_scored_as_it_was_evaluated(tmp_path: Path, what: str) -> None:
    rows: Any = [{"text": f"{TEXTS[n % 9]} {n}", "label": BY_TEXT[what](n)} for n in range(36)]
    if what == "class":  # its numbers have names
        rows = Dataset.from_list(rows).cast_column("label", ClassLabel(names=NAMES))
    held = rows.select(range(12)) if what == "class" else rows[:12]
    unset = ("data.validation_fraction", "objective.class_weights", "training.num_epochs", "training.eval_every_steps")
    settings: dict[str, Any] = {
        **dict.fromkeys(unset),
        "data.train": rows,
        "data.validation": held,
        "data.cache_dir": str(tmp_path / "cache"),
        "objective.labels": ["grade"] if what == "number" else None,
        "training.max_steps": 2,
        "training.output_dir": str(tmp_path / "run"),
    }
    result = finetune("classify", settings)
    report = json.loads((result.output_dir / "data_report.json").read_text(encoding="utf-8"))
    assert [report[split]["read"] for split in ("train", "validation")] == [36, 12], "each has a file of its own"
    last = [record for record in result.metrics if record["split"] == "eval"][-1]
    found = evaluate(result.output_dir, held)
    assert isinstance(found, Scores)
    assert found.figures.pop("confusion", None) == last.get("confusion")
    assert found.figures == pytest.approx({name: last[name] for name in found.figures}, rel=1e-5)
    assert (len(found.predictions), set(found.by_class) <= set(NAMES)) == (12, True)
    problems = {"class": "single_label_classification", "several": "multi_label_classification", "number": "regression"}
    config = json.loads((result.output_dir / "export/config.json").read_text(encoding="utf-8"))
    assert config["problem_type"] == problems[what]
    names = {"class": NAMES, "several": sorted(NAMES), "number": ["grade"]}
    assert list(config["id2label"].values()) == names[what]
    assert finetune("classify", settings).metrics == result.metrics, "the same rows are the same run, which is finished"


@pytest.mark.parametrize(
    ("rows", "options", "told"),
    [
        ([{"text": "a", "label": "pink"}], {}, "--eval: none of its rows (1) can be trained on. the label is not one"),
        ([{"text": "a", "label": "red"}], {"system": "b"}, "--system has no effect on"),
        pytest.param(
            [{"text": "a", "label": "red"}],
            {"device": "cuda"},
            "cuda is not available on this machine",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
        ),
        ([{"text": "a", "label": ["red"]}], {}, "write one label, no list, in each row"),
        ([{"text": "a", "label": "red"}], {"batch_size": 1}, "write a list in each row"),
    ],
)
def test_what_cannot_be_scored(tmp_path: Path, rows: list[Any], options: dict[str, Any], told: str) -> None:
    model, _ = saved(tmp_path / "m", Bert, NAMES)
    if "batch_size" in options:
        model.config.problem_type = "multi_label_classification"
        model.config.save_pretrained(tmp_path / "m")
    with pytest.raises(BadInputError) as error:
        run(Options(str(tmp_path / "m"), evaluation=write_rows(tmp_path / "t.jsonl", rows), **options))
    assert told in str(error.value)


def test_rows_of_memory_are_of_one_split() -> None:
    splits = DatasetDict(train=Dataset.from_list([{"text": "a", "label": "red"}]))
    for take in (lambda: evaluate("m", splits), lambda: DataSection.model_validate({"train": splits})):
        with pytest.raises((BadInputError, ValidationError), match="give those of one"):
            take()
