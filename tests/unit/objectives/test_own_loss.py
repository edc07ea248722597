"""A loss of the user's: what it may take and return, and what the first batch shows of it before the first step."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import tiny
from support.cases import cases

from toolkit.data.samples.samples import sample_of, stack
from toolkit.errors import BadInputError, RecipeError
from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.own_loss import FIELD, OwnLoss, arguments_of
from toolkit.recipe.recipe import Recipe
from toolkit.run.checks.own_loss_check import check_own_loss
from toolkit.user_function import UserFunction

TABLES = cases(__file__)

CPU = torch.device("cpu")


def batch_of(lengths: list[list[int]], width: int = 12) -> Any:
    """A row of documents for each list: of so many tokens, all of which are learned."""
    generator = torch.Generator().manual_seed(0)
    documents = [
        [(torch.randint(1, 131, (n,), generator=generator).numpy(), [True] * n) for n in row] for row in lengths
    ]
    return stack([sample_of(row, width, 0) for row in documents])


class Few:
    """Samples of which a check takes the first."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch["input_ids"])

    def batch(self, numbers: Any) -> Any:
        return {name: value[list(numbers)] for name, value in self._batch.items()}


def own(function: Any, packed: bool = True) -> OwnLoss:
    return OwnLoss(tiny.llama(), packed, UserFunction(f"mine.py:{function.__name__}", function, "", FIELD))


def checked(function: Any, lengths: list[list[int]]) -> tuple[OwnLoss, str | None]:
    model = tiny.llama().train()
    objective = OwnLoss(model, True, UserFunction(f"mine.py:{function.__name__}", function, "", FIELD))
    samples: Any = Few(batch_of(lengths))
    return objective, check_own_loss(model, objective, samples, 1, CPU)


ROWS = [[5, 4], [7]]


def plain(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits, labels, reduction="sum"), len(labels)


def spoiling(logits: Any, log_probabilities: Any, labels: Any, rows: Any, kept: Any = []) -> Any:  # noqa: B006
    total = plain(logits, labels.clone())[0] + 0 * log_probabilities.sum()
    kept.append(total)
    with torch.no_grad():
        logits.zero_()
        kept[-2 % len(kept)].data.mul_(len(kept) == 1)
    rows.zero_()
    labels.zero_().unsqueeze_(0)
    return total, labels.numel()


def by_row(log_probabilities: Any, weights: Any, num_rows: Any) -> Any:
    return -(weights * log_probabilities).sum(), num_rows


def test_what_it_is_given_is_that_of_the_rows_alone() -> None:
    model, given = tiny.llama(), {}

    def keep(logits: Any, log_probabilities: Any, labels: Any, rows: Any, weights: Any, num_rows: Any) -> Any:
        given.update(locals())
        return log_probabilities.sum(), num_rows

    batch = batch_of(ROWS)
    objective = own(keep)
    objective.training_sums(model, objective.on_host(batch))
    ids = batch["input_ids"]
    documents = [ids[0, :5], ids[0, 5:9], ids[1, :7]]
    expected = torch.cat([model(input_ids=document[None]).logits[0, :-1] for document in documents])
    labels = torch.cat([document[1:] for document in documents])
    torch.testing.assert_close(given["logits"], expected)
    torch.testing.assert_close(given["log_probabilities"], expected.log_softmax(-1).gather(1, labels[:, None])[:, 0])
    assert given["labels"].tolist() == labels.tolist()
    assert given["rows"].tolist() == [0] * 4 + [1] * 3 + [2] * 6
    assert given["weights"].tolist() == pytest.approx([1 / 4] * 4 + [1 / 3] * 3 + [1 / 6] * 6)
    assert given["num_rows"] == 3
    assert objective.count_targets(batch) == 3
    assert objective.unit == "rows"


def test_cross_entropy_written_as_an_own_loss_is_cross_entropy() -> None:
    model, batch = tiny.llama(), batch_of(ROWS)
    written, ours, spoils = own(plain), CausalLM(model), own(spoiling)
    gradients = []
    for objective in (written, ours, spoils):
        loss = objective.loss_sum(model, objective.on_host(batch))
        model.zero_grad()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-4, atol=1e-6)
    held = spoils.on_host(batch)
    first, second = (spoils.loss_sum(model, held) for _ in range(2))
    assert [first, held["own_rows"].any()] == [second, True], "as in a step by block"
    three = (written, ours, spoils)
    sums = [each.evaluation_record(each.evaluation_sums(model, batch).tolist()) for each in three]
    assert sums[2] == sums[0], "what a loss does to its arguments changes no other figure"
    assert sums[0]["loss"] == pytest.approx(sums[0]["cross_entropy"])
    assert {**sums[0], "cross_entropy": None} == pytest.approx({**sums[1], "cross_entropy": None})
    assert written.uniform_guess(model, None) is None


