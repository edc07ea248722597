"""The loss without full logits is the loss with them, of every kind of model; and it holds no full logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from support.ledger import Ledger
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Cohere2Config,
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    Qwen3MoeConfig,
)

from toolkit.objectives.causal_lm import CausalLM
from toolkit.objectives.losses import fused_linear_cross_entropy
from toolkit.objectives.losses.find_head import find_head_loss
from toolkit.objectives.losses.fused_linear_cross_entropy import AfterHead, HeadLoss
from toolkit.objectives.losses.preference_losses import LOSSES
from toolkit.objectives.preference import Preference

VOCABULARY = 90
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 64}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
SSM = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}

CONFIGS: dict[str, Callable[[], Any]] = {
    "untied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "cap": lambda: Gemma2Config(**GROUPED, final_logit_softcapping=0.3),
    "multiplied": lambda: Cohere2Config(**GROUPED, logit_scale=3.0),
    "divided": lambda: GraniteConfig(**GROUPED, logits_scaling=0.3),
    "multiplier": lambda: FalconH1Config(**GROUPED, **SSM, lm_head_multiplier=2.5),
    "bias": lambda: PhiConfig(**SIZES, tie_word_embeddings=False),
    "gpt2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64),
    "decoder inside": lambda: OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32),
    "layers before the head": lambda: BertConfig(**SIZES, is_decoder=True),
    "experts": lambda: Qwen3MoeConfig(**GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}
AFTER = {
    "cap": AfterHead(1.0, 0.3),
    "multiplied": AfterHead(3.0),
    "divided": AfterHead(1 / 0.3),
    "multiplier": AfterHead(2.5),
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 7 tokens, and the weight's gradient in blocks of 10 rows."""
    monkeypatch.setattr(fused_linear_cross_entropy, "MIN_CHUNK_TOKENS", 7)
    monkeypatch.setattr(fused_linear_cross_entropy, "CHUNK_ENTRIES", 1)
    monkeypatch.setattr(fused_linear_cross_entropy, "BLOCK_ENTRIES", 320)


def make(name: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()  # no dropout
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases and norms have something to say
    return model


def batch_of(rows: int = 3, tokens: int = 20, masked: float = 0.4) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=draw)
    labels = ids.masked_fill(torch.rand((rows, tokens), generator=draw) < masked, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(tokens).expand(rows, tokens)}


def whole(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of full logits, without the toolkit."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum", ignore_index=-100)


