"""Group-relative policy gradients equal the formulas of the papers, written out over full logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from datasets import Dataset
from support.texts import make_texts
from support.tiny import llama, objective_of, save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.data.samples.samples import sample_of, segments_of, stack
from toolkit.errors import BadInputError
from toolkit.objectives.grpo import Grpo
from toolkit.objectives.losses.policy_losses import advantages_of
from toolkit.objectives.objective import Ingredients

MAX_NEW_TOKENS = 6
PROMPT = 3


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("none", [0.5, -0.5, 0.0, 0.0]),
        ("group", [0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4), 0.0, 0.0]),
        ("batch", [0.5 / (1.0 / 2 + 1e-4), -0.5 / (1.0 / 2 + 1e-4), 0.0, 0.0]),
    ],
)
def test_advantages_are_distances_from_the_mean_of_the_group(scale: Any, expected: list[float]) -> None:
    # The batch's variance with Bessel's correction: (0.75^2 + 3 * 0.25^2) / 3 = 0.25.
    found = advantages_of(np.array([1.0, 0.0, 0.0, 0.0]), 2, scale)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_completion_that_a_reward_leaves_out_is_in_no_group(scale: Any) -> None:
    """The others have the advantages that they would have without it; alone in its group, one has none."""
    nan = float("nan")
    found = advantages_of(np.array([1.0, nan, 0.0, nan, 2.0, nan]), 3, scale)
    spread = np.array([1.0, 0.0, 2.0] if scale == "batch" else [1.0, 0.0]).std(ddof=1) + 1e-4
    above = 0.5 / (1.0 if scale == "none" else spread)
    np.testing.assert_allclose(found, [above, nan, -above, nan, 0.0, nan])


def test_a_group_of_equal_rewards_has_no_advantage_though_its_mean_is_rounded() -> None:
    rewards = np.array([0.1] * 3 + [0.7, 0.7, 0.1])
    assert advantages_of(rewards, 3, "group")[:3].tolist() == [0.0, 0.0, 0.0]


class Completions:
    """Four completions of unequal lengths, the last one cut, with rows of their own for the formulas."""

    def __init__(self, masked: bool) -> None:
        draw = torch.Generator().manual_seed(0)
        lengths = [2, 5, 3, MAX_NEW_TOKENS]
        self.rows = [torch.randint(3, 60, (PROMPT + length,), generator=draw) for length in lengths]
        self.advantages = torch.tensor([0.7, -1.2, 0.5, -0.3])
        self.learned = [True, True, True, not masked]
        self.drawn = [torch.rand(length, generator=draw) - 3 for length in lengths]

    def batch(self, numbers: list[int]) -> dict[str, Any]:
        """Returns the completions packed into one row, as a rollout makes them."""
        pieces = [
            (self.rows[n].numpy(), [False] * PROMPT + [self.learned[n]] * (len(self.rows[n]) - PROMPT)) for n in numbers
        ]
        total = sum(len(ids) for ids, _ in pieces)
        batch = stack([sample_of(pieces, total + 3, 0)])
        drawn = torch.zeros(1, total + 3)
        drawn[0, :total] = torch.cat([torch.cat([torch.zeros(PROMPT), self.drawn[n]]) for n in numbers])
        segments = segments_of([pieces], batch["input_ids"])
        return {**batch, "segments": segments, "advantages": self.advantages[numbers], "drawn": drawn}

    def log_probabilities(self, model: Any, number: int) -> torch.Tensor:
        """Returns those of a completion's tokens, (tokens,), from its row alone."""
        ids = self.rows[number][None]
        logits = model(ids).logits[0, PROMPT - 1 : -1].float()
        return torch.log_softmax(logits, dim=-1).gather(1, ids[0, PROMPT:, None])[:, 0]