def test_a_micro_batch_without_targets_is_not_given_to_it() -> None:
    """Such as one that fills up a held-out pass; its backward still reaches every weight."""
    model, batch = tiny.llama(), batch_of(ROWS)
    batch["labels"][:] = -100
    loss, _ = own(plain).training_sums(model, batch)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_the_first_batch_decides_what_divides_the_sum() -> None:
    kept: list[torch.Tensor] = []

    def weighted(logits: Any, labels: Any) -> Any:
        for before in kept:
            before.data.zero_()
        weights = (labels % 2 + 1).float()
        kept[:] = (weights * F.cross_entropy(logits, labels, reduction="none")).sum(), weights.sum()
        return tuple(kept)

    assert checked(plain, ROWS)[1] == "divided by the targets of a step"
    assert checked(by_row, ROWS)[1] == "divided by the rows of a step"
    objective, told = checked(weighted, ROWS)
    assert objective.needs_whole_steps
    assert told == "divided by its own count, for which each micro-batch has a forward more"
    objective.sum_and_count = lambda arguments: (arguments["logits"].sum(), 3)  # type: ignore[method-assign]
    with pytest.raises(BadInputError, match="a count of the kind that it returned first"):
        objective.training_sums(tiny.llama(), batch_of(ROWS))


def test_a_loss_that_draws_has_the_same_numbers_when_it_is_counted_and_others_in_each_call() -> None:
    drawn: list[float] = []

    def noisy(logits: Any, labels: Any) -> Any:
        drawn.append(torch.rand(()).item())
        total, count = plain(logits, labels)
        return drawn[-1] * total, torch.tensor(drawn[-1] * count)

    objective, told = checked(noisy, ROWS)
    assert told is not None
    assert told.endswith("; it draws random numbers, so it is not compared with its parts")
    drawn.clear()
    model, batches = tiny.llama(), [batch_of(ROWS), batch_of([[7]])]
    window = torch.stack([objective.window_sums(model, batch) for batch in batches]).sum(0)
    sums = [objective.training_sums(model, {**batch, "window": window})[0].item() for batch in batches]
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]
    losses = [F.cross_entropy(*given(model, batch), reduction="sum").item() for batch in batches]
    weighted = sum(weight * loss for weight, loss in zip(drawn, losses, strict=False))
    assert sum(sums) == pytest.approx(weighted * (13 + 6) / (drawn[0] * 13 + drawn[1] * 6), rel=1e-5)

    def run(windows: Any) -> Any:
        return [(window(), model.training) for window in windows]

    found = objective.looked_at(model.train(), batches, run)
    assert [one["own_sums"][1] for one in found] == [False, False], "in threads, a window cannot put dropout back"
    assert model.training


