"""Losses and gradients of documents and rows that several ranks share: those of whole documents, one at a time.

test_all_pairs.py has runs on shared rows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import run_on_ranks
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
)

from toolkit.data.samples.sequence_parts import Part
from toolkit.errors import BadInputError
from toolkit.model.attention.attention_by_heads import attend_by_heads
from toolkit.objectives.classification import SequenceClassification
from toolkit.objectives.kto import Kto
from toolkit.objectives.losses import scores
from toolkit.objectives.losses.preference_losses import LOSSES
from toolkit.objectives.preference import Preference
from toolkit.objectives.reward import Reward
from toolkit.objectives.tagging import TokenClassification, entities
from toolkit.run.checks.sequence_check import check_parts
from toolkit.sharding.parallel.sequence_parallel import form_groups, own_part

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "classifier_dropout": 0.0,
}
KINDS: dict[str, Any] = {
    "dpo": AutoModelForCausalLM,
    "ipo": AutoModelForCausalLM,
    "simpo": AutoModelForCausalLM,
    "orpo": AutoModelForCausalLM,
    "kto": AutoModelForCausalLM,
    "reward": AutoModelForSequenceClassification,
    "classification": AutoModelForSequenceClassification,
    "tagging": AutoModelForTokenClassification,
}
LENGTHS, OTHER_LENGTHS = [7, 16, 5, 19], [9, 4, 21, 12]
PROMPT = 3
"""Tokens of each document that are no targets."""

REFERENCE = torch.tensor([[-20.0, -33.0], [-60.0, -20.0], [-10.0, -90.0], [-70.0, -40.0]])
GOOD, MARGIN, BETA = torch.tensor([True, False, False, True]), torch.tensor([0.25, -0.5]), 0.1
ROWS, CLASSES, WEIGHTS = [31, 20], [2, 0], [0.5, 2.0, 1.0]
TAGS = ["O", "B-KING", "I-KING"]


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    num_labels = 1 if kind == "reward" else 3
    return KINDS[kind].from_config(LlamaConfig(**SIZES, num_labels=num_labels)).float().train()


def objective_of(kind: str, model: Any) -> Any:
    if kind == "kto":
        return Kto(model, BETA, 1.5, 0.75)
    if kind == "reward":
        return Reward(model, 0.05)
    if kind == "classification":
        return SequenceClassification(model, 3, WEIGHTS)
    if kind == "tagging":
        return TokenClassification(model, TAGS, WEIGHTS)
    return Preference(model, LOSSES[kind], {})


def documents(lengths: list[int], seed: int = 3) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 131, (length,), generator=draw) for length in lengths]


def in_one_row(found: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(len(ids)) for ids in found])[None]
    ids = torch.cat(found)[None]
    owners = torch.cat([torch.full((len(ids),), number) for number, ids in enumerate(found)])[None]
    labels = ids.masked_fill(positions < PROMPT, -100)
    lengths = torch.tensor([ids.shape[1]])
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "segments": owners, "lengths": lengths}


def padded_rows(kind: str) -> dict[str, torch.Tensor]:
    found = documents(ROWS, seed=5)
    ids = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
    labels = torch.tensor(CLASSES)
    if kind == "tagging":  # every third token begins a word
        firsts = (torch.arange(ids.shape[1]) % 3 == 0) & (ids > 0)
        labels = torch.where(firsts, ids % 3, -100)
    mask, kinds = (ids > 0).long(), torch.zeros_like(ids)
    lengths = torch.tensor(ROWS)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds, "labels": labels, "lengths": lengths}


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    if kind in ("classification", "tagging"):
        return padded_rows(kind)
    batch = in_one_row(documents(LENGTHS))
    if kind == "kto":
        other = in_one_row(documents(OTHER_LENGTHS, seed=4))
        others = {f"kl_{name}": value for name, value in other.items()}
        return {**batch, **others, "good": GOOD, "reference": REFERENCE}
    return {**batch, "reference": REFERENCE[:, 0].view(2, 2), "margin": MARGIN}


class Samples:
    """What the check before the first step asks of samples."""

    has_images = False

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def few(self, tokens: int) -> dict[str, torch.Tensor]:
        return batch_of(self._kind)


def in_parts(kinds: list[str]) -> dict[str, Any]:
    """Of each kind, over all ranks: losses, figures, held-out sums, counts and gradients; and the check's word."""
    ranks = dist.get_world_size()
    form_groups(ranks)
    found = {}
    for kind in kinds:
        model = model_of(kind)
        attend_by_heads(model)
        objective, part = objective_of(kind, model), Part(own_part(), ranks)
        checked = check_parts(model, model, objective, Samples(kind), part, torch.device("cpu"), False)
        assert all(p.grad is None for p in model.parameters())
        batch = objective.on_host(part.of(batch_of(kind)))
        loss, figures = objective.training_sums(model, batch)
        loss.backward()
        with torch.no_grad():
            held_out = objective.evaluation_sums(model, batch)
        sums = torch.stack([loss.detach(), torch.tensor(float(objective.count_targets(batch))), *figures])
        for tensor in (sums, held_out, *(p.grad for p in model.parameters())):
            dist.all_reduce(tensor)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found[kind] = {"sums": sums, "held_out": held_out, "gradients": gradients, "checked": checked}
    return found


def log_probability(model: Any, ids: torch.Tensor) -> torch.Tensor:
    each = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])
    return each[PROMPT - 1 :].sum()


