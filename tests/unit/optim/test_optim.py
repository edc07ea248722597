"""toolkit.optim.build: groups and the learning rate's shape, against values written out."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import pytest
import torch
from support.cases import cases
from support.images_by_hand import seeing_model
from support.moe import mixture
from support.tiny import llama
from torch import nn
from torch._functorch import config as functorch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import add_adapter
from toolkit.model.structure.model_parts import freeze_untrained
from toolkit.optim.build import QUANTISED, build_optimizer, parameter_groups
from toolkit.optim.muon import Muon
from toolkit.optim.schedule import build_schedule, changed_rate, learning_rate_factor, schedule_fact, without_peak
from toolkit.recipe.schema import AdapterSection, OptimizerSection, ScheduleSection

TABLES = cases(__file__)


def factors(num_steps: int, **fields: object) -> list[float]:
    factor = learning_rate_factor(ScheduleSection(**fields), num_steps)  # type: ignore[arg-type]
    return [factor(step) for step in range(num_steps)]


def test_linear() -> None:
    assert factors(6, kind="linear", warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4])


def test_linear_to_a_floor() -> None:
    assert factors(5, kind="linear", min_factor=0.2) == pytest.approx([1, 0.84, 0.68, 0.52, 0.36])


def test_cosine() -> None:
    assert factors(4, kind="cosine", min_factor=0.1) == pytest.approx([1, 0.868198, 0.55, 0.231802], abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "theirs"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_the_last_step_moves_as_in_transformers(kind: str, theirs: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = theirs(optimizer, num_warmup_steps=0, num_training_steps=7)
    expected = []
    for _ in range(7):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    found = factors(7, kind=kind)
    assert found == pytest.approx(expected)
    assert found[-1] > 0


def test_constant_after_warmup_fraction() -> None:
    assert factors(10, kind="constant", warmup_fraction=0.2) == pytest.approx([1 / 3, 2 / 3] + [1.0] * 8)


def test_warmup_stable_decay() -> None:
    found = factors(10, kind="warmup_stable_decay", warmup_steps=1, decay_fraction=0.4)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4])


def test_a_tenth_of_the_steps_decays_if_nothing_is_said() -> None:
    assert factors(20, kind="warmup_stable_decay") == pytest.approx([1.0] * 19 + [1 / 2])


def test_behind_the_last_step_the_rate_stays_at_its_floor() -> None:
    factor = learning_rate_factor(ScheduleSection(kind="linear", min_factor=0.2), 4)
    assert [factor(step) for step in (4, 5, 40)] == pytest.approx([0.2] * 3)


@pytest.mark.parametrize(("fields", "told"), TABLES["IN_WORDS"])
def test_learning_rates_in_words(fields: dict[str, Any], told: str) -> None:
    assert schedule_fact(ScheduleSection(**fields), 3e-4, 100) == told


def test_a_run_that_ends_in_its_warm_up_is_told() -> None:
    section = ScheduleSection(warmup_steps=9)
    assert without_peak(section, 3e-4, 10) is None
    assert without_peak(section, 3e-4, 9) is not None, "its ninth step is at nine tenths"
    told = without_peak(section, 3e-4, 4)
    assert told is not None
    assert "this run of 4 steps ends within its warm-up of 9: its learning rate reaches 0.00012 of 0.0003" in told


def test_the_scheduler_steps_once_per_optimizer_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, OptimizerSection(learning_rate=1.0))
    schedule = build_schedule(optimizer, ScheduleSection(kind="linear"), 3)
    seen = []
    for _ in range(3):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([1, 2 / 3, 1 / 3])


def test_a_resumed_run_whose_rate_changes_says_so() -> None:
    """Ten steps, linear to 0 from 1.0, resumed after the last: at 0.1, or with twenty steps at 0.5."""

    def resumed(steps: int, peak: float = 1.0, at: int = 10, **fields: Any) -> str | None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
        schedule = build_schedule(optimizer, ScheduleSection(**fields), steps)
        for _ in range(at):
            optimizer.step()
            schedule.step()
        records = [{"split": "train", "step": step, "learning_rate": 1.0 - (step - 1) / 10} for step in (8, 9, 10)]
        return changed_rate(schedule, [*records, {"split": "eval", "step": 10, "loss": 1.0}])

    assert resumed(10, kind="linear") is None
    assert resumed(10, at=9, kind="linear") is None, "step 10 was skipped, and its rate is that of step 11"
    told = resumed(20, kind="linear")
    assert told is not None
    assert told.startswith("the learning rate was 0.1 in step 10, and is 0.5 in the next: ")
    assert told.endswith("set 'schedule={kind: constant}' and optimizer.learning_rate=0.1")
    assert resumed(20, peak=0.1, kind="constant") is None, "what it advises"
    assert resumed(10, peak=0.5, kind="linear") is not None


def test_vectors_and_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    model[2].weight.requires_grad_(False)
    decayed, plain = parameter_groups(model, OptimizerSection(learning_rate=1.0, weight_decay=0.1))
    assert decayed == {"params": [model[0].weight], "weight_decay": 0.1}
    assert plain["params"] == [model[0].bias, model[1].weight, model[1].bias]
    assert plain["weight_decay"] == 0.0


def test_the_optimizer_is_fused() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), OptimizerSection(learning_rate=1.0))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["fused"] is True


def test_moments_of_few_bits_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(BadInputError, match=r"optimizer.kind: adamw_8bit needs torchao .*pip install"):
        build_optimizer(nn.Linear(2, 2), OptimizerSection(kind="adamw_8bit", learning_rate=1.0))


@pytest.mark.parametrize("kind", QUANTISED)
def test_moments_of_few_bits(kind: str) -> None:
    optim = importlib.import_module("torchao.optim")
    section = OptimizerSection(kind=kind, learning_rate=0.5, weight_decay=0.25, beta1=0.5, beta2=0.75, eps=1e-3)  # type: ignore[arg-type]
    optimizer = build_optimizer(nn.Linear(2, 2), section)
    assert type(optimizer) is getattr(optim, QUANTISED[kind])
    for group, decay in zip(optimizer.param_groups, (0.25, 0.0), strict=True):
        assert (float(group["lr"]), group["betas"], group["eps"]) == (0.5, (0.5, 0.75), 1e-3)
        assert group["weight_decay"] == decay


def test_muon_takes_the_matrices_of_the_blocks() -> None:
    model = llama("sdpa")
    optimizer = build_optimizer(model, OptimizerSection(kind="muon", learning_rate=1.0, weight_decay=0.1))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [(g["muon"], g["weight_decay"], {names[id(p)] for p in g["params"]}) for g in optimizer.param_groups]
    matrices = {name for name, p in model.named_parameters() if name.startswith("model.layers.") and p.ndim == 2}
    vectors = {name for name, p in model.named_parameters() if p.ndim == 1}
    assert groups[0] == (True, 0.1, matrices)
    assert groups[1] == (False, 0.1, {"model.embed_tokens.weight", "lm_head.weight"})
    assert groups[2] == (False, 0.0, vectors)


def test_muon_takes_experts_whole_and_no_convolutions() -> None:
    model = mixture("gpt_oss")
    model.model.layers[0].mixed = nn.Conv1d(4, 4, 3)  # as many as experts
    optimizer = build_optimizer(model, OptimizerSection(kind="muon", learning_rate=1.0))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken = {names[id(p)] for group in optimizer.param_groups if group["muon"] for p in group["params"]}
    experts = {f"model.layers.{i}.mlp.experts.{name}_proj" for i in range(2) for name in ("gate_up", "down")}
    assert {name for name in taken if model.get_parameter(name).ndim == 3} == experts


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_of_muon_on_stacked_experts_is_torchs_on_each(ranks: int) -> None:
    """Each rank has whole experts, as FSDP2 cuts them: of four, two and two on 2 ranks; two, two and none on 3."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 6, 10, generator=generator)
    stacks = [nn.Parameter(part.clone()) for part in start.chunk(ranks)]
    stacks += [nn.Parameter(torch.zeros(0, 6, 10))] * (ranks - len(stacks))
    each = [nn.Parameter(matrix.clone()) for matrix in start]
    ours = [Muon([{"params": [s], "muon": True}], momentum=0.9, lr=0.1, weight_decay=0.2) for s in stacks]
    theirs = torch.optim.Muon(each, lr=0.1, weight_decay=0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        gradient = torch.randn(4, 6, 10, generator=generator)
        for number, matrix in enumerate(each):
            matrix.grad = gradient[number].clone()
        for stack, part in zip(stacks, [*gradient.chunk(ranks), gradient[:0]], strict=False):
            stack.grad = part.clone()
        for optimizer in (*ours, theirs):
            optimizer.step()
    torch.testing.assert_close(torch.cat([s.detach() for s in stacks]), torch.stack([e.detach() for e in each]))


def test_routers_have_groups_of_their_own() -> None:
    section = OptimizerSection(learning_rate=1.0, weight_decay=0.1, learning_rates={"*.router.*": 0.25})
    model = mixture("gpt_oss")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optimizer(model, section).param_groups
    settings = {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert settings["model.layers.1.mlp.router.weight"] == (0.25, 0.1)
    assert settings["model.layers.1.mlp.router.bias"] == (0.25, 0.0)
    rest = {name: found for name, found in settings.items() if ".router." not in name}
    assert set(rest.values()) == {(1.0, 0.1), (1.0, 0.0)}
    for wrong in ({"*.gate.*": 0.5}, {"*.router.*": 0.5, "*.router.bias": 0.1}):
        with pytest.raises(BadInputError, match=r"optimizer\.learning_rates: '.*' matches no trained parameter"):
            build_optimizer(model, OptimizerSection(learning_rate=1.0, learning_rates=wrong))


@pytest.mark.parametrize("adapted", [False, True])
def test_parts_have_rates_of_their_own(adapted: bool) -> None:
    section = OptimizerSection(
        learning_rate=1.0, weight_decay=0.1, learning_rates={"*merger*": 0.25, "*.visual.*": 0.5}
    )
    model = seeing_model("qwen3_vl")
    model.config.architectures = [type(model).__name__]
    if adapted:
        section_of_adapters = AdapterSection(kind="lora", target_modules=["q_proj", "linear_fc1", "qkv"])
        model = add_adapter(model, section_of_adapters, None, trained=("language", "projector", "vision"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optimizer(model, section).param_groups
    found = {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert found.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, (rate, decay) in found.items():
        expected = 1.0 if "language_model" in name or "lm_head" in name else 0.5
        assert rate == (0.25 if "merger" in name else expected), name
        assert decay == (0.1 if model.get_parameter(name).ndim > 1 else 0.0), name
    assert {rate for rate, _ in found.values()} == {1.0, 0.25, 0.5}
    assert len({id(p) for group in groups for p in group["params"]}) == sum(len(group["params"]) for group in groups)


def test_a_rate_of_a_part_that_is_not_trained_is_refused() -> None:
    model = seeing_model("llava")
    model.config.architectures = [type(model).__name__]
    freeze_untrained(model, ("language", "projector"))
    build_optimizer(model, OptimizerSection(learning_rate=1.0, learning_rates={"*projector*": 0.5}))
    with pytest.raises(BadInputError, match=r"optimizer\.learning_rates: '\*vision_tower\*' matches no trained"):
        build_optimizer(model, OptimizerSection(learning_rate=1.0, learning_rates={"*vision_tower*": 0.5}))


def test_a_gradient_scaler_skips_the_whole_step_of_muon() -> None:
    """Torch gives fused optimizers the decision; a name of torch's that moves would make Muon step on infinities."""
    model = llama("sdpa")
    assert build_optimizer(model, OptimizerSection(learning_rate=1.0))._step_supports_amp_scaling is True
    muon = build_optimizer(model, OptimizerSection(kind="muon", learning_rate=1.0))
    assert muon._step_supports_amp_scaling is False
    assert '"_step_supports_amp_scaling"' in inspect.getsource(torch.amp.GradScaler.step)


def test_biases_and_norms_of_two_dimensions_are_no_matrices() -> None:
    """GPT-OSS stacks the biases of its experts, Cohere the norms of its heads."""
    gpt_oss = mixture("gpt_oss")
    cohere = CohereForCausalLM(
        CohereConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_qk_norm=True,
            pad_token_id=0,
        )
    )
    for model, odd in (gpt_oss, "proj_bias"), (cohere, "_norm.weight"):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        assert any(odd in names[id(p)] and p.ndim == 2 for p in model.parameters())
        for kind in ("adamw", "muon"):
            section = OptimizerSection(kind=kind, learning_rate=0.1, weight_decay=0.1)
            for group in build_optimizer(model, section).param_groups:
                decayed = group["weight_decay"] > 0 or group.get("muon", False)
                assert {odd in names[id(p)] for p in group["params"]} <= ({False} if decayed else {True, False})


@pytest.mark.parametrize("kind", QUANTISED)
def test_compiled_steps_of_one_kind_are_not_kept_for_another(kind: str) -> None:
    """torch 2.13 takes the step of adamw_4bit from its cache on disk for that of adamw_8bit, which then fails."""
    pytest.importorskip("torchao")
    with functorch.patch(enable_autograd_cache=True):
        build_optimizer(nn.Linear(2, 2), OptimizerSection(kind=kind, learning_rate=1e-3))
        assert not functorch.enable_autograd_cache
