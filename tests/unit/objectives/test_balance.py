"""toolkit.objectives.coefficient and toolkit.model.routers: what is counted, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.moe import MODELS, chosen, micro_batches, mixture
from support.tiny import llama, tiny_config
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils.output_capturing import OutputRecorder

from toolkit.errors import BadInputError
from toolkit.model.routers import find_routers, own_coefficient
from toolkit.objectives.losses.balance import Balance, build_balance, experts_fact
from toolkit.recipe.objectives.objective_section import ObjectiveSection
from toolkit.training.usage import model_flops


@pytest.mark.parametrize("kind", MODELS)
def test_the_routers_are_those_whose_logits_transformers_records(kind: str) -> None:
    model = mixture(kind)
    routers = find_routers(model)
    assert len(routers) == 2
    assert all(path.startswith(f"model.layers.{i}.") for i, path in enumerate(router.path for router in routers))
    assert all((router.bias is not None) == (kind == "deepseek_v3") for router in routers)


def test_a_list_of_experts_is_read_for_each_layer() -> None:
    """HunYuan's `moe_topk`, of which transformers takes each layer's own."""
    config = tiny_config("hunyuan_v1_moe")
    config.moe_topk = [1, 3]
    model = AutoModelForCausalLM.from_config(config)
    assert [router.top_k for router in find_routers(model)] == [1, 3]
    flops = {layers: model_flops(_with_experts(layers)).per_token for layers in ((1, 3), (1, 1), (3, 3))}
    assert flops[1, 1] < flops[1, 3] < flops[3, 3]


def _with_experts(of_layers: tuple[int, ...]) -> Any:
    config = tiny_config("hunyuan_v1_moe")
    config.moe_topk = list(of_layers)
    return AutoModelForCausalLM.from_config(config)


def test_the_recorded_loss_is_the_one_that_is_minimised() -> None:
    """Of two micro-batches in turn, the first has its own load, and the second that of both."""
    model, batches = mixture("olmoe"), micro_batches(2)
    balance = Balance(find_routers(model), 1.0)
    balance.begin(sum(int(batch["lengths"].sum()) for batch in batches), 1.0)
    expected, counts = 0.0, torch.zeros(2, 4)
    for batch in batches:
        with balance.observing(batch):
            model(input_ids=batch["input_ids"], use_cache=False)
        balance.exchange()
        routed = model.model(input_ids=batch["input_ids"], output_router_logits=True, use_cache=False).router_logits
        real = (torch.arange(12) < batch["lengths"][:, None]).flatten()
        for layer, logits in enumerate(routed):
            counts[layer] += chosen(model, logits[real], layer, 2).sum(dim=0)
            f = 2 * counts[layer] / counts[layer].sum()
            expected += 4 * (logits[real].softmax(dim=-1) @ f).sum().item() / 2
    assert balance.loads()[1] == pytest.approx(expected / sum(int(batch["lengths"].sum()) for batch in batches))


@pytest.mark.parametrize("kind", MODELS)
def test_the_choices_of_real_tokens_are_counted_and_padding_is_not(kind: str) -> None:
    """Padding is routed, too, and counts for nothing."""
    model, batch = mixture(kind), micro_batches(1)[0]
    balance = Balance(find_routers(model))
    balance.begin(int(batch["lengths"].sum()), 1.0)
    with balance.observing(batch):
        model(input_ids=batch["input_ids"], use_cache=False)
    balance.exchange()
    found = torch.tensor(balance.loads()[0])
    routed = model.model(input_ids=batch["input_ids"], output_router_logits=True, use_cache=False).router_logits
    real = (torch.arange(12) < batch["lengths"][:, None]).flatten()
    for layer, logits in enumerate(routed):
        choices = chosen(model, logits.flatten(0, -2)[real], layer, 2).sum(dim=0)
        torch.testing.assert_close(found[layer], choices / choices.sum())


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4, 16))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.t()


class Alone(nn.Module):
    """Chooses outside of its router, as DBRX does, which gives (rows, tokens, experts) and nothing else."""

    can_record_outputs = {"router_logits": [OutputRecorder(Gate, index=0)]}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(67, 16)
        self.gate = Gate()

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        logits: torch.Tensor = self.gate(self.embedding(input_ids))
        return logits


def test_a_router_that_gives_logits_alone_is_counted_by_the_largest() -> None:
    model, batch = Alone(), micro_batches(1)[0]
    balance = Balance(find_routers(model), 1.0)
    balance.begin(int(batch["lengths"].sum()), 1.0)
    with balance.observing(batch):
        logits = model(batch["input_ids"], use_cache=False)
    balance.exchange()
    real = (torch.arange(12) < batch["lengths"][:, None]).flatten()
    largest = logits.detach().flatten(0, 1)[real].argmax(dim=-1)
    assert balance.loads()[0] == [pytest.approx((torch.bincount(largest, minlength=4) / len(largest)).tolist())]
    (0 * logits.sum()).backward()
    assert float(model.gate.weight.grad.abs().max()) > 0, "the balance loss alone moves it"


def test_a_checkpoint_that_runs_a_block_again_counts_nothing_and_routes_the_same() -> None:
    """torchtitan#4772 forbids checkpointing with a balance loss. Jitter draws noise: the same in both forwards."""
    model = mixture("mixtral", router_jitter_noise=0.3)
    balance = Balance(find_routers(model), 1.0)
    routed: list[list[torch.Tensor]] = [[], []]
    for number, router in enumerate(balance.routers):
        router.module.register_forward_hook(lambda _m, _a, output, n=number: routed[n].append(output[2].clone()))
    for block in model.model.layers:
        forward = block.forward
        block.forward = lambda *args, _f=forward, **kwargs: checkpoint(_f, *args, use_reentrant=False, **kwargs)
    batch = micro_batches(1)[0]
    balance.begin(int(batch["lengths"].sum()), 1.0)
    with balance.observing(batch):
        loss = model(input_ids=batch["input_ids"], use_cache=False).logits.square().mean()
    balance.exchange()
    before = balance.loads()
    loss.backward()
    assert balance.loads() == before
    for first, again in routed:
        assert torch.equal(first, again)