def plain_loss(kind: str, model: Any) -> tuple[torch.Tensor, int]:
    """The loss of documents one by one, as the papers write it, and how many pairs, rows or words there are."""
    if kind == "classification":
        logits = torch.stack([model(input_ids=ids[None]).logits[0] for ids in documents(ROWS, seed=5)])
        return F.cross_entropy(logits, torch.tensor(CLASSES), torch.tensor(WEIGHTS), reduction="sum"), 2
    if kind == "tagging":
        found = documents(ROWS, seed=5)
        logits = torch.cat([model(input_ids=ids[None]).logits[0, ::3] for ids in found])
        right = torch.cat([ids[::3] % 3 for ids in found])
        return F.cross_entropy(logits, right, torch.tensor(WEIGHTS), reduction="sum"), len(right)
    if kind == "reward":
        given = torch.stack([model(input_ids=ids[None]).logits[0, 0] for ids in documents(LENGTHS)]).view(2, 2)
        chosen, rejected = given.unbind(1)
        return (-F.logsigmoid(chosen - rejected - MARGIN) + 0.05 * (chosen + rejected) ** 2).sum(), 2
    found = torch.stack([log_probability(model, ids) for ids in documents(LENGTHS)])
    if kind == "kto":
        with torch.no_grad():
            others = torch.stack([log_probability(model, ids) for ids in documents(OTHER_LENGTHS, seed=4)])
            kl = (others - REFERENCE[:, 1]).mean().clamp_min(0)
        distances = BETA * (found - REFERENCE[:, 0] - kl)
        losses = torch.where(GOOD, 1.5 * (1 - torch.sigmoid(distances)), 0.75 * (1 - torch.sigmoid(-distances)))
        return losses.sum(), 4
    tokens = torch.tensor(LENGTHS).view(2, 2) - PROMPT
    chosen, rejected = found.view(2, 2).unbind(1)
    ratios = found.view(2, 2) - REFERENCE[:, 0].view(2, 2)
    means = found.view(2, 2) / tokens
    if kind == "dpo":
        losses = -F.logsigmoid(BETA * (ratios[:, 0] - ratios[:, 1]))
    elif kind == "ipo":
        losses = (ratios[:, 0] / tokens[:, 0] - ratios[:, 1] / tokens[:, 1] - 1 / (2 * BETA)) ** 2
    elif kind == "simpo":
        losses = -F.logsigmoid(2.0 * (means[:, 0] - means[:, 1]) - 1.0)
    else:
        odds = means - torch.log1p(-means.exp())
        losses = -means[:, 0] - 0.1 * F.logsigmoid(odds[:, 0] - odds[:, 1])
    return losses.sum(), 2


def require_plain(found: dict[str, Any]) -> None:
    for kind, of_kind in found.items():
        model = model_of(kind)
        loss, count = plain_loss(kind, model)
        loss.backward()
        assert of_kind["sums"][:2].tolist() == pytest.approx([loss.item(), count], rel=1e-6), kind
        assert of_kind["held_out"][0].item() == pytest.approx(loss.item(), rel=1e-6), kind
        assert of_kind["checked"] < 1e-5, kind
        largest = max(float(p.grad.abs().max()) for p in model.parameters())
        for name, parameter in model.named_parameters():
            gradient = of_kind["gradients"][name]
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=2e-6 * largest, msg=f"{kind} {name}")


def require_entities(found: dict[str, Any]) -> None:
    """That entities which lie on several ranks are found whole, each once."""
    model, sums = model_of("tagging"), found["tagging"]["held_out"]
    chosen, right = [], []
    for number, ids in enumerate(documents(ROWS, seed=5)):
        tags = model(input_ids=ids[None]).logits[0, ::3].argmax(-1).tolist()
        chosen += [(number, *entity) for entity in entities([TAGS[tag] for tag in tags])]
        right += [(number, *entity) for entity in entities([TAGS[tag] for tag in (ids[::3] % 3).tolist()])]
    assert right
    assert sums[3:].tolist() == [len(chosen), len(right), len(set(chosen) & set(right))]


def broken() -> list[str]:
    """What the check says where the numbers of documents are not exchanged, and of rows' classes."""
    form_groups(dist.get_world_size())
    told = []
    for kind in ("reward", "classification"):
        model = model_of(kind)
        attend_by_heads(model)
        part = Part(own_part(), dist.get_world_size())
        whole, scores.summed_over_group = scores.summed_over_group, lambda mine: mine
        try:
            check_parts(model, model, objective_of(kind, model), Samples(kind), part, torch.device("cpu"), False)
        except BadInputError as error:
            told.append(str(error))
        scores.summed_over_group = whole
    return told


def on_ranks() -> dict[str, Any]:
    return {"parts": in_parts(list(KINDS)), "broken": broken()}


@pytest.fixture(scope="module")
def on_2_ranks() -> list[dict[str, Any]]:
    return run_on_ranks(on_ranks, 2)


def test_losses_of_documents_in_parts_are_those_of_whole_documents(on_2_ranks: list[dict[str, Any]]) -> None:
    found = on_2_ranks[0]["parts"]
    assert list(found) == list(KINDS)
    require_plain(found)
    require_entities(found)


@pytest.mark.grid
def test_losses_of_documents_on_4_ranks_are_those_of_whole_documents() -> None:
    found = run_on_ranks(in_parts, 4, list(KINDS))[0]
    require_plain(found)
    require_entities(found)


def test_the_check_finds_numbers_of_documents_that_are_not_exchanged(on_2_ranks: list[dict[str, Any]]) -> None:
    reward, classification = on_2_ranks[0]["broken"]
    assert "numbers of documents differ by" in reward
    assert "logits differ by" in classification
    assert on_2_ranks[1]["broken"] == [reward, classification]