def given(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    objective = own(plain)
    found = objective.arguments(model, objective.on_host(batch))
    return found["logits"], found["labels"]


def mean(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits, labels), len(labels)


def of_all_rows(log_probabilities: Any, labels: Any) -> Any:
    return -(log_probabilities - log_probabilities.mean()).square().sum(), len(labels)


def same_sum_other_gradient(log_probabilities: Any, labels: Any) -> Any:
    return -(log_probabilities + (log_probabilities - log_probabilities.detach()) * len(labels)).sum(), len(labels)


def largest(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits, labels, reduction="sum"), labels.max().float()


def infinite(logits: Any, labels: Any) -> Any:
    return (logits.sum() * 1e30) * 1e30, len(labels)


def no_targets(logits: Any, labels: Any) -> Any:
    return logits.sum(), logits.new_zeros(())


def root(log_probabilities: Any) -> Any:
    return (log_probabilities - log_probabilities.detach()).square().sum().sqrt(), len(log_probabilities)


def detached(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits.detach(), labels, reduction="sum"), len(labels)


def number(logits: Any, labels: Any) -> Any:
    return 3.0, len(labels)


def by_token(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits, labels, reduction="none"), len(labels)


def alone(logits: Any, labels: Any) -> Any:
    return F.cross_entropy(logits, labels, reduction="sum")


def rows_of_tokens(logits: Any, labels: Any, num_rows: Any) -> Any:
    return logits.sum(), len(labels)


def count_of_two(logits: Any, labels: Any) -> Any:
    return logits.sum(), labels


def fails(logits: Any, labels: Any) -> Any:
    return logits[labels.max() + 10**6].sum(), len(labels)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (mean, "the loss would depend on how a step is split into micro-batches and ranks; return the sum over the"),
        (of_all_rows, "the loss would depend on how a step is split into micro-batches and ranks"),
        (same_sum_other_gradient, "the gradient of a target depends on what else is in its micro-batch"),
        (largest, "return a count that adds up, such as len(labels)"),
        (infinite, "needs a finite sum, and a count above 0"),
        (no_targets, "needs a finite sum, and a count above 0"),
        (root, "the gradient on the first batch, of 13 targets is missing or not finite; correct the function"),
        (detached, "needs a sum with a graph to its arguments; leave out detach, item and no_grad"),
        (number, "returned 3.0 for 13 targets of 3 rows; needs as its sum a tensor without dimensions"),
        (by_token, "needs as its sum a tensor without dimensions, as losses.sum() is"),
        (alone, "needs a sum and a count, as in return losses.sum(), len(labels)"),
        (rows_of_tokens, "returned 13 for 13 targets of 3 rows; needs as an int count len(labels), or num_rows if it"),
        (count_of_two, "needs as its count len(labels), num_rows, or a tensor without dimensions"),
        (fails, "failed on 13 targets of 3 rows: IndexError"),
    ],
)
def test_what_is_no_sum_is_refused_on_the_first_batch(function: Any, told: str) -> None:
    with pytest.raises(BadInputError) as caught:
        checked(function, ROWS)
    assert str(caught.value).startswith(f"{FIELD}: ")
    assert told in str(caught.value)


def test_a_loss_of_rows_is_compared_with_whole_rows() -> None:
    """Half a row has other weights; with a single row there is nothing to compare."""
    assert checked(by_row, [[9]])[1] == "divided by the rows of a step"
    with pytest.raises(BadInputError, match="how a step is split"):
        checked(mean, [[9]])


@pytest.mark.parametrize(("takes", "told"), TABLES["TAKEN"])
def test_what_it_takes_is_read_before_the_run(takes: str, told: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def loss({takes}): pass", space)
    with pytest.raises(BadInputError) as caught:
        arguments_of(UserFunction("mine.py:loss", space["loss"], "", FIELD))
    assert str(caught.value).startswith(f"{FIELD}: mine.py:loss ")
    assert told in str(caught.value)
    exec("def other(logits, gamma=2.0, *, num_rows): pass", space)
    assert arguments_of(UserFunction("", space["other"], "", FIELD)) == ("logits", "num_rows")
    assert isinstance(space["loss"], types.FunctionType)


def test_recipes_name_it_where_it_has_an_effect(tmp_path: Path) -> None:
    text = Recipe.load("quickstart", ["objective.loss=mine.py:loss"]).to_yaml()
    (tmp_path / "recipe.yaml").write_text(text)
    (tmp_path / "dpo").mkdir()
    found = Recipe.load(tmp_path / "recipe.yaml")
    assert found.own_code() == {FIELD: f"{tmp_path}/mine.py:loss"}
    (tmp_path / "dpo.yaml").write_text(Recipe.load("dpo").to_yaml().replace("loss: null", "loss: dpo"))
    assert Recipe.load(tmp_path / "dpo.yaml").objective.loss in (None, "dpo")
    for words, told in (
        (["quickstart", "objective.loss=dpo"], "objective.loss dpo is not possible with objective.kind causal_lm"),
        (["quickstart", "objective.loss=a b:c"], "objective.loss: 'a b:c' names no function"),
        (["dpo", "objective.loss=mine.py:loss"], "not possible with objective.kind preference, which takes dpo"),
        (["kto", "objective.loss=mine.py:loss"], "objective.loss has no effect with objective.kind kto"),
        (["dpo", "objective.loss=dpa"], "objective.loss: found 'dpa'"),
        (["quickstart", "objective.loss=a.py:b", "sharding.sequence=2"], "objective.loss of your own"),
    ):
        with pytest.raises(RecipeError) as caught:
            Recipe.load(words[0], words[1:])
        assert told in str(caught.value)