def by_formula(model: Any, of: Completions, loss: str) -> torch.Tensor:
    """Returns the loss of a step: the mean that the paper of each loss writes."""
    terms = []
    for number, learned in enumerate(of.learned):
        found = of.log_probabilities(model, number)
        ratios = torch.exp(found - found.detach())
        terms.append(-ratios * of.advantages[number] * float(learned))
    if loss == "dapo":
        return torch.cat(terms).sum() / sum(
            len(term) for term, learned in zip(terms, of.learned, strict=True) if learned
        )
    if loss == "grpo":
        return torch.stack([term.mean() for term in terms]).mean()
    return torch.cat(terms).sum() / (len(terms) * MAX_NEW_TOKENS)


@pytest.mark.parametrize("apart", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("masked", [False, True], ids=["cut is learned", "cut is masked"])
@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
def test_gradients_are_the_formulas_for_any_micro_batches(loss: str, masked: bool, apart: bool) -> None:
    of, plain = Completions(masked), llama()
    expected = by_formula(plain, of, loss)
    expected.backward()
    for split in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1, 2, 3]]):
        model = llama()
        objective = Grpo(model, loss, 0.0, MAX_NEW_TOKENS, apart=apart)
        batches = [objective.on_host(of.batch(numbers)) for numbers in split]
        sums = [objective.training_sums(model, batch)[0] for batch in batches]
        total = torch.stack(sums).sum() / sum(objective.count_targets(batch) for batch in batches)
        total.backward()
        assert total.item() == pytest.approx(expected.item(), abs=1e-7)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-7, rtol=1e-5)


def test_the_gap_is_the_mean_distance_from_the_log_probabilities_of_sampling() -> None:
    of, model = Completions(masked=True), llama()
    objective = Grpo(model, "grpo", 0.0, MAX_NEW_TOKENS)
    _, figures = objective.training_sums(model, objective.on_host(of.batch([0, 1, 2, 3])))
    found = objective.training_record([float(value) / 4 for value in figures])
    gaps = torch.cat([(of.log_probabilities(model, n) - of.drawn[n]).abs() for n in range(3)])
    assert found == {"sampler_gap": pytest.approx(gaps.mean().item(), rel=1e-5)}


@pytest.mark.parametrize(("packed", "apart"), [(True, False), (False, True)])
def test_completions_share_rows_unless_the_recipe_pads_them(packed: bool, apart: bool) -> None:
    assert Grpo.build(Ingredients(objective_of("grpo"), llama(), packed, {})).apart is apart


@pytest.mark.parametrize("apart", [False, True], ids=["packed", "padded"])
def test_the_divergence_from_a_frozen_reference_is_the_formulas(apart: bool) -> None:
    of, plain, model, reference = Completions(masked=False), llama(), llama(), llama()
    for parameter in reference.parameters():
        parameter.data.mul_(1.1)
    terms = []
    for number in range(4):
        found = of.log_probabilities(plain, number)
        difference = of.log_probabilities(reference, number).detach() - found
        ratios = torch.exp(found - found.detach())
        terms.append(-ratios * of.advantages[number] + 0.1 * ratios * (difference.exp() - difference - 1))
    expected = torch.cat(terms).mean()
    expected.backward()
    objective = Grpo(model, "dapo", 0.1, MAX_NEW_TOKENS, apart=apart, reference=reference)
    batch = objective.on_host(of.batch([0, 1, 2, 3]))
    total = objective.training_sums(model, batch)[0] / objective.count_targets(batch)
    total.backward()
    assert total.item() == pytest.approx(expected.item(), abs=1e-7)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-7, rtol=1e-5)
    assert all(parameter.grad is None for parameter in reference.parameters())


