"""Preference losses against TRL's trainers on the same rows and numbers, and against the papers' gradients.

TRL has no pure functions for DPO and IPO any more, so its trainers are built on a tiny Llama, prepare and collate the
rows themselves, and compute the loss of one pair at a time. What each loss is compared with:

- dpo: `DPOTrainer`, loss_type "sigmoid". That one ignores label_smoothing; conservative DPO is what TRL's
  "aot_unpaired" comes to for a batch of one pair, and what `CPOTrainer.cpo_loss` "sigmoid" makes of log-ratios.
- ipo: `DPOTrainer`, loss_type "ipo", which divides by the completions' lengths.
- simpo: `CPOTrainer` (trl.experimental.cpo), loss_type "simpo", without the NLL term it adds by default (cpo_alpha).
- orpo: `ORPOTrainer` (trl.experimental.orpo), whose beta is lambda. Its NLL counts prompts too, so the rows to be
  equal on have prompts of one token, which nothing predicts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from support.texts import make_texts
from support.tiny import save_llama
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import toolkit.objectives.losses.preference_losses
from toolkit.data.samples.samples import IGNORED, Batch, sample_of, stack
from toolkit.data.samples.sequence_parts import predicted
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.losses.preference_losses import LOSSES, Pairs, log_probabilities_by_document, share_won

LENGTH = 64
"""Of a packed sample (tokens)."""

Document = tuple[np.ndarray, np.ndarray]
"""`(input_ids, targets)`, each (length,)."""


def close(ours: torch.Tensor, theirs: torch.Tensor | float | list[float]) -> None:
    expected = torch.as_tensor(theirs, dtype=ours.dtype)
    torch.testing.assert_close(ours.detach(), expected.detach(), rtol=1e-5, atol=1e-5)


def rows_of(prompt_words: int, seed: int) -> list[dict[str, str]]:
    """Pairs of unequal lengths."""
    rows = []
    for i, text in enumerate(make_texts(6, seed)):
        words = [*text.split(), "king", "moon", "wine"]
        rows.append(
            {
                "prompt": " ".join(["a", *words][:prompt_words]),
                "chosen": " " + " ".join(words[3 : 5 + i]),
                "rejected": " " + " ".join(words[::-1][: 9 - i]),
            }
        )
    return rows


def packed(documents: list[Document]) -> tuple[Batch, torch.Tensor]:
    """Documents in samples they share, and the number of the document that each token belongs to."""
    samples: list[list[int]] = [[]]
    for number, (ids, _) in enumerate(documents):
        if sum(len(documents[other][0]) for other in samples[-1]) + len(ids) > LENGTH:
            samples.append([])
        samples[-1].append(number)
    batch = stack([sample_of([documents[number] for number in sample], LENGTH, pad_id=1) for sample in samples])
    segments = torch.full((len(samples), LENGTH), -1)
    for row, sample in enumerate(samples):
        owners = [number for number in sample for _ in documents[number][0]]
        segments[row, : len(owners)] = torch.tensor(owners)
    return batch, segments


def sums_of(model: LlamaForCausalLM, documents: list[Document]) -> tuple[torch.Tensor, torch.Tensor]:
    batch, segments = packed(documents)
    logits = CausalLM(model).logits(model, batch)
    return log_probabilities_by_document(logits, *predicted(batch["labels"], segments), len(documents))


class Trl:
    """TRL's trainers of one policy, and the same policy and reference untouched by them."""

    def __init__(self, folder: Path) -> None:
        texts = make_texts(60)
        self._policy = save_llama(folder / "policy", texts, tied=False, seed=1)
        self._reference = save_llama(folder / "reference", texts, tied=False, seed=2)
        self.policy, self.reference = self._load(self._policy), self._load(self._reference)
        tokenizer = AutoTokenizer.from_pretrained(self._policy)
        common: dict[str, Any] = {
            "output_dir": str(folder / "out"),
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
        }

        def trainer(kind: Any, config: Any, prompt_words: int, **options: Any) -> Any:
            rows = Dataset.from_list(rows_of(prompt_words, seed=3))
            model = self._load(self._policy)
            return kind(model, args=config, train_dataset=rows, processing_class=tokenizer, **options)

        self.dpo = trainer(DPOTrainer, DPOConfig(**common), 3, ref_model=self._load(self._reference))
        self.cpo = trainer(CPOTrainer, CPOConfig(**common, loss_type="simpo", cpo_alpha=0.0), 3)
        self.orpo = trainer(ORPOTrainer, ORPOConfig(**common), 1)

    @staticmethod
    def _load(folder: Path) -> LlamaForCausalLM:
        """In float32, and far enough from the uniform distribution for completions to differ."""
        model = LlamaForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0 if parameter.dim() == 2 else 1.0)
        return model.eval()

    def trainer(self, name: str, **settings: float) -> Any:
        """TRL's trainer of a loss, so set."""
        if name in ("dpo", "ipo"):
            sigmoid = "aot_unpaired" if settings.get("label_smoothing") else "sigmoid"
            self.dpo.loss_types = ["ipo" if name == "ipo" else sigmoid]
            self.dpo.beta, self.dpo.label_smoothing = settings["beta"], settings.get("label_smoothing", 0.0)
            return self.dpo
        if name == "simpo":
            self.cpo.loss_type, self.cpo.label_smoothing = "simpo", 0.0
            self.cpo.beta, self.cpo.simpo_gamma = settings["beta"], settings["gamma"]
            return self.cpo
        self.orpo.beta = settings["odds_weight"]
        return self.orpo

    def loss(self, trainer: Any, rows: list[dict[str, Any]]) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of a batch of rows as a trainer prepared them, and its metrics."""
        batch = trainer.data_collator(rows)
        if trainer is not self.dpo:
            return trainer.get_batch_loss_metrics(trainer.model, batch)
        loss = trainer._compute_loss(trainer.model, batch, return_outputs=False)
        logged = {**trainer._metrics["train"], **trainer._metrics["eval"]}
        return loss, {name: values[-1] for name, values in logged.items()}

    def rows(self, trainer: Any) -> list[dict[str, Any]]:
        return [trainer.train_dataset[i] for i in range(len(trainer.train_dataset))]

    def documents(self, rows: list[dict[str, Any]]) -> list[Document]:
        """The chosen completions of rows that a trainer prepared, then the rejected ones."""
        return [self._document(row, side) for side in ("chosen", "rejected") for row in rows]

    def _document(self, row: dict[str, Any], side: str) -> Document:
        if f"{side}_ids" in row:  # DPOTrainer's columns
            prompt, completion = row["prompt_ids"], row[f"{side}_ids"]
            return np.array(prompt + completion), np.arange(len(prompt) + len(completion)) >= len(prompt)
        return np.array(row[f"{side}_input_ids"]), np.array(row[f"{side}_labels"]) != IGNORED

    def pairs(self, rows: list[dict[str, Any]]) -> Pairs:
        """What the toolkit makes of the same rows, several in a sample."""
        documents = self.documents(rows)
        sums, counts = sums_of(self.policy, documents)
        with torch.no_grad():
            reference, _ = sums_of(self.reference, documents)
        return Pairs(*sums.chunk(2), *counts.chunk(2), *reference.chunk(2))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of models this small wait for each other more than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Trl:
    return Trl(tmp_path_factory.mktemp("preference"))


SETTINGS: list[tuple[str, dict[str, float]]] = [
    ("dpo", {"beta": 0.1}),
    ("dpo", {"beta": 0.5, "label_smoothing": 0.2}),
    ("ipo", {"beta": 0.1}),
    ("ipo", {"beta": 0.7}),
    ("simpo", {"beta": 2.0, "gamma": 1.0}),
    ("simpo", {"beta": 0.3, "gamma": 0.0}),
    ("orpo", {"odds_weight": 0.1}),
    ("orpo", {"odds_weight": 1.5}),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_equals_trl_pair_by_pair(trl: Trl, name: str, settings: dict[str, float]) -> None:
    trainer = trl.trainer(name, **settings)
    rows = trl.rows(trainer)
    theirs = [trl.loss(trainer, [row]) for row in rows]

    losses, metrics = LOSSES[name](trl.pairs(rows), settings)

    assert losses.shape == (len(rows),)
    assert losses.dtype == torch.float32
    assert losses.std() > 0.01, "pairs that tell nothing apart"
    close(losses, [loss.item() for loss, _ in theirs])
    logged = {key: [metric[key] for _, metric in theirs] for key in theirs[0][1]}
    close(metrics["accuracy"], logged["rewards/accuracies"])
    assert 0 < metrics["accuracy"].mean() < 1
    if name == "orpo":  # TRL logs lambda * log p as rewards, but the log odds too, which order pairs alike
        close(metrics["margin"], logged["log_odds_chosen"])
        return
    close(metrics["chosen_reward"], logged["rewards/chosen"])
    close(metrics["rejected_reward"], logged["rewards/rejected"])
    close(metrics["margin"], logged["rewards/margins"])


# TRL's conservative DPO is that of one pair only.
@pytest.mark.parametrize(("name", "settings"), [case for case in SETTINGS if "label_smoothing" not in case[1]])
def test_mean_and_gradients_equal_trl(trl: Trl, name: str, settings: dict[str, float]) -> None:
    trainer = trl.trainer(name, **settings)
    rows = trl.rows(trainer)
    if name == "orpo":
        rows = rows[:1]  # its NLL is a mean over the tokens of a batch, not over pairs

    theirs, _ = trl.loss(trainer, rows)
    ours = LOSSES[name](trl.pairs(rows), settings)[0].mean()

    close(ours, theirs)
    expected = torch.autograd.grad(theirs, list(trainer.model.parameters()))
    found = torch.autograd.grad(ours, list(trl.policy.parameters()))
    assert len(found) == 21
    for left, right in zip(found, expected, strict=True):
        assert right.abs().max() > 0
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5 * right.abs().max().item())


def test_kl_is_the_mean_of_trls_log_ratios(trl: Trl) -> None:
    """Its rewards are beta log pi/ref."""
    trainer = trl.trainer("dpo", beta=0.1)
    rows = trl.rows(trainer)
    theirs = [trl.loss(trainer, [row])[1] for row in rows]

    _, metrics = LOSSES["dpo"](trl.pairs(rows), {"beta": 0.1})

    close(metrics["kl"], [(each["rewards/chosen"] + each["rewards/rejected"]) / 0.2 for each in theirs])


def test_orpo_counts_no_prompt_tokens_in_the_nll(trl: Trl) -> None:
    """TRL's does; the rest of its loss is the same."""
    trainer = trl.trainer("orpo", odds_weight=0.1)
    rows = [{**row, **trainer.tokenize_row(row)} for row in rows_of(6, seed=4)]
    pairs = trl.pairs(rows)
    theirs = [trl.loss(trainer, [row]) for row in rows]

    losses, _ = LOSSES["orpo"](pairs, {"odds_weight": 0.1})

    nll = -pairs.chosen / pairs.chosen_tokens
    close(losses - nll, [loss.item() - metrics["nll_loss"] for loss, metrics in theirs])
    assert (losses - torch.tensor([loss.item() for loss, _ in theirs])).abs().max() > 0.01


