"""Rows that share a sample: gradients as if each stood alone, and a model that lets them see each other is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.packed_rows import Documents, gpt2, packed, qwen
from support.tiny import llama, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM, RobertaConfig, RobertaForCausalLM, masking_utils

from toolkit.data.kinds.pairs import PairSamples
from toolkit.data.samples.packing import whole
from toolkit.data.samples.samples import TextSamples
from toolkit.errors import BadInputError
from toolkit.model.attention import document_attention
from toolkit.model.attention.document_attention import BY_DOCUMENT, register_by_document
from toolkit.model.attention.full_attention import attends_in_full
from toolkit.objectives.causal_lm import CausalLM
from toolkit.recipe.recipe import Recipe
from toolkit.run.checks import packing_check
from toolkit.run.checks.packed_rows import check_packing
from toolkit.run.checks.packing_check import LeakError, check_causal, check_leaks
from toolkit.run.stages.stages import BuiltRun, OpenedRun, ShardedModel
from toolkit.terminal import Terminal


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register_by_document()


def alone(model: nn.Module, rows: Documents) -> torch.Tensor:
    """The summed loss, one row after the other, without the toolkit."""
    total = torch.zeros(())
    for ids, targets in zip(rows.rows, rows.targets, strict=True):
        tokens = torch.from_numpy(ids)[None]
        losses = F.cross_entropy(model(input_ids=tokens).logits[0, :-1], tokens[0, 1:], reduction="none")
        total = total + losses[torch.from_numpy(targets[1:])].sum()
    return total


@pytest.mark.parametrize("attention", ["sdpa", "eager", BY_DOCUMENT])
@pytest.mark.parametrize("make", [llama, qwen, gpt2])
def test_a_packed_step_has_the_gradients_of_the_rows_alone(make: Callable[[str], nn.Module], attention: str) -> None:
    torch.manual_seed(0)
    model = make(attention)
    rows = Documents(14)
    samples = packed(rows)
    assert len(samples) < 10, "rows share samples"
    loss = alone(model, rows)
    loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    batch = samples.batch(range(len(samples)))
    found = CausalLM(model).loss_sum(model, batch)
    found.backward()
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    assert CausalLM(model).count_targets(batch) == sum(int(targets.sum()) for targets in rows.targets)
    for name, parameter in model.named_parameters():
        scale = float(expected[name].abs().max())
        assert float((parameter.grad - expected[name]).abs().max()) <= 1e-6 * max(1.0, scale), name


class Leaky(nn.Module):
    """Hides the restarts of positions from the model, as an attention mask or a cache would."""

    def __init__(self, mask: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = llama("sdpa")
        self.config = self.model.config
        self.mask = mask

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, use_cache: bool = False) -> Any:
        if self.mask:
            mask = torch.ones_like(input_ids)
            return self.model(input_ids=input_ids, position_ids=position_ids, attention_mask=mask, use_cache=False)
        through = torch.arange(input_ids.shape[1])[None].expand_as(input_ids)
        return self.model(input_ids=input_ids, position_ids=through, use_cache=use_cache)


class WrongPositions(nn.Module):
    """Keeps rows apart, but gives each other positions than it has alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = gpt2("sdpa")
        self.config = self.model.config

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, use_cache: bool = False) -> Any:
        if position_ids is None:
            return self.model(input_ids=input_ids, use_cache=False)
        starts = torch.cumsum((position_ids == 0).long(), dim=1) - 1
        return self.model(input_ids=input_ids, position_ids=position_ids + starts, use_cache=use_cache)


