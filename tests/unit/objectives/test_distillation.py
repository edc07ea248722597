"""Distillation: its loss and gradients against full logits and TRL, what it refuses, and the teacher's part."""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.ledger import Ledger
from support.texts import make_texts
from support.tiny import llama, save_llama
from support.whole_divergence import KINDS, N, V, heads, whole_divergence
from transformers import AutoTokenizer

from toolkit.data.tokens import tokenizer
from toolkit.errors import BadInputError
from toolkit.objectives.distillation import Distillation
from toolkit.objectives.losses import divergence as module
from toolkit.objectives.losses import fused_linear_cross_entropy
from toolkit.objectives.losses.divergence import Divergence, TeacherSide, summed_divergence
from toolkit.objectives.losses.fused_linear_cross_entropy import AfterHead
from toolkit.objectives.teacher import load_teacher, require_same_tokens, teacher_without_weights
from toolkit.recipe.recipe import Recipe

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its interface is not stable
    from trl.experimental.gkd import GKDTrainer


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize(
    ("temperature", "ratio", "after", "rows"),
    [
        (1.0, 1.0, AfterHead(), (V, V)),
        (2.0, 0.3, AfterHead(scale=0.5), (V + 5, V)),
        (0.7, 0.5, AfterHead(cap=4.0), (V, V + 3)),
    ],
)
def test_loss_and_gradients_are_those_of_whole_logits(
    kind: str,
    beta: float,
    temperature: float,
    ratio: float,
    after: AfterHead,
    rows: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_linear_cross_entropy, "MIN_CHUNK_TOKENS", 5)
    monkeypatch.setattr(module, "ENTRIES", 1)  # chunks of five tokens, the last one of three
    student, targets, (of_teacher, weight, bias) = heads(*rows)
    divergence = Divergence(kind, beta, temperature, ratio)
    side = TeacherSide(of_teacher, weight, bias, AfterHead(cap=6.0))
    loss, sums = summed_divergence(*student, targets, side, divergence, after)
    found = torch.autograd.grad(3 * loss.squeeze(), student)

    exact = tuple(tensor.detach().double().requires_grad_() for tensor in student)
    z = F.linear(*exact) * after.scale
    z = z if after.cap is None else after.cap * torch.tanh(z / after.cap)
    y = 6.0 * torch.tanh(F.linear(of_teacher.double(), weight.double(), bias.double()) / 6.0)
    shared = min(rows)
    divergences = whole_divergence(z[:, :shared], y[:, :shared], kind, beta, temperature).sum()
    cross_entropy = F.cross_entropy(z, targets, reduction="sum")
    whole = (1 - ratio) * cross_entropy + ratio * temperature**2 * divergences
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    assert sums.tolist() == pytest.approx([cross_entropy.item(), divergences.item()], rel=1e-6)
    for gradient, expected in zip(found, torch.autograd.grad(3 * whole, exact), strict=True):
        assert (gradient - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize(("kind", "beta", "trls"), [("forward_kl", 0.5, 0), ("reverse_kl", 0.5, 1), ("jsd", 0.3, 0.3)])
def test_divergences_are_trls(kind: str, beta: float, trls: float) -> None:
    """TRL leaves the factor of T^2 out, which is ours for the mix with the labels."""
    draw = torch.Generator().manual_seed(1)
    z, y = (3 * torch.randn(N, V, generator=draw) for _ in range(2))
    targets = torch.zeros(N, dtype=torch.long)
    labels = targets.masked_fill(torch.arange(N) % 3 == 0, -100)
    expected = GKDTrainer.generalized_jsd_loss(
        z[None], y[None], labels[None], beta=trls, temperature=1.7, reduction="sum"
    )
    learned = labels >= 0
    found = Divergence(kind, beta, 1.7, 1.0).compare(z[learned], y[learned], targets[learned])[1].sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_student_that_is_its_teacher_has_no_divergence() -> None:
    z = torch.randn(N, V)
    for kind, beta in KINDS:
        gradient = z.clone()
        _, found = Divergence(kind, beta, 1.0, 1.0).compare(gradient, z.clone(), torch.zeros(N, dtype=torch.long))
        assert found.abs().max() < 1e-6
        assert gradient.abs().max() < 1e-6


def test_no_whole_logits_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_linear_cross_entropy, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(module, "ENTRIES", 4 * 600)
    student, targets, (of_teacher, weight, bias) = heads(600, 600, tokens=400)
    for kind, beta in KINDS:
        with Ledger() as ledger:
            side = TeacherSide(of_teacher, weight, bias, AfterHead())
            summed_divergence(*student, targets, side, Divergence(kind, beta), AfterHead())[0].backward()
        # Chunks of four tokens, two heads, their inputs and gradients.
        assert ledger.peak < 4 * 400 * 600 / 4, kind


def batch(vocabulary: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Two rows; the first holds two documents."""
    ids = torch.randint(1, vocabulary, (2, 16), generator=torch.Generator().manual_seed(3))
    positions = torch.stack([torch.arange(16) % 9, torch.arange(16)])
    labels = ids.masked_fill(positions < 2, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def test_the_objective_is_two_forwards() -> None:
    student, teacher = llama(seed=1), llama(seed=2, num_hidden_layers=3, hidden_size=48)
    objective = Distillation(student, True, copy.deepcopy(teacher), Divergence("jsd", 0.3, 1.5, 0.4))
    given = batch(131)
    loss, figures = objective.training_sums(student, objective.on_host(given))
    loss.backward()
    plain = copy.deepcopy(student).requires_grad_()
    plain.zero_grad()
    inputs = {name: given[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        y = teacher(**inputs, use_cache=False).logits[:, :-1]
    z = plain(**inputs, use_cache=False).logits[:, :-1]
    # Nothing is predicted over the end of a document: its first label is -100 here.
    labels = given["labels"][:, 1:]
    learned = labels >= 0
    divergences = whole_divergence(z[learned], y[learned], "jsd", 0.3, 1.5).sum()
    cross_entropy = F.cross_entropy(z[learned], labels[learned], reduction="sum")
    whole = 0.6 * cross_entropy + 0.4 * 1.5**2 * divergences
    whole.backward()
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    assert figures.tolist() == pytest.approx([divergences.item(), cross_entropy.item()], rel=1e-5, abs=1e-5)
    for ours, theirs in zip(student.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() <= 1e-5 * theirs.grad.abs().max()
    assert all(
        parameter.grad is None and not parameter.requires_grad for parameter in objective.teacher.model.parameters()
    )
    sums = objective.evaluation_sums(student, given).tolist()
    record = objective.evaluation_record(sums)
    count = int(learned.sum())
    assert record["target_tokens"] == count
    assert record["loss"] == pytest.approx(whole.item() / count, rel=1e-6)
    assert record["perplexity"] == pytest.approx(math.exp(cross_entropy.item() / count), rel=1e-5)


def test_the_check_knows_a_loss_of_other_logits() -> None:
    student = llama(seed=1)
    objective = Distillation(student, True, llama(seed=2), Divergence("reverse_kl", temperature=2.0))
    device = torch.device("cpu")
    assert "heads' inputs" in objective.check_head_loss(student, device, in_16_bits=False)
    objective.teacher.head_loss.after = AfterHead(scale=2.0)
    with pytest.raises(BadInputError, match="and whole logits"):
        objective.check_head_loss(student, device, in_16_bits=False)


def test_a_teacher_without_a_plain_head_is_refused() -> None:
    teacher = llama(seed=2)
    teacher.lm_head.forward = lambda hidden: hidden
    with pytest.raises(BadInputError, match=r"objective\.teacher: .*not a plain Linear"):
        Distillation(llama(), True, teacher, Divergence())


@pytest.mark.parametrize("name", ["outputs/quickstart/export", "outputs/notes/export", "quickstart/export/"])
def test_a_model_that_a_shipped_recipe_makes_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = Recipe.load("distill", [f"model.tokenizer={name}", f"objective.teacher={name}"])
    mend = "make it by `toolkit train quickstart`, or " if name.startswith("outputs/quickstart") else ""
    told = re.escape(f"the folder {name!r} does not exist; {mend}name a model's folder or a hub name")
    with pytest.raises(BadInputError, match=f"^model.tokenizer: {told}"):
        tokenizer.load(recipe.model, recipe.data)
    with pytest.raises(BadInputError, match=f"^objective.teacher: {told}"):
        teacher_without_weights(recipe, "no")
    assert list(tmp_path.iterdir()) == []


def test_weights_of_a_teacher_that_do_not_fit_name_its_field(tmp_path: Path) -> None:
    folder = save_llama(tmp_path, make_texts(60), tied=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 8}))
    recipe = Recipe.load("distill", [f"model.name_or_path={folder}", f"objective.teacher={folder}"])
    teacher = load_teacher(recipe, AutoTokenizer.from_pretrained(folder), "no", False)
    assert teacher is not None
    with pytest.raises(BadInputError, match=r"^objective\.teacher: the weights (.|\n)*, correct its config\.json$"):
        teacher.load_weights()


def test_tokenizers_are_compared(tmp_path: Path) -> None:
    own, other = (
        AutoTokenizer.from_pretrained(save_llama(tmp_path / name, make_texts(60, seed=seed), tied=True))
        for name, seed in (("own", 0), ("other", 9))
    )
    require_same_tokens(own, copy.deepcopy(own))
    with pytest.raises(BadInputError, match=r"is token \d+ of the student's tokenizer and (no )?token"):
        require_same_tokens(own, other)
    ends_otherwise = copy.deepcopy(own)
    ends_otherwise.eos_token = own.pad_token
    with pytest.raises(BadInputError, match=r"eos_token of the student's tokenizer is .*endoftext.* of the teacher's"):
        require_same_tokens(own, ends_otherwise)
    more = copy.deepcopy(own)
    more.add_tokens(["more"])
    with pytest.raises(BadInputError, match=r"'more' is no token of the student's tokenizer and token \d+ of the"):
        require_same_tokens(own, more)