def random_pairs(seed: int = 0, num_pairs: int = 50, reference: bool = True) -> Pairs:
    """Log-probabilities per token from those of near certainty to -20."""
    draw = torch.Generator().manual_seed(seed)

    def sums(counts: torch.Tensor) -> torch.Tensor:
        return -counts * 10 ** (torch.rand(num_pairs, generator=draw) * 5.3 - 4)

    counts = [torch.randint(1, 40, (num_pairs,), generator=draw) for _ in range(2)]
    policy = [sums(count).requires_grad_() for count in counts]
    others = [value.detach() + torch.randn(num_pairs, generator=draw) for value in policy] if reference else []
    return Pairs(*policy, *counts, *others)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.4])
def test_dpo_equals_cpo_of_log_ratios(trl: Trl, label_smoothing: float) -> None:
    """TRL's CPO loss is conservative DPO's function, of whatever it is given."""
    pairs = random_pairs()
    trl.cpo.loss_type, trl.cpo.beta, trl.cpo.label_smoothing = "sigmoid", 0.3, label_smoothing

    losses, metrics = LOSSES["dpo"](pairs, {"beta": 0.3, "label_smoothing": label_smoothing})

    for found, expected in zip(
        [losses, metrics["chosen_reward"], metrics["rejected_reward"]],
        trl.cpo.cpo_loss(*pairs.log_ratios()),
        strict=True,
    ):
        close(found, expected)


