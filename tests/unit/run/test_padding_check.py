"""Models in which padding changes a row: a micro-batch is one row, and completions of a pair get rows of their own."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.packed_rows import Documents
from support.ranks import run_on_ranks
from support.refusals import finetune
from support.texts import write_rows
from support.tiny import llama, recipe_values, save_llama, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BartConfig
from transformers import BartForSequenceClassification as Bart

from toolkit.data.samples.documents_apart import documents_apart, rows_without_padding, without_padding
from toolkit.data.samples.packing import whole
from toolkit.data.samples.samples import IGNORED, Batch, TextSamples, sample_of, segments_of, stack
from toolkit.errors import BadInputError
from toolkit.objectives.build import build_objective
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.classification import SequenceClassification
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.run.checks import padding_check
from toolkit.run.checks.padding_check import changed_by_padding

LENGTHS = (5, 11, 8)
CPU = torch.device("cpu")


def rows(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 60, (length,), generator=generator) for length in LENGTHS[:count]]


class Labelled:
    """As the toolkit pads them, with a row that only fills up the batch."""

    continues_text = False

    def __len__(self) -> int:
        return len(LENGTHS)

    def batch(self, numbers: list[int], fill: bool = False) -> Batch:
        chosen = [rows()[number] for number in numbers] + [torch.tensor([7])] * fill
        ids = nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        lengths = torch.tensor([len(row) for row in chosen])
        labels = torch.tensor([number % 2 for number in numbers] + [IGNORED] * fill)
        lengths[len(numbers) :] = 0
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": labels, "lengths": lengths}


def classifier(kind: str) -> Any:
    torch.manual_seed(0)
    config = tiny_config(kind)
    config.num_labels = 2
    for name in [name for name in config.to_dict() if "drop" in name and name != "drop_path_rate"]:
        setattr(config, name, 0.0)
    model = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.train()


@pytest.mark.parametrize(("kind", "changes"), [("bert", False), ("fnet", True), ("xlnet", True), ("llama", False)])
def test_padding_that_changes_rows_is_found_and_cut_off(kind: str, changes: bool) -> None:
    model = classifier(kind)
    inner = SequenceClassification(model, 2)
    told = changed_by_padding(model, inner, Labelled(), CPU, False)  # type: ignore[arg-type]
    assert (told is not None) == changes
    if told is not None:
        assert "padding changes the logits of a row by" in told
        assert type(model).__name__ in told
    assert model.training
    for number, row in enumerate(rows()):
        batch = Labelled().batch([number])
        batch |= {name: F.pad(batch[name], (0, 3)) for name in ("input_ids", "attention_mask")}
        expected = F.cross_entropy(model(row[None]).logits, batch["labels"])
        found = inner.loss_sum(model, without_padding(batch) if changes else batch)
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("name", ["CHECKED_TOKENS", "FEW_TOKENS"])
def test_long_rows_of_text_are_compared_by_their_beginnings(
    monkeypatch: pytest.MonkeyPatch, name: str, mixes: bool
) -> None:
    """Both rows are longer than what is compared; one is cut shorter than the other, so that it is padded."""
    monkeypatch.setattr(padding_check, name, 8)
    if name == "CHECKED_TOKENS":
        monkeypatch.setattr(padding_check, "attends_in_full", lambda _model: False)
    model, seen = llama("sdpa"), []

    def observe(_module: nn.Module, _args: Any, given: Any) -> None:
        seen.append(tuple(given["input_ids"].shape))

    def mixed(_module: nn.Module, _args: Any, output: Any) -> Any:
        output.logits = output.logits + output.logits.mean(dim=1, keepdim=True)
        return output

    model.register_forward_pre_hook(observe, with_kwargs=True)
    if mixes:
        model.register_forward_hook(mixed)
    documents = Documents(12)
    documents.rows = [np.arange(1, 30), np.arange(1, 33)]
    documents.targets = [np.ones(29, dtype=bool), np.ones(32, dtype=bool)]
    pieces = whole(np.arange(2), np.array([29, 32]), 32)
    samples = TextSamples(documents, pieces, [1, 2], 32, False, 0)
    told = changed_by_padding(model, CausalLM(model), samples, CPU, False)
    assert seen == [(1, 4), (1, 8), (2, 8)]
    assert (told is not None) == mixes


def test_a_model_that_cannot_run_on_a_row_is_refused_by_name() -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    model = Bart(BartConfig(vocab_size=64, **sizes, encoder_attention_heads=2, decoder_attention_heads=2))
    objective = SequenceClassification(model, 3)
    with pytest.raises(BadInputError, match=r"data\.train: Bart\w+ cannot run on a row.*<eos>.*tokenizer that belongs"):
        changed_by_padding(model, objective, Labelled(), CPU, False)  # type: ignore[arg-type]


def test_rows_of_sources_and_targets_are_cut_each_to_its_own_length() -> None:
    mask = (torch.arange(6) < torch.tensor([[4], [6]])).long()
    batch = {"input_ids": torch.arange(12).view(2, 6), "attention_mask": mask, "lengths": torch.tensor([4, 6])}
    batch |= {"labels": torch.arange(6).view(2, 3), "target_lengths": torch.tensor([3, 2])}
    first, second = rows_without_padding(batch)
    assert first["input_ids"].tolist() == [[0, 1, 2, 3]]
    assert first["labels"].tolist() == [[0, 1, 2]]
    assert second["attention_mask"].tolist() == [[1] * 6]
    assert second["labels"].tolist() == [[3, 4]]


def test_a_row_that_only_fills_up_keeps_a_token_and_what_is_of_no_token_stays() -> None:
    batch = Labelled().batch([0], fill=True)
    filler = {name: value[1:] for name, value in batch.items()} | {"labels": torch.ones(1, 3), "window": torch.ones(2)}
    found = without_padding(filler)
    assert found["input_ids"].tolist() == [[7]]
    assert (found["labels"].shape, found["window"].shape) == ((1, 3), (2,))


def values_of(place: Path, strategy: str, size: int) -> dict[str, Any]:
    values = recipe_values(place / "fnet", place / "classes.jsonl", place / strategy, place / "cache")
    values["objective"] = {"kind": "sequence_classification"}
    values["sharding"] = {"strategy": strategy}
    values["optimizer"] = {"learning_rate": 10.0, "beta1": 0.0, "beta2": 0.0, "eps": 100.0, "weight_decay": 0.0}
    values["schedule"] = {"kind": "constant"}
    values["training"] |= {"max_steps": 2, "micro_batch_size": size, "max_grad_norm": None}
    values["training"]["gradient_accumulation_steps"] = 4 // size
    return values


def trained(folder: str, strategy: str) -> dict[str, Any]:
    from toolkit import finetune as run
    from toolkit.recipe.recipe import Recipe

    result = run(Recipe.from_mapping(values_of(Path(folder), strategy, 1)))
    return {"losses": [record["loss"] for record in result.metrics if "learning_rate" in record]}


@pytest.mark.slow
def test_ranks_step_as_a_plain_loop_of_rows(tmp_path: Path) -> None:
    texts = [
        " ".join(["a", "king", "and", "a", "queen", "walked", "by", "the", "river"][: 2 + i % 7]) for i in range(8)
    ]
    save_llama(tmp_path / "fnet", texts, tied=False)
    config = tiny_config("fnet")
    config.vocab_size, config.num_labels, config.hidden_dropout_prob = 320, 2, 0.0
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path / "fnet")
    classes = [{"text": text, "label": "ab"[i % 2]} for i, text in enumerate(texts)]
    write_rows(tmp_path / "classes.jsonl", classes)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "fnet")
    optimizer = torch.optim.AdamW(model.parameters(), lr=10.0, betas=(0.0, 0.0), eps=100.0, weight_decay=0.0)
    expected = []
    for _ in range(2):
        ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in texts]
        losses = [F.cross_entropy(model(row).logits, torch.tensor([i % 2])) for i, row in enumerate(ids)]
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    (tmp_path / "padded.yaml").write_text(json.dumps(values_of(tmp_path, "ddp", 2)))
    told = finetune(str(tmp_path / "padded.yaml"), "--dry-run")
    named = r"training.micro_batch_size: 2 rows would be padded, and padding changes the logits of a row by"
    assert told.problems(named) == [], told.told
    assert "set training.micro_batch_size=1, which pads none, and training.gradient_accumulation_steps=4" in told.told
    for strategy in ("ddp", "zero3"):
        for found in run_on_ranks(trained, 2, str(tmp_path), strategy):
            assert found["losses"] == pytest.approx(expected, rel=1e-5), strategy
        report = (tmp_path / strategy / "report.html").read_text()
        assert "a micro-batch is one row: padding changes the logits of a row" in report


def pairs(count: int) -> tuple[Batch, list[tuple[list[int], list[bool]]]]:
    """A micro-batch of two rows, each of `count` pairs, and the documents one by one."""
    generator = torch.Generator().manual_seed(2)
    documents = []
    for number in range(4 * count):
        ids = torch.randint(3, 60, (6 + number % 3,), generator=generator).tolist()
        documents.append((ids, [False] * 3 + [True] * (len(ids) - 3)))
    samples = [documents[: 2 * count], documents[2 * count :]]
    arrays = [[(torch.tensor(ids).numpy(), targets) for ids, targets in sample] for sample in samples]
    batch = stack([sample_of(sample, 40, 0) for sample in arrays])
    batch["segments"] = segments_of(arrays, batch["input_ids"])
    batch["reference"] = torch.zeros(2 * count, 2)
    batch["margin"] = torch.zeros(2 * count)
    return batch, documents


def test_documents_get_rows_of_their_own() -> None:
    batch, documents = pairs(2)
    found = documents_apart(batch)
    for number, (ids, targets) in enumerate(documents):
        length = len(ids)
        assert found["lengths"][number] == length
        assert found["input_ids"][number, :length].tolist() == ids
        assert found["position_ids"][number, :length].tolist() == list(range(length))
        learned = [token if learned else IGNORED for token, learned in zip(ids, targets, strict=True)]
        assert found["labels"][number, :length].tolist() == learned
        assert found["segments"][number, :length].tolist() == [number] * length
        assert set(found["segments"][number, length:].tolist()) <= {-1}


def log_probability(model: Any, ids: list[int], targets: list[bool]) -> torch.Tensor:
    scores = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(dim=-1)
    return scores.gather(1, torch.tensor(ids[1:])[:, None])[torch.tensor(targets[1:])].sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["mamba", "lfm2", "gpt_oss"])
@pytest.mark.parametrize("objective", ["preference", "kto"])
def test_completions_that_cannot_share_a_row_are_judged_as_if_alone(kind: str, objective: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3)
    batch, documents = pairs(2)
    if objective == "kto":
        batch |= {"good": torch.tensor([True, False] * 4), "reference": torch.zeros(8, 2)}
        batch |= {f"kl_{name}": value for name, value in batch.items() if name not in ("good", "reference", "margin")}
    found = build_objective(ObjectiveSection(kind=objective), model, True, None, apart=True)  # type: ignore[arg-type]
    sums, counts = found.log_probabilities(model, found.on_host(batch))
    expected = torch.stack([log_probability(model, ids, targets) for ids, targets in documents])
    assert counts.flatten()[0] == sum(documents[0][1])
    torch.testing.assert_close(sums.flatten() if objective == "preference" else sums[:, 0], expected)
    found.loss_sum(model, found.on_host(batch)).backward()
    assert found.count_targets(batch) == (4 if objective == "preference" else 8)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    save_llama(tmp_path / "llama", ["a king and a queen"], tied=True)
    sides = {"prompt": "a king", "chosen": " and a queen", "rejected": " and a king"}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(sides) + "\n") * 4)
    return tmp_path


@pytest.mark.parametrize("kind", ["preference", "kto"])
def test_a_run_gives_completions_rows_of_their_own_and_says_so(place: Path, kind: str) -> None:
    values = recipe_values(place / "llama", place / "pairs.jsonl", place / "out", place / "cache")
    if kind == "kto":
        judged = [{"prompt": "a king", "completion": " and a queen", "label": i % 2 == 0} for i in range(4)]
        write_rows(place / "pairs.jsonl", judged)
    config = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    values["model"] = {"config": config, "tokenizer": str(place / "llama")}
    values["objective"] = {"kind": kind}
    (place / "recipe.yaml").write_text(json.dumps(values))
    run = functools.partial(finetune, str(place / "recipe.yaml"), "--dry-run")
    told = run()
    assert told.code == 0, told.told
    assert "packing: none, each row is padded: MambaForCausalLM takes no position_ids" in told.told
    assert run("data.packing=false").code == 0
    asked = run("data.packing=true")
    assert asked.problems("data.packing: MambaForCausalLM takes no position_ids, so completions") == [], asked.told