def test_an_adapter_that_is_trained_further_has_no_reference() -> None:
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    Grpo(adapted, "dapo", 0.1, MAX_NEW_TOKENS)
    with pytest.raises(BadInputError, match="and an adapter is trained further"):
        Grpo(adapted, "dapo", 0.1, MAX_NEW_TOKENS, continued=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl")
    save_llama(folder, make_texts(40), tied=True)
    return folder


class Asked:
    """Four prompts of unequal lengths with four completions each, of which the last of each prompt is cut."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        draw = torch.Generator().manual_seed(1)
        end = self.tokenizer.eos_token_id
        self.prompts = [" ".join(text.split()[: 2 + n]) for n, text in enumerate(make_texts(4, seed=2))]
        self.ids: list[list[list[int]]] = []
        for _ in self.prompts:
            drawn = [torch.randint(3, 200, (length,), generator=draw).tolist() for length in (1, 3, 4, MAX_NEW_TOKENS)]
            self.ids.append([[*ids, end] if len(ids) < MAX_NEW_TOKENS else ids for ids in drawn])
        self.rewards = torch.rand(16, generator=draw, dtype=torch.float64).tolist()
        self.flat = [ids for of_prompt in self.ids for ids in of_prompt]

    def batch(self, masked: bool) -> dict[str, Any]:
        """Returns all completions in one packed row, with the advantages of their rewards."""
        asked = [self.tokenizer(prompt)["input_ids"] for prompt in self.prompts for _ in range(4)]
        pieces = []
        for prompt, ids in zip(asked, self.flat, strict=True):
            is_learned = not (masked and len(ids) == MAX_NEW_TOKENS)
            pieces.append((np.array(prompt + ids), [False] * len(prompt) + [is_learned] * len(ids)))
        batch = stack([sample_of(pieces, sum(len(ids) for ids, _ in pieces), 0)])
        advantages = torch.tensor(advantages_of(np.array(self.rewards), 4, "group"), dtype=torch.float32)
        zeros = torch.zeros(batch["input_ids"].shape)
        segments = segments_of([pieces], batch["input_ids"])
        return {**batch, "segments": segments, "advantages": advantages, "drawn": zeros}


def gradients_of_trl(folder: Path, output: Path, of: Asked, loss: str, masked: bool) -> list[torch.Tensor]:
    """Returns the gradients of GRPOTrainer's first step, in two micro-batches, on the given completions."""
    trl = pytest.importorskip("trl")
    args = trl.GRPOConfig(
        output_dir=str(output),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=MAX_NEW_TOKENS,
        loss_type=loss,
        mask_truncated_completions=masked,
        max_steps=1,
        max_grad_norm=1e9,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
    )
    rewards = dict(zip(map(tuple, of.flat), of.rewards, strict=True))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completion_ids, **_: [rewards[tuple(ids)] for ids in completion_ids],
        args=args,
        processing_class=of.tokenizer,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in of.prompts]),
    )
    known = {tuple(of.tokenizer(prompt)["input_ids"]): ids for prompt, ids in zip(of.prompts, of.ids, strict=True)}

    def given(prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        left = {asked: iter(ids) for asked, ids in known.items()}
        return [next(left[tuple(ids)]) for ids in prompt_ids], None

    trainer._generate_single_turn = given
    found: list[torch.Tensor] = []
    clip = trainer.accelerator.clip_grad_norm_

    def kept(parameters: Any, *rest: Any, **named: Any) -> Any:
        found.extend(parameter.grad.clone() for parameter in model.parameters())
        return clip(parameters, *rest, **named)

    trainer.accelerator.clip_grad_norm_ = kept
    trainer.train()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "masked"), [("dapo", False), ("grpo", False), ("dr_grpo", False), ("dapo", True), ("dr_grpo", True)]
)
def test_gradients_are_those_of_trl_on_the_same_completions(
    loss: str, masked: bool, folder: Path, tmp_path: Path
) -> None:
    of = Asked(folder)
    expected = gradients_of_trl(folder, tmp_path, of, loss, masked)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    objective = Grpo(model, loss, 0.0, MAX_NEW_TOKENS)
    batch = objective.on_host(of.batch(masked))
    (objective.training_sums(model, batch)[0] / objective.count_targets(batch)).backward()
    assert max(float(gradient.abs().max()) for gradient in expected) > 0.01, "there is something to compare"
    for (name, mine), theirs in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(
            mine.grad, theirs, atol=1e-6, rtol=1e-5, msg=lambda told, name=name: f"{name}: {told}"
        )
