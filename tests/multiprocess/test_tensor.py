"""Matrices that ranks cut: a step is that of a plain loop on one process, whatever the model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from support.backend import accelerated
from support.cases import cases as tables_of
from support.every_model import causal_kinds
from support.plain_loop import Trained, plain_loop
from support.ranks import meet, run_on_ranks
from support.tiny import tiny_config
from support.whole_divergence import KINDS as DIVERGENCES
from support.whole_divergence import V, heads, whole_divergence
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from toolkit.checkpoint.export import gather_on_rank_zero
from toolkit.errors import BadInputError
from toolkit.objectives.losses import divergence as divergences
from toolkit.objectives.losses import fused_linear_cross_entropy as head_losses
from toolkit.sharding import Checkpointing, OffloadSettings
from toolkit.sharding.fsdp2.shards import shard_rows, shard_shape, tensor_dim, tensor_group, whole_tensor
from toolkit.sharding.plugin import ShardingMesh, ShardingPlugin, reset_accelerate
from toolkit.sharding.tensor.moves import TensorRanks
from toolkit.verify.plain import remove_dropout

TABLES = tables_of(__file__)
KINDS = dict.fromkeys(("tied llama", "llama of one key head"), "llama")
STEPS = 5


@dataclass(frozen=True)
class Case:
    """A model and how it is trained; two rows a micro-batch of each group that has the same rows."""

    model: str
    tensor: int = 2
    strategy: str = "zero3"
    accumulation: int = 1
    checkpointed: bool = False
    lora: bool = False
    dora: bool = False
    offload: bool = False


FIRST = [Case("qwen3", accumulation=2, checkpointed=True), Case("llama of one key head")]
TWO = [
    Case("llama", accumulation=2),
    Case("tied llama", checkpointed=True),
    Case("gemma3_text"),
    Case("llama", lora=True, accumulation=2),
    Case("qwen3", lora=True),
    Case("qwen3", accumulation=2, checkpointed=True, offload=True),
    Case("tied llama", offload=True, lora=True),
    Case("llama", dora=True, accumulation=2, checkpointed=True),
    Case("glm4", dora=True, offload=True),
]


ON_FOUR = [
    Case("tied llama", tensor=4, checkpointed=True),  # fewer key heads than ranks
    Case("glm4", accumulation=2),
    Case("qwen3", tensor=4, lora=True, accumulation=2),
    Case("qwen3", dora=True, accumulation=2),
    Case("tied llama", tensor=4, dora=True),
    Case("gemma3_text", accumulation=2, checkpointed=True, offload=True),
]


REPLICAS = [
    Case("qwen3", strategy="hybrid", accumulation=2, checkpointed=True),
    Case("llama of one key head", strategy="hybrid", lora=True),
]
"""On 8 ranks: two replicas, whose shard groups of two have ranks of tensor groups of two."""


def model_of(case: Case) -> Any:
    """In float32, without dropout; norms and biases are not what they begin with."""
    torch.manual_seed(0)
    sizes = TABLES["SIZES"] | TABLES["MODELS"][case.model]
    config = AutoConfig.for_model(KINDS.get(case.model, case.model), **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if not (case.lora or case.dora):
        return model
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, use_dora=case.dora)
    adapted: Any = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:  # which begin as the norms that they are divided by
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
    return adapted


def adamw(model: Any) -> torch.optim.AdamW:
    """With an epsilon above rounding, which is all that the gradients of some keys' biases are."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.1, eps=1e-4)


def rows(step: int, groups: int, case: Case) -> list[torch.Tensor]:
    """The rows of a step, (2, 17) a micro-batch: those of the first group, then of the next."""
    draw = torch.Generator().manual_seed(step)
    return [torch.randint(0, 97, (2, 17), generator=draw) for _ in range(groups * case.accumulation)]


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def trained(case: Case) -> Trained:
    """On ranks, in a loop of a user's own."""
    accelerator = accelerated(
        case.strategy,
        case.accumulation,
        checkpointing=Checkpointing(every=1) if case.checkpointed else None,
        tensor=case.tensor,
        offload=OffloadSettings(executor="cpu_torch") if case.offload else None,
    )
    model = model_of(case)
    model, optimizer = accelerator.prepare(model, adamw(model))
    require_shards(accelerator.unwrap_model(model), dict(model_of(case).named_parameters()))
    groups = accelerator.num_processes // case.tensor
    first = accelerator.process_index // case.tensor * case.accumulation
    mine = slice(first, first + case.accumulation)
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros(())
        for ids in rows(step, groups, case)[mine]:
            with accelerator.accumulate(model):
                loss = loss_of(model, ids)
                total += loss.detach() / case.accumulation
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(whole_tensor(accelerator.clip_grad_norm_(model.parameters(), 0.5))))
                optimizer.step()
                optimizer.zero_grad()
        losses.append(float(accelerator.reduce(total, "mean")))
    if (engine := accelerator.state.fsdp_plugin.engine) is not None:
        engine.flush()
    require_alike(model)
    weights = {name: whole_tensor(parameter).detach() for name, parameter in model.named_parameters()}
    return Trained(losses, norms, weights)