@pytest.mark.parametrize("make", [llama, qwen, gpt2])
def test_a_model_that_keeps_rows_apart_passes(make: Callable[[str], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make("sdpa").train()
    found = check_leaks(model, CausalLM(model), packed(Documents(30)), 3, torch.device("cpu"), False)
    assert found is not None
    assert found[0] == 0.0, "nothing of the others comes through"
    assert found[1] < 1e-5
    assert model.training


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Leaky(mask=True), r"see each other in Leaky with attention 'sdpa': .* change by .* set "),
        (lambda: Leaky(mask=False), "change by"),
        (WrongPositions, "differ by .* from its own alone"),
    ],
)
def test_a_leak_is_refused_before_the_first_step(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    with pytest.raises(BadInputError, match=f"(?i)data.packing: rows that share a sample .*{message}"):
        check_leaks(model, CausalLM(model), packed(Documents(30)), 3, torch.device("cpu"), False)


@pytest.mark.parametrize(("most", "tokens"), [(70, 64), (40, 32), (10, 10)])
def test_logits_are_of_few_tokens(monkeypatch: pytest.MonkeyPatch, most: int, tokens: int) -> None:
    """Of a micro-batch of three rows of 32: two rows, one, and the beginnings of one row's documents."""
    monkeypatch.setattr(packing_check, "MOST_TOKENS", most)
    monkeypatch.setattr(packing_check, "attends_in_full", lambda _model: False)
    torch.manual_seed(0)
    for make, leaks in ((lambda: llama("sdpa"), False), (lambda: Leaky(mask=False), True)):
        model, seen = make(), []
        model.register_forward_pre_hook(
            lambda _module, _args, given, seen=seen: seen.append(given["input_ids"].numel()), with_kwargs=True
        )
        with pytest.raises(BadInputError, match="see each other") if leaks else nullcontext():
            check_leaks(model, CausalLM(model), packed(Documents(30)), 3, torch.device("cpu"), False)
        assert max(seen) == tokens


def mistaken(model: nn.Module, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks what keeps documents apart, in transformers' masks, in ours, in the batch, or in one layer."""
    asked, blocks = masking_utils.find_packed_sequence_indices, document_attention.diagonal_blocks

    def documents(change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        def find(positions: torch.Tensor) -> torch.Tensor | None:
            found = asked(positions)
            return None if found is None else change(found)

        monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", find)

    def in_first_layer(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        layer = next(each for name, each in model.named_modules() if name.endswith("layers.0"))
        layer.register_forward_hook(lambda _module, _args, output: change(output))

    def blocks_of(change: Callable[[list[Any]], list[Any]]) -> None:
        """Changes the blocks of the first row, each of which takes itself for causal."""

        def cut(mask: torch.Tensor) -> list[Any]:
            found = blocks(mask)
            return [*change([one for one in found if one.row == 0]), *(one for one in found if one.row > 0)]

        monkeypatch.setattr(document_attention, "diagonal_blocks", cut)

    def joined(found: list[Any]) -> list[Any]:
        *others, before, last = found
        return [*others, replace(before, tokens=slice(before.tokens.start, last.tokens.stop))]

    def early(found: list[Any]) -> list[Any]:
        *others, before, last = found
        begin = last.tokens.start - 1
        return [
            *others,
            replace(before, tokens=slice(before.tokens.start, begin)),
            replace(last, tokens=slice(begin, last.tokens.stop)),
        ]

    made = {
        "documents are not found": lambda: documents(lambda _found: None),
        "a document begins one token late": lambda: documents(lambda found: F.pad(found, (1, -1), value=0)),
        "a document begins one token early": lambda: documents(lambda found: F.pad(found, (-1, 1), value=9)),
        "the last two are one": lambda: documents(lambda found: found.clamp(max=1)),
        "their blocks are one": lambda: blocks_of(joined),
        "a block begins one token early": lambda: blocks_of(early),
        "a state goes on": lambda: in_first_layer(lambda states: states + 0.01 * states.cumsum(dim=1)),
        "a convolution goes on": lambda: in_first_layer(lambda states: states + 0.01 * states.roll(1, dims=1)),
        "rows see each other": lambda: in_first_layer(lambda states: states + 0.01 * states.mean(dim=0, keepdim=True)),
    }
    made[mistake]()


MISTAKES = [
    *((mistake, attention) for attention in ("sdpa", "eager") for mistake in (
        "documents are not found", "a document begins one token late", "a document begins one token early",
        "the last two are one", "a state goes on", "a convolution goes on", "rows see each other",
    )),
    ("their blocks are one", BY_DOCUMENT),
    ("a block begins one token early", BY_DOCUMENT),
]  # fmt: skip


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(("mistake", "attention"), MISTAKES)
def test_what_no_longer_keeps_documents_apart_is_found(
    mistake: str, attention: str, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the beginnings of three documents, by which models of full attention are checked, and on whole samples."""
    model = llama(attention, max_position_embeddings=512)
    samples = long_samples()
    given = (model, CausalLM(model), samples, 2, torch.device("cpu"), False)
    assert attends_in_full(model)
    monkeypatch.setattr(packing_check, "attends_in_full", lambda _model: few)
    seen: list[int] = []
    hook = lambda _module, _args, named: seen.append(named["input_ids"].numel())  # noqa: E731
    model.register_forward_pre_hook(hook, with_kwargs=True)
    found = check_leaks(*given)
    assert found is not None
    assert max(seen) == (2 * packing_check.FEW_TOKENS if few else 2 * samples.max_length)
    mistaken(model, mistake, monkeypatch)
    with pytest.raises(BadInputError, match="see each other"):
        check_leaks(*given)


def long_samples() -> TextSamples:
    """Samples of 256 tokens, of three documents and more."""
    rows = Documents(24)
    draw = np.random.default_rng(1)
    rows.rows = [draw.integers(1, 90, draw.integers(40, 85)) for _ in range(24)]
    rows.targets = [np.arange(len(row)) > 0 for row in rows.rows]
    lengths = np.array([len(row) for row in rows.rows])
    return TextSamples(rows, whole(np.arange(24), lengths, 256), [3, 6, 9, 12, 15, 18, 21, 24], 256, True, 0)


def test_compiled_blocks_are_checked_on_the_shape_they_train_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples, seen = llama("sdpa", max_position_embeddings=512), long_samples(), []
    hook = lambda _module, _args, named: seen.append(tuple(named["input_ids"].shape))  # noqa: E731
    model.register_forward_pre_hook(hook, with_kwargs=True)
    assert check_leaks(model, CausalLM(model), samples, 2, torch.device("cpu"), False, True) is not None
    assert seen == [(1, 256), (2, 256), (2, 256)]


@pytest.mark.parametrize(("make", "leaks"), [(lambda: llama("sdpa"), False), (lambda: Leaky(mask=False), True)])
def test_completions_of_a_pair_share_a_sample_that_is_not_packed(make: Callable[[], nn.Module], leaks: bool) -> None:
    rows = Documents(6)
    lengths = np.array([len(row) for row in rows.rows])
    pieces = whole(np.arange(6), lengths, 64)
    pairs = PairSamples(rows, pieces, list(range(1, 7)), 64, False, 0, splits=lengths // 2)
    torch.manual_seed(0)
    model = make()
    with pytest.raises(BadInputError, match="Both completions of a pair share") if leaks else nullcontext():
        assert check_leaks(model, CausalLM(model), pairs, 2, torch.device("cpu"), False) is not None
    accelerator: Any = SimpleNamespace(device=torch.device("cpu"), mixed_precision="no")
    recipe: Any = Recipe.load("dpo", {"training.micro_batch_size": 2, "data.packing": False})
    data: Any = SimpleNamespace(train=pairs, report=SimpleNamespace(packing=False))
    nothing: Any = None
    opened = OpenedRun(recipe, accelerator, nothing, nothing, Terminal(quiet=True))
    sharded = ShardedModel(model, model, nothing, None, CausalLM(model), data)
    measured, why = check_packing(BuiltRun(opened, nothing, nothing, sharded))
    assert not measured
    assert ("see each other in Leaky" in str(why)) == leaks, "each completion then gets a row of its own"
    packed: Any = Recipe.load("dpo", {"training.micro_batch_size": 2, "data.packing": True})
    opened = OpenedRun(packed, accelerator, nothing, nothing, Terminal(quiet=True))
    with pytest.raises(BadInputError, match="Both completions of a pair share") if leaks else nullcontext():
        assert check_packing(BuiltRun(opened, nothing, nothing, sharded)) == ("", None)


def test_pairs_that_no_row_of_the_model_can_hold_are_kept_apart() -> None:
    """Each half has its own positions, but GPT-Neo's masks are as long as a row of these."""
    rows = Documents(6)
    lengths = np.array([len(row) for row in rows.rows])
    pairs = PairSamples(rows, whole(np.arange(6), lengths, 64), list(range(1, 7)), 64, True, 0, splits=lengths // 2)
    config = tiny_config("gpt_neo")
    config.vocab_size, config.max_position_embeddings = 131, pairs.longest
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(LeakError) as caught:
        check_leaks(model, CausalLM(model), pairs, 2, torch.device("cpu"), False)
    why = "GPTNeoForCausalLM with attention 'eager' cannot run rows that share a sample (RuntimeError: The size"
    assert caught.value.why.startswith(why)


def test_without_rows_that_share_a_sample_there_is_nothing_to_check() -> None:
    model = llama("sdpa")
    rows = Documents(3)
    rows.rows = [np.arange(1, 30)] * 3
    rows.targets = [np.arange(29) > 0] * 3
    assert check_leaks(model, CausalLM(model), packed(rows), 2, torch.device("cpu"), False) is None


@pytest.mark.parametrize("are_packed", [True, False])
def test_robertas_family_learns_at_its_own_positions(are_packed: bool) -> None:
    """They begin at padding_idx + 1; from 0 the loss is off by more than 1e-4, in the check's own reference, too."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = RobertaConfig(**sizes, vocab_size=91, max_position_embeddings=64, is_decoder=True, pad_token_id=1)
    model = RobertaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    nn.init.normal_(model.roberta.embeddings.position_embeddings.weight)
    rows = Documents(14)
    rows.rows = [np.where(row == 1, 2, row) for row in rows.rows]  # 1 is its padding
    lengths = np.array([len(row) for row in rows.rows])
    padded = TextSamples(rows, whole(np.arange(14), lengths, 32), list(range(1, 15)), 32, False, 1)
    samples = packed(rows) if are_packed else padded
    found = CausalLM(model, are_packed).loss_sum(model, samples.batch(range(len(samples))))
    assert found.item() == pytest.approx(alone(model, rows).item(), rel=1e-6)


def test_a_model_without_positions_can_only_be_padded() -> None:
    class Recurrent(nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any: ...

    with pytest.raises(BadInputError, match=r"takes no position_ids.*data.packing=false"):
        CausalLM(Recurrent())
    CausalLM(Recurrent(), packed=False)


def test_padded_rows_have_the_gradients_of_the_rows_alone() -> None:
    torch.manual_seed(0)
    model = llama("sdpa")
    rows = Documents(6)
    lengths = np.array([len(row) for row in rows.rows])
    samples = TextSamples(rows, whole(np.arange(6), lengths, 32), [1, 2, 3, 4, 5, 6], 32, False, 0)
    objective = CausalLM(model, packed=False)
    found = torch.stack([objective.loss_sum(model, samples.batch([i, i + 1])) for i in (0, 2, 4)]).sum()
    assert found.item() == pytest.approx(alone(model, rows).item(), rel=1e-6)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_an_encoder_is_no_causal_model(is_decoder: bool) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = RobertaConfig(**sizes, vocab_size=91, max_position_embeddings=64, is_decoder=is_decoder, pad_token_id=1)
    model = RobertaForCausalLM(config)
    with nullcontext() if is_decoder else pytest.raises(BadInputError, match=r"depend on later tokens.*is_decoder"):
        check_causal(model, CausalLM(model, packed=False), torch.device("cpu"))
    assert model.training
    other = llama()  # whose configuration knows no such word
    check_causal(other, CausalLM(other, packed=False), torch.device("cpu"))
