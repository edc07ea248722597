"""KTO's loss against TRL's `KTOTrainer` on the same rows, with the completions that it mismatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from support.texts import make_texts
from support.tiny import save_llama
from transformers import AutoTokenizer, LlamaForCausalLM
from trl import KTOConfig, KTOTrainer

from toolkit.data.kinds.judged import JudgedSamples
from toolkit.data.samples.packing import Pieces
from toolkit.objectives.kto import Kto, signed_distances

ROWS = 6


class Prepared:
    """Rows of a trainer, as `toolkit.data.samples.samples.Rows`."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def tokens(self, row: int, start: int = 0, stop: int | None = None) -> tuple[Any, Any]:
        prompt, completion = self.rows[row]["prompt_ids"], self.rows[row]["completion_ids"]
        ids = np.array(prompt + completion)
        return ids[start:stop], (np.arange(len(ids)) >= len(prompt))[start:stop]


def samples_of(rows: list[dict[str, Any]], ends: list[int], max_length: int = 256) -> JudgedSamples:
    lengths = np.array([len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows])
    pieces = Pieces(np.arange(len(rows)), np.zeros_like(lengths), lengths)
    good = np.array([row["label"] for row in rows])
    return JudgedSamples(Prepared(rows), pieces, ends, max_length, len(ends) < len(rows), 1, good)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("kto")
    models = []
    for seed in (1, 2):
        model = LlamaForCausalLM.from_pretrained(save_llama(folder / str(seed), make_texts(60), tied=False, seed=seed))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0 if parameter.dim() == 2 else 1.0)
        models.append(model)
    texts = make_texts(12, seed=3)
    rows = [
        {
            "prompt": " ".join(texts[i].split()[: 2 + i % 3]),
            "completion": " " + " ".join(texts[i + 6].split()[: 2 + i]),
            "label": i % 3 != 1,
        }
        for i in range(ROWS)
    ]
    config = KTOConfig(
        output_dir=str(folder / "out"), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=ROWS
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "1")
    made = KTOTrainer(
        models[0], ref_model=models[1], args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    made.model.eval()
    return made


def swap(one: torch.nn.Module, other: torch.nn.Module) -> None:
    weights = [{name: value.clone() for name, value in model.state_dict().items()} for model in (other, one)]
    one.load_state_dict(weights[0])
    other.load_state_dict(weights[1])


def theirs(trainer: Any, rows: list[dict[str, Any]]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = trainer.compute_loss(trainer.model, dict(trainer.data_collator(rows)))
    return loss, {name: values[-1] for name, values in trainer._metrics["eval"].items()}


@pytest.mark.parametrize(("beta", "weights"), [(0.1, (1.0, 1.0)), (0.5, (1.3, 0.7))])
@pytest.mark.parametrize("swapped", [False, True])
def test_equals_trl(trainer: Any, beta: float, weights: tuple[float, float], swapped: bool) -> None:
    """Also with policy and reference swapped: of the two estimates of KL one is below 0 and counts as 0."""
    rows = [dict(trainer.train_dataset[i]) for i in range(ROWS)]
    trainer.beta, (trainer.desirable_weight, trainer.undesirable_weight) = beta, weights
    if swapped:
        swap(trainer.model, trainer.ref_model)
    loss, logged = theirs(trainer, rows)
    model, objective = trainer.model, Kto(trainer.model, beta, *weights)
    batch = objective.on_host(samples_of(rows, [ROWS]).batch([0]))
    with torch.no_grad():
        batch["reference"], _ = Kto(trainer.ref_model).log_probabilities(trainer.ref_model, batch)

    found, figures = objective.training_sums(model, batch)
    record = objective.evaluation_record(objective.evaluation_sums(model, batch).tolist())

    assert found.item() / ROWS == pytest.approx(loss.item(), rel=1e-5)
    assert figures[2].item() / ROWS == pytest.approx(logged["kl"], rel=1e-4, abs=1e-5)
    expected = {"loss": loss.item(), "kl": logged["kl"], "rows": ROWS}
    expected |= {"chosen_reward": logged["rewards/chosen"], "rejected_reward": logged["rewards/rejected"]}
    assert {key: record[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    of_theirs = torch.autograd.grad(loss, list(model.parameters()))
    of_ours = torch.autograd.grad(found / ROWS, list(model.parameters()))
    for ours, other in zip(of_ours, of_theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-4 * max(1e-3, other.abs().max().item()))
    if swapped:
        swap(trainer.model, trainer.ref_model)


def test_kl_counts_in_one_of_the_two(trainer: Any) -> None:
    rows = [dict(trainer.train_dataset[i]) for i in range(ROWS)]
    batch = Kto(trainer.model).on_host(samples_of(rows, [ROWS]).batch([0]))
    objective = Kto(trainer.model)
    with torch.no_grad():
        batch["reference"], _ = Kto(trainer.ref_model).log_probabilities(trainer.ref_model, batch)
        total, count = objective.window_sums(trainer.model, batch).tolist()
    assert count == ROWS
    assert abs(total) > 1.0


def test_the_window_decides(trainer: Any) -> None:
    """Split over micro-batches the loss is the same, with what they share."""
    rows = [dict(trainer.train_dataset[i]) for i in range(ROWS)]
    samples, objective = samples_of(rows, [2, 4, 6]), Kto(trainer.model, 0.5)
    with torch.no_grad():
        batches = [objective.on_host(samples.batch(numbers)) for numbers in ([0, 1, 2], [0], [1, 2])]
        for batch in batches:
            batch["reference"], _ = Kto(trainer.ref_model).log_probabilities(trainer.ref_model, batch)
        window = sum(objective.window_sums(trainer.model, batch) for batch in batches[1:])
        whole = objective.loss_sum(trainer.model, batches[0])
        parts = [objective.loss_sum(trainer.model, {**batch, "window": window}) for batch in batches[1:]]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-5)


def test_prompts_have_completions_of_their_sample(trainer: Any) -> None:
    rows = [dict(trainer.train_dataset[i]) for i in range(ROWS)]
    prompts, completions = ([row[key] for row in rows] for key in ("prompt_ids", "completion_ids"))
    samples = samples_of(rows, [3, 4, 6])
    joined = [[ids.tolist() for ids, _ in samples.mismatched(number)] for number in range(3)]
    assert joined == [
        [prompts[0] + completions[2], prompts[1] + completions[0], prompts[2] + completions[1]],
        [prompts[3] + completions[4]],
        [prompts[4] + completions[5], prompts[5] + completions[4]],
    ]
    short = samples_of(rows, [3, 4, 6], max_length=len(prompts[3]) + 1)
    [(ids, targets)] = short.mismatched(1)
    assert ids.tolist() == prompts[3] + completions[4][:1]
    assert targets.tolist() == [False] * len(prompts[3]) + [True]


def test_distances_have_the_sign_of_what_is_right() -> None:
    good = torch.tensor([True, False])
    found = signed_distances(torch.tensor([1.0, 1.0]), good, torch.tensor(0.5), beta=0.2)
    assert found.tolist() == pytest.approx([0.1, -0.1])