def test_the_balance_loss_reaches_the_router_and_nothing_else_without_a_coefficient() -> None:
    """NeMo Automodel#1408: the auxiliary loss never reaches the router."""
    found = []
    for coefficient in (0.0, 1.0):
        model = mixture("olmoe")
        balance = build_balance(ObjectiveSection(router_aux_coef=coefficient), model)
        batch = micro_batches(1)[0]
        balance.begin(int(batch["lengths"].sum()), 1.0)
        with balance.observing(batch):
            loss = model(input_ids=batch["input_ids"], use_cache=False).logits.square().mean()
        balance.exchange()
        loss.backward()
        found.append(model.model.layers[1].mlp.gate.weight.grad)
    assert float((found[0] - found[1]).abs().max()) > 1e-4


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(BadInputError, match=r"router_aux_coef: 0\.1 has no effect: the model has no experts"):
        build_balance(ObjectiveSection(router_aux_coef=0.1), llama())
    assert build_balance(ObjectiveSection(router_aux_coef=0.0), llama()).routers == []


@pytest.mark.parametrize("kind", [*MODELS, "doge", "jetmoe"])
def test_experts_whose_routers_are_not_found_never_train_without_their_loss_in_silence(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"doge": {"is_moe": True}, "jetmoe": {"num_local_experts": 4, "kv_channels": 8}}
    config = tiny_config(kind) if kind in made else None
    if config is not None:
        config.update(made[kind])
    model = AutoModelForCausalLM.from_config(config) if config is not None else mixture(kind)
    build_balance(ObjectiveSection(), model)  # as transformers is today
    for module in model.modules():
        if getattr(module, "_can_record_outputs", None):
            monkeypatch.setattr(type(module), "_can_record_outputs", {})
    assert find_routers(model) == []
    own = {"deepseek_v3": None, "olmoe": "0.01", "jetmoe": "0.01"}.get(kind, "0.001")
    if own is None:
        assert build_balance(ObjectiveSection(), model).coefficient == 0
    else:
        with pytest.raises(BadInputError, match=f"routers are not found, .* loss with coefficient {own}, which"):
            build_balance(ObjectiveSection(), model)
    with pytest.raises(BadInputError, match=r"routers are not found, .*router_aux_coef is 0\.5.* which would be"):
        build_balance(ObjectiveSection(router_aux_coef=0.5), model)
    assert build_balance(ObjectiveSection(router_aux_coef=0.0), model).coefficient == 0  # what the error says


def test_a_model_without_experts_keeps_a_coefficient_without_effect() -> None:
    """Families of experts have dense members, whose configurations have the coefficient all the same."""
    for kind, fields in (("qwen2_moe", {"mlp_only_layers": [0, 1]}), ("doge", {"is_moe": False}), ("llama", {})):
        config = tiny_config(kind)
        config.update(fields)
        assert build_balance(ObjectiveSection(), AutoModelForCausalLM.from_config(config)).routers == []


def test_the_run_says_which_coefficient_holds() -> None:
    model = mixture("olmoe")
    own = build_balance(ObjectiveSection(), model)
    assert own.coefficient == own_coefficient(model) == 0.01
    told = experts_fact(model, own, None, by_block=False)
    assert "balance loss 0.01 (the model's router_aux_loss_coef), over all ranks and the step's micro-batches" in told
    none = experts_fact(model, build_balance(ObjectiveSection(router_aux_coef=0.0), model), 0.0, by_block=False)
    assert "no balance loss" in none
    deepseek = mixture("deepseek_v3")
    told = experts_fact(deepseek, build_balance(ObjectiveSection(), deepseek), None, by_block=True)
    assert "no balance loss (the model has none of its own); biases stay as they are" in told
