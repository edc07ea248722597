"""The Bradley-Terry loss against TRL's `RewardTrainer` on the same rows, and against its formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from support.texts import make_texts
from support.tiny import llama, save_llama
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification
from trl import RewardConfig, RewardTrainer

from toolkit.data.samples.samples import sample_of, stack
from toolkit.errors import BadInputError
from toolkit.objectives.reward import Reward

LENGTH = 64
"""Of a packed sample (tokens)."""


def rows() -> list[dict[str, Any]]:
    """Pairs of unequal lengths."""
    texts = make_texts(12, seed=3)
    return [
        {
            "prompt": " ".join(texts[i].split()[:2]),
            "chosen": " " + " ".join(texts[i + 6].split()[: 2 + i]),
            "rejected": " " + " ".join(texts[i].split()[: 7 - i]),
            "margin": 0.3 * i,
        }
        for i in range(6)
    ]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("reward")
    save_llama(folder / "model", make_texts(60), tied=False)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    with torch.no_grad():  # far enough from zero for rewards to differ
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() == 2 else 1.0)
    config = RewardConfig(output_dir=str(folder / "out"), use_cpu=True, bf16=False, report_to="none", max_length=None)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    made = RewardTrainer(model, args=config, train_dataset=Dataset.from_list(rows()), processing_class=tokenizer)
    made.model.eval()
    return made


def batch_of(prepared: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The trainer's rows as the toolkit packs them: all completions in samples of 64 tokens, pairs kept together."""
    pieces: list[list[Any]] = [[]]
    for row in prepared:
        pair = [(np.array(row[key]), np.ones(len(row[key]), dtype=bool)) for key in ("chosen_ids", "rejected_ids")]
        if sum(len(ids) for ids, _ in [*pieces[-1], *pair]) > LENGTH:
            pieces.append([])
        pieces[-1] += pair
    batch = stack([sample_of(sample, LENGTH, pad_id=1) for sample in pieces])
    segments, number = torch.full_like(batch["input_ids"], -1), 0
    for row, sample in zip(segments, pieces, strict=True):
        start = 0
        for ids, _ in sample:
            row[start : start + len(ids)] = number
            start, number = start + len(ids), number + 1
    assert len(pieces) < len(prepared), "pairs share samples"
    return {**batch, "segments": segments, "margin": torch.tensor([row.get("margin", 0.0) for row in prepared])}


@pytest.mark.parametrize("coefficient", [None, 0.1])
@pytest.mark.parametrize("with_margin", [True, False])
def test_equals_trl(trainer: Any, coefficient: float | None, with_margin: bool) -> None:
    prepared = [dict(trainer.train_dataset[i]) for i in range(6)]
    if not with_margin:
        prepared = [{key: value for key, value in row.items() if key != "margin"} for row in prepared]
    trainer.args.center_rewards_coefficient = coefficient
    theirs = trainer.compute_loss(trainer.model, dict(trainer.data_collator(prepared)))
    logged = {name: values[-1] for name, values in trainer._metrics["eval"].items()}

    objective = Reward(trainer.model, coefficient or 0.0)
    batch = objective.on_host(batch_of(prepared))
    loss, figures = objective.training_sums(trainer.model, batch)

    assert loss.item() / 6 == pytest.approx(theirs.item(), rel=1e-5)
    found = dict(zip(objective.figures, (figures / 6).tolist(), strict=True))
    assert found["accuracy"] == pytest.approx(logged["accuracy"])
    assert 0 < found["accuracy"] < 1
    assert found["margin"] == pytest.approx(logged["margin"], rel=1e-4, abs=1e-6)
    mean = (found["chosen_reward"] + found["rejected_reward"]) / 2
    assert mean == pytest.approx(logged["mean_reward"], rel=1e-4, abs=1e-6)
    expected = torch.autograd.grad(theirs, list(trainer.model.parameters()))
    for ours, other in zip(torch.autograd.grad(loss / 6, list(trainer.model.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5 * max(1e-3, other.abs().max().item()))
    record = objective.evaluation_record(objective.evaluation_sums(trainer.model, batch).tolist())
    assert record == pytest.approx({"loss": theirs.item(), "pairs": 6, **found}, rel=1e-4, abs=1e-6)


def test_rewards_are_those_that_transformers_gives_where_texts_are_padded_with_their_end(trainer: Any) -> None:
    """It looks for the last token that is no padding, which then is not the last of a text."""
    own, config = trainer.model.config.pad_token_id, trainer.model.config
    ends = [[5, 6, 7, 2], [8, 2, 9], [10, 11, 2, 2], [2, 2]]
    config.pad_token_id = 2
    try:
        batch = batch_of([dict(zip(("chosen_ids", "rejected_ids"), ends[i : i + 2], strict=True)) for i in (0, 2)] * 12)
        objective = Reward(trainer.model)
        with torch.no_grad():
            found = objective.rewards(trainer.model, objective.on_host(batch)).flatten()[:4]
            expected = [trainer.model(input_ids=torch.tensor([ids])).logits.item() for ids in ends[:3]]
    finally:
        config.pad_token_id = own
    assert found[:3].tolist() == pytest.approx(expected, rel=1e-5)
    assert found[3].isfinite(), "of padding alone the last token"


@pytest.mark.parametrize("model", ["lm", "bert"])
def test_models_without_a_head_of_scores_are_refused(model: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 16}
    made = llama() if model == "lm" else BertForSequenceClassification(BertConfig(**sizes, num_labels=1))
    with pytest.raises(BadInputError, match="reward needs a decoder with a linear head called `score`, and "):
        Reward(made)