def test_orpo_equals_odds_ratio_loss_on_numbers(trl: Trl) -> None:
    """TRL returns lambda log sigma(log odds ratio), to be subtracted, and no NLL with it."""
    pairs = random_pairs()
    trl.trainer("orpo", odds_weight=0.25)
    chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    weighted, _, _, _, mean_log_odds_ratio = trl.orpo.odds_ratio_loss(chosen, rejected)

    losses, metrics = LOSSES["orpo"](pairs, {"odds_weight": 0.25})

    close(losses, -chosen - weighted)
    close(metrics["margin"].mean(), mean_log_odds_ratio)


def gradients(name: str, pairs: Pairs, settings: dict[str, float]) -> tuple[torch.Tensor, ...]:
    losses, _ = LOSSES[name](pairs, settings)
    return torch.autograd.grad(losses.sum(), [pairs.chosen, pairs.rejected])


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_log_probabilities_stay_finite(name: str) -> None:
    for sums in ((0.0, 0.0), (0.0, -1e4), (-1e4, 0.0), (-1e4, -1e4), (-1e-7, -3.0)):
        policy = [torch.full((1,), total, requires_grad=True) for total in sums]
        count, reference = torch.tensor([7]), torch.tensor([-50.0])
        pairs = Pairs(*policy, count, count, reference, reference)
        losses, metrics = LOSSES[name](pairs)
        gradients = torch.autograd.grad(losses.sum(), policy)
        assert all(value.isfinite().all() for value in (losses, *metrics.values(), *gradients)), sums