def require_shards(model: Any, whole: dict[str, torch.Tensor]) -> None:
    """That each rank's shard is where it is said to be, and that gathering gives the same bits."""
    for name, parameter in model.named_parameters():
        local, gathered = parameter.to_local(), gather_on_rank_zero(parameter.detach())
        assert torch.equal(whole[name][shard_rows(parameter)], local), name
        assert all(size <= most for size, most in zip(local.shape, shard_shape(parameter), strict=True)), name
        assert gathered is None or torch.equal(gathered, whole[name]), name


def require_alike(model: Any) -> None:
    """That what several ranks of a group hold whole has the same bits on all of them."""
    for name, parameter in model.named_parameters():
        if tensor_dim(parameter) is None:
            group, local = tensor_group(parameter), parameter.to_local().detach()
            of_ranks = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
            dist.all_gather(of_ranks, local, group=group)
            assert all(torch.equal(local, other) for other in of_ranks), name


def all_trained(cases: list[Case]) -> list[Trained]:
    warnings.filterwarnings("error", message=".*torch.distributed.* is deprecated")
    return [trained(case) for case in cases]


def require_plain(case: Case, found: Trained, groups: int) -> None:
    model = model_of(case)
    steps = [rows(step, groups, case) for step in range(STEPS)]

    def mean(batches: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([loss_of(model, ids) for ids in batches]).mean()

    plain = plain_loop(model, steps, mean, max_norm=0.5, optimizer=adamw(model))
    assert found.losses == pytest.approx(plain.losses, rel=1e-6), case
    assert found.norms == pytest.approx(plain.norms, rel=1e-5), case
    for name, weight in plain.weights.items():
        difference = (found.weights[name] - weight).norm() / weight.norm()
        assert difference < 1e-5, f"{case}: {name} {difference}"


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [pytest.param(2, FIRST, marks=pytest.mark.first), (2, TWO), (4, ON_FOUR), (8, REPLICAS)],
    ids=["first", "2 ranks", "4 ranks", "replicas"],
)
def test_a_step_is_that_of_the_plain_loop(num_ranks: int, cases: list[Case]) -> None:
    for found in run_on_ranks(all_trained, num_ranks, cases):
        for case, result in zip(cases, found, strict=True):
            require_plain(case, result, num_ranks // case.tensor)


def by_trainer(folder: str, tensor: int | None) -> list[tuple[float, float]]:
    """Losses and norms of transformers' Trainer; without `tensor` it is stock."""
    reset_accelerate()
    settings: dict[str, Any] = {"max_steps": 4, "logging_steps": 1, "max_grad_norm": 0.5, "seed": 1}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
    settings |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    if tensor is not None:
        meet()
        settings["parallelism_config"] = ShardingMesh(plugin=ShardingPlugin("zero3", tensor=tensor))
    ids = torch.randint(0, 97, (64, 17), generator=torch.Generator().manual_seed(0)).tolist()
    dataset = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(model=model_of(Case("qwen3")), args=TrainingArguments(folder, **settings), train_dataset=dataset)
    trainer.train()
    return [(found["loss"], found["grad_norm"]) for found in trainer.state.log_history if "loss" in found]


def test_trainer_gives_the_ranks_of_a_group_the_same_rows(tmp_path: Path) -> None:
    (plain,) = run_on_ranks(by_trainer, 1, str(tmp_path), None)
    for found in run_on_ranks(by_trainer, 2, str(tmp_path), 2):
        for ours, theirs in zip(found, plain, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


def of_kind(kind: str) -> Any:
    """A small model without dropout, whose parameters are not what they begin with.

    In float64, as the large numbers of some types make rounding in float32 larger than some gradients.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind)).double().train()
    remove_dropout(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


IDS = torch.randint(3, 64, (2, 13), generator=torch.Generator().manual_seed(1))


def gradients(kinds: list[str]) -> dict[str, dict[str, torch.Tensor] | str]:
    """By type, the gradients of the second of two backwards; or why it is refused."""
    found: dict[str, dict[str, torch.Tensor] | str] = {}
    for kind in kinds:
        accelerator = accelerated("zero3", tensor=2)
        try:
            whole = of_kind(kind)
            model, _ = accelerator.prepare(whole, torch.optim.AdamW(whole.parameters()))
        except BadInputError as error:
            found[kind] = str(error)
            continue
        for _ in range(2):  # what is summed over ranks is summed once
            accelerator.backward(loss_of(model, IDS))
        named = {name: parameter.grad for name, parameter in model.named_parameters()}
        found[kind] = {name: whole_tensor(gradient) for name, gradient in named.items() if gradient is not None}
    return found


@pytest.mark.grid
def test_every_type_has_the_gradients_of_the_plain_loop_or_is_refused() -> None:
    """Of transformers' types, those whose plan has the simple styles and cuts attention."""
    kinds = causal_kinds()
    right = []
    for kind, found in run_on_ranks(gradients, 2, kinds)[0].items():
        if isinstance(found, str):
            assert found.startswith("sharding.tensor is not possible with "), (kind, found)
            continue
        model = of_kind(kind)
        (2 * loss_of(model, IDS)).backward()
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        for name, gradient in expected.items():
            close = {"rtol": 1e-4, "atol": 2e-6 * largest, "msg": f"{kind}: {name}"}  # norms are in float32
            torch.testing.assert_close(found[name], gradient, **close)
        right.append(kind)
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma3_text", "cohere", "olmo", "phi"} <= set(right)
    assert len(right) >= 30, right


OF_DIVERGENCES = [
    (kind, beta, *how)
    for kind, beta in DIVERGENCES
    for how in ((1.0, 1.0, (V, V)), (2.0, 0.3, (V + 5, V)), (0.7, 0.5, (V, V + 3)), (1.5, 0.5, (V, 8)))
]
"""Kind, b, temperature, ratio, and the tokens of student and teacher; with the last ones some ranks share none."""


def divergence_parts() -> list[tuple[torch.Tensor, ...]]:
    """The loss and sums of each, the gradient of hidden states, and this rank's of weight and bias."""
    meet()
    head_losses.MIN_CHUNK_TOKENS, divergences.ENTRIES = 5, 1
    found, ranks = [], TensorRanks(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    for kind, beta, temperature, ratio, sizes in OF_DIVERGENCES:
        (hidden, weight, bias), targets, (of_teacher, its_weight, its_bias) = heads(*sizes)
        part = head_losses.VocabularyPart(ranks, sizes[0])
        own = [tensor.detach()[part.own_rows].requires_grad_() for tensor in (weight, bias)]
        side = divergences.TeacherSide(of_teacher, its_weight, its_bias, head_losses.AfterHead(cap=6.0))
        loss, sums = divergences.summed_divergence(
            hidden, *own, targets, side, divergences.Divergence(kind, beta, temperature, ratio),
            head_losses.AfterHead(part=part, scale=0.5),
        )  # fmt: skip
        of_hidden, *of_own = torch.autograd.grad(3 * loss.squeeze(), (hidden, *own))
        dist.all_reduce(of_hidden)
        found.append((loss.detach(), sums, of_hidden, *of_own))
    return found


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_the_divergence_of_a_cut_vocabulary_is_that_of_whole_logits(num_ranks: int) -> None:
    of_ranks = run_on_ranks(divergence_parts, num_ranks)
    for number, (kind, beta, temperature, ratio, sizes) in enumerate(OF_DIVERGENCES):
        student, targets, (of_teacher, weight, bias) = heads(*sizes)
        exact = tuple(tensor.detach().double().requires_grad_() for tensor in student)
        z, shared = F.linear(*exact) * 0.5, min(sizes)
        y = 6.0 * torch.tanh(F.linear(of_teacher.double(), weight.double(), bias.double()) / 6.0)
        each = whole_divergence(z[:, :shared], y[:, :shared], kind, beta, temperature).sum()
        cross_entropy = F.cross_entropy(z, targets, reduction="sum")
        whole = (1 - ratio) * cross_entropy + ratio * temperature**2 * each
        gradients = torch.autograd.grad(3 * whole, exact)
        found = [of_rank[number] for of_rank in of_ranks]
        for loss, sums, of_hidden, *_ in found:
            assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
            assert sums.tolist() == pytest.approx([cross_entropy.item(), each.item()], rel=1e-6)
            assert (of_hidden - gradients[0]).abs().max() <= 1e-6 * gradients[0].abs().max()
        for place, expected in enumerate(gradients[1:], start=3):
            gathered = torch.cat([of_rank[place] for of_rank in found])
            assert (gathered - expected).abs().max() <= 1e-6 * expected.abs().max()