def with_gradients(model: nn.Module, loss: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    (0.7 * loss).backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def require_same(model: nn.Module, found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    """Loss and gradients, each gradient's difference relative to its norm."""
    loss, gradients = with_gradients(model, expected)
    own_loss, own = with_gradients(model, found)
    assert own_loss == pytest.approx(loss, rel=tolerance)
    assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # A gradient that is 0 in exact arithmetic (a key's bias) is noise in both.
        assert float((own[name] - gradient).norm()) <= tolerance * max(1.0, float(gradient.norm())), name


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_whole_logits(name: str) -> None:
    model, batch = make(name), batch_of()
    objective = CausalLM(model, packed=False)
    assert isinstance(objective.head_loss, HeadLoss), objective.head_loss
    after = AFTER.get(name, AfterHead())
    assert objective.head_loss.after.scale == pytest.approx(after.scale, rel=1e-6)
    assert objective.head_loss.after.cap == (after.cap and pytest.approx(after.cap, rel=1e-6))
    require_same(model, objective.loss_sum(model, batch), whole(model, batch))
    assert "forward" not in vars(model), "the model is as it was"


def test_it_is_told_from_a_model_without_weights() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["cap"](), dtype=torch.bfloat16)
    found = find_head_loss(model)
    assert isinstance(found, HeadLoss)
    assert found.after == AfterHead(1.0, pytest.approx(0.3))


def test_no_target_at_all_is_a_loss_of_0_with_gradients_of_0() -> None:
    model, batch = make("bias"), batch_of(masked=1.1)
    loss, gradients = with_gradients(model, CausalLM(model).loss_sum(model, batch))
    assert loss == 0.0
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    assert all(float(gradient.abs().max()) == 0.0 for gradient in gradients.values())


@pytest.mark.parametrize("frozen", ["lm_head", "model"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    model, batch = make("bias"), batch_of()
    model.get_submodule(frozen).requires_grad_(False)
    require_same(model, CausalLM(model).loss_sum(model, batch), whole(model, batch))


def test_evaluation_takes_it_too() -> None:
    model, batch = make("cap"), batch_of()
    with torch.no_grad(), Ledger() as ledger:
        sums = CausalLM(model).evaluation_sums(model, batch)
    assert sums.tolist() == pytest.approx([whole(model, batch).item(), int((batch["labels"][:, 1:] >= 0).sum())])
    assert ledger.largest < 60 * VOCABULARY * 4


@pytest.mark.parametrize("name", ["untied", "tied", "cap"])
@pytest.mark.parametrize("how", ["autocast", "weights", "weights, one chunk"])
def test_in_bfloat16(monkeypatch: pytest.MonkeyPatch, name: str, how: str) -> None:
    """As near to float32's as the plain way in bfloat16 is, give or take its own rounding."""
    batch = batch_of()
    exact = with_gradients(model := make(name), whole(model, batch))
    if how == "weights, one chunk":
        monkeypatch.setattr(fused_linear_cross_entropy, "MIN_CHUNK_TOKENS", 100)
    if how != "autocast":
        model.to(torch.bfloat16)
    found, plain = [], []
    for loss_of, kept in ((CausalLM(model).loss_sum, found), (whole, plain)):
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            loss = loss_of(model, batch)
        assert loss.dtype == torch.float32
        kept += with_gradients(model, loss)
    assert found[0] == pytest.approx(exact[0], rel=5e-3)
    for parameter, gradient in exact[1].items():
        own, theirs = ((kept[1][parameter].float() - gradient).norm() / gradient.norm() for kept in (found, plain))
        assert own <= 1.25 * theirs + 2e-3, parameter


def test_a_second_backward_is_refused() -> None:
    model = make("untied")
    loss = CausalLM(model).loss_sum(model, batch_of())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        loss.backward()


def test_with_adapters() -> None:
    batch = batch_of()
    model = peft.get_peft_model(make("untied"), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    objective = CausalLM(model)
    assert isinstance(objective.head_loss, HeadLoss)
    require_same(model, objective.loss_sum(model, batch), whole(model, batch))


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"target_modules": ["q_proj", "lm_head"]}, "Linear"), ({"modules_to_save": ["lm_head"]}, "ModulesToSaveWrapper")],
)
def test_an_adapted_head_goes_by_whole_logits(settings: dict[str, Any], what: str) -> None:
    batch = batch_of()
    model = peft.get_peft_model(make("untied"), peft.LoraConfig(**{"target_modules": ["q_proj"], **settings}))
    objective = CausalLM(model)
    assert f"is a {what}, not a plain Linear" in str(objective.head_loss)
    require_same(model, objective.loss_sum(model, batch), whole(model, batch))


class Odd(nn.Module):
    """A Llama that does something else to its logits."""

    def __new__(cls, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        model = make("untied")

        class OddLlama(type(model)):  # type: ignore[misc]
            def forward(self, **inputs: Any) -> Any:
                outputs = super().forward(**inputs)
                outputs.logits = change(outputs.logits)
                return outputs

        model.__class__ = OddLlama
        return model


@pytest.mark.parametrize(
    "change",
    [
        lambda z: z[..., :80],
        lambda z: z.roll(1, dims=1),
        lambda z: z.relu(),
        lambda z: z + 0.01,
        lambda z: -z,
        lambda z: z.clamp(-30, 30),
        lambda z: z.log_softmax(-1),
        lambda z: torch.cat([z[..., :5] - 1e4, z[..., 5:]], dim=-1),
    ],
    ids=["fewer", "rolled", "relu", "shifted", "negated", "clamped", "normalised", "suppressed"],
)
def test_a_model_that_does_more_to_its_logits_goes_by_whole_ones(change: Any) -> None:
    model = Odd(change)
    objective = CausalLM(model, packed=False)
    assert objective.head_loss == "OddLlama does more to its logits than to scale or cap them"
    told = objective.check_head_loss(model, torch.device("cpu"), False)
    assert told == f"from full logits: {objective.head_loss}"


def test_a_model_that_turns_out_to_give_another_loss_goes_by_whole_logits() -> None:
    model, batch = make("untied"), batch_of()
    objective = CausalLM(model)
    told = objective.check_head_loss(model, torch.device("cpu"), False)
    assert told == "from the head's inputs, logits of 7 tokens at a time"
    # Only in the whole model, where nobody has looked.
    model.register_forward_hook(lambda _module, _args, output: None if torch.is_tensor(output) else scaled(output))
    told = objective.check_head_loss(model, torch.device("cpu"), False)
    assert told.startswith("from full logits: on a few tokens the head's inputs give ")
    require_same(model, objective.loss_sum(model, batch), whole(model, batch))


def scaled(output: Any) -> Any:
    output.logits = 1.01 * output.logits
    return output


def test_another_model_than_the_objectives_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="made for another model"):
        CausalLM(make("untied")).loss_sum(make("untied"), batch_of())