@pytest.mark.parametrize("name", LOSSES)
def test_metrics(name: str) -> None:
    pairs = random_pairs()
    losses, metrics = LOSSES[name](pairs)

    assert set(metrics) == {"chosen_reward", "rejected_reward", "margin", "accuracy", "kl"}
    for value in (losses, *metrics.values()):
        assert value.shape == (50,)
        assert value.dtype == torch.float32
    assert losses.requires_grad
    assert not any(value.requires_grad for value in metrics.values())
    sides = zip(metrics["chosen_reward"], metrics["rejected_reward"], strict=True)
    assert metrics["accuracy"].tolist() == [1.0 if chosen > rejected else 0.0 for chosen, rejected in sides]
    same = Pairs(pairs.chosen, pairs.chosen, pairs.chosen_tokens, pairs.chosen_tokens, pairs.chosen, pairs.chosen)
    assert LOSSES[name](same)[1]["accuracy"].tolist() == [0.5] * 50, "a tie tells nothing apart"


def test_a_tie_is_half_a_win() -> None:
    assert share_won(torch.tensor([2.0, 0.0, -0.5, math.nan])).tolist() == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("name", LOSSES)
def test_a_completion_without_targets_stays_finite(name: str) -> None:
    none, one, zeros = torch.tensor([0]), torch.tensor([3]), torch.zeros(1)
    losses, _ = LOSSES[name](Pairs(torch.tensor([-4.0]), zeros, one, none, torch.tensor([-5.0]), zeros))
    assert losses.isfinite().all()


def test_only_some_losses_need_a_reference() -> None:
    pairs = random_pairs(reference=False)
    assert {name for name, loss in LOSSES.items() if loss.needs_reference} == {"dpo", "ipo"}
    for name, loss in LOSSES.items():
        if loss.needs_reference:
            with pytest.raises(ValueError, match="no log-probabilities of a reference"):
                loss(pairs)
        else:
            assert "kl" not in loss(pairs)[1], name


@pytest.mark.parametrize("name", LOSSES)
def test_each_setting_has_the_effect_it_claims(name: str) -> None:
    loss, pairs = LOSSES[name], random_pairs()
    at_defaults, _ = loss(pairs)
    for setting, default in loss.defaults.items():
        changed, _ = loss(pairs, {setting: default + 0.3})
        assert not torch.equal(changed, at_defaults), setting
    assert torch.equal(loss(pairs, dict.fromkeys(("beta", "gamma", "odds_weight")))[0], at_defaults)


def test_packed_sums_are_those_of_rows_alone(trl: Trl) -> None:
    documents = trl.documents(trl.rows(trl.dpo))
    batch, segments = packed(documents)
    assert len(batch["labels"]) < len(documents)
    assert (segments == -1).any()

    sums, counts = sums_of(trl.policy, documents)

    alone = [sums_of(trl.policy, [each]) for each in documents]
    close(sums, [total.item() for total, _ in alone])
    assert counts.tolist() == [int(count) for _, count in alone] == [int(each[1].sum()) for each in documents]