@pytest.mark.parametrize("name", ["untied", "cap", "bias"])
def test_log_probabilities_of_documents(name: str) -> None:
    """Each with a factor of its own in the loss, as preferences have them."""
    model, batch = make(name), batch_of()
    batch["segments"] = torch.tensor([[0] * 7 + [1] * 13, [2] * 10 + [3] * 10, [4] * 5 + [5] * 12 + [-1] * 3])
    batch["reference"] = torch.full((3, 2), math.nan)  # three pairs
    factors = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.1, 0.7])
    objective = Preference(model, LOSSES["simpo"], {})
    sums, counts = objective.log_probabilities(model, batch)
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits.log_softmax(-1)
    expected, number = [torch.zeros(()) for _ in range(6)], [0] * 6
    for row in range(3):
        for t in range(1, 20):
            label, document = int(batch["labels"][row, t]), int(batch["segments"][row, t])
            if label >= 0 and document >= 0 and document == batch["segments"][row, t - 1]:
                expected[document] = expected[document] + logits[row, t - 1, label]
                number[document] += 1
    assert counts.flatten().tolist() == number
    assert sums.flatten().tolist() == pytest.approx([value.item() for value in expected], rel=1e-6)
    require_same(model, (sums.flatten() * factors).sum(), (torch.stack(expected) * factors).sum())


# Memory

TOKENS, LARGE = 256, 32_768
WHOLE_LOGITS = TOKENS * LARGE * 4


def wide() -> Any:
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "vocab_size": LARGE, "num_hidden_layers": 1}))


def peak(loss_of: Any) -> int:
    """Bytes of a forward and a backward, above the model."""
    model = wide()
    ids = torch.randint(0, LARGE, (1, TOKENS))
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(TOKENS)[None]}
    objective = CausalLM(model)
    with Ledger() as ledger:
        (loss_of or objective.loss_sum)(model, batch).backward()
    return ledger.peak


@pytest.fixture
def _real_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_linear_cross_entropy, "CHUNK_ENTRIES", 16 * LARGE)


@pytest.mark.usefixtures("_real_chunks")
def test_whole_logits_are_never_there() -> None:
    weights = 2 * LARGE * 32 * 4  # gradients of embeddings and head
    assert peak(whole) > 2 * WHOLE_LOGITS + weights, "the ledger sees full logits where there are some"
    assert peak(None) < 0.25 * WHOLE_LOGITS + weights


@pytest.mark.usefixtures("_real_chunks")
@pytest.mark.parametrize("loss", [fused_linear_cross_entropy.summed_loss, fused_linear_cross_entropy.token_losses])
def test_one_chunk_is_there_at_a_time(loss: Any) -> None:
    hidden, weight = torch.randn((TOKENS, 8), requires_grad=True), torch.randn((LARGE, 8))
    targets = torch.randint(0, LARGE, (TOKENS,))
    with Ledger() as ledger:
        loss(hidden, weight, None, targets).sum().backward()
    own = ledger.peak - weight.nbytes  # which its views show to the ledger
    assert WHOLE_LOGITS / 16 <= own < 1.1 * WHOLE_LOGITS / 16


@pytest.mark.usefixtures("_real_chunks")
def test_a_trace_without_values_sees_the_same_peak() -> None:
    real = peak(None)
    model = wide()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(mode.from_tensor(parameter.detach())))
        ids = torch.zeros((1, TOKENS), dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(TOKENS)[None]}
        objective = CausalLM(model)
        with Ledger() as ledger:
            loss = objective.loss_sum(model, batch)
            loss.backward()
    assert isinstance(objective.head_loss, HeadLoss)
    assert isinstance(loss, FakeTensor)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert ledger.peak == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize("scale", [1.0, 1 / 64])
def test_in_float16_a_gradient_that_fits_with_its_factor_is_finite(scale: float) -> None:
    """4,096 tokens with one target: its row's gradient is beyond float16 before it is divided by their number."""
    hidden, targets = torch.full((4096, 16), 30.0, dtype=torch.float16), torch.full((4096,), 7)
    plain, ours = (torch.zeros(512, 16, dtype=torch.float16, requires_grad=True) for _ in range(2))
    (F.cross_entropy((hidden @ plain.t()).float(), targets, reduction="sum") * scale / 4096).backward()
    (fused_linear_cross_entropy.summed_loss(hidden, ours, None, targets).squeeze() * scale / 4096).backward()
    assert plain.grad is not None
    assert ours.grad is not None
    assert ours.grad.isfinite().all()
    assert (ours.grad - plain.grad).abs().max() <= 2e-3 * plain.grad.abs().max()