def batch_of_numbers(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (3, 20, 11), a third of the tokens no targets, and 6 documents, of which number 4 is nowhere."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 20, 11, generator=draw) * 5
    labels = torch.randint(0, 11, (3, 20), generator=draw)
    labels[torch.rand(3, 20, generator=draw) < 0.33] = IGNORED
    segments = torch.tensor([[0] * 8 + [3] * 12, [1] * 15 + [-1] * 5, [5] * 2 + [2] * 18])
    labels[segments == -1] = IGNORED
    return logits, labels, segments


def written_out(logits: torch.Tensor, labels: torch.Tensor, segments: torch.Tensor) -> list[torch.Tensor]:
    """The targets' log-probabilities of each of 6 documents, one by one."""
    found: list[list[torch.Tensor]] = [[] for _ in range(6)]
    log_probabilities = F.log_softmax(logits.double(), dim=-1)
    for row, t in np.ndindex(3, 20):
        owner = int(segments[row, t])
        if t > 0 and owner >= 0 and owner == segments[row, t - 1] and labels[row, t] != IGNORED:
            found[owner].append(log_probabilities[row, t - 1, labels[row, t]])
    return [torch.stack(each) if each else logits.new_zeros(0).double() for each in found]


@pytest.mark.parametrize("chunk", [7, 20, 1024])
def test_sums_counts_and_gradients(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(toolkit.objectives.losses.preference_losses, "CHUNK", chunk)
    logits, labels, segments = batch_of_numbers()
    logits.requires_grad_()
    expected = written_out(logits, labels, segments)

    sums, counts = log_probabilities_by_document(logits, *predicted(labels, segments), 6)

    assert sums.dtype == torch.float32
    assert counts.dtype == torch.int64
    assert counts.tolist() == [len(each) for each in expected]
    assert counts[4] == sums[4] == 0
    close(sums, torch.stack([each.sum() for each in expected]))
    weights = torch.arange(1.0, 7.0)
    found = torch.autograd.grad((sums * weights).sum(), logits)[0]
    total = sum(each.sum() * weight for each, weight in zip(expected, weights, strict=True))
    close(found, torch.autograd.grad(total, logits)[0])


def test_a_documents_first_token_is_no_target() -> None:
    logits, labels, segments = batch_of_numbers()
    sums, counts = log_probabilities_by_document(logits, *predicted(labels, segments), 6)
    for row, t in ((0, 0), (0, 8), (1, 0), (2, 0), (2, 2)):
        labels[row, t] = (labels[row, t] + 1) % 11
    again = log_probabilities_by_document(logits, *predicted(labels, segments), 6)
    assert torch.equal(sums, again[0])
    assert torch.equal(counts, again[1])


def test_half_precision_logits_lose_nothing_more() -> None:
    """Neither in the sums nor, beyond one rounding, in the gradient, where targets are all but certain."""
    logits, labels, segments = batch_of_numbers()
    half = (logits * 2).bfloat16().requires_grad_()
    single = half.detach().float().requires_grad_()

    sums, exact = (log_probabilities_by_document(each, *predicted(labels, segments), 6)[0] for each in (half, single))

    assert torch.equal(sums, exact)
    found, expected = torch.autograd.grad(sums.sum(), half)[0], torch.autograd.grad(exact.sum(), single)[0]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.bfloat16())


class Largest(TorchDispatchMode):
    """The most elements of any float32 tensor that operations return."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (list, tuple)) else [result]:
            if torch.is_tensor(each) and each.dtype == torch.float32:
                self.elements = max(self.elements, each.numel())
        return result


def test_float32_logits_exist_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit.objectives.losses.preference_losses, "CHUNK", 16)
    logits = torch.randn(4, 32, 500).bfloat16().requires_grad_()
    labels, segments = torch.randint(0, 500, (4, 32)), torch.arange(4)[:, None].expand(4, 32)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            sums, _ = log_probabilities_by_document(logits, *predicted(labels, segments), 4)
        sums.sum().backward()

    assert logits.grad is not None
    assert largest.elements == 16 * 500
    assert sum(tensor.numel() for tensor in kept if tensor.dtype == torch.float32) < 500
    storages = {tensor.untyped_storage().data_ptr() for tensor in kept if tensor.dtype == torch.bfloat16}
    assert storages <= {logits.untyped_storage().data_ptr()}
