"""Units of transformers models, adapters and models of one's own; and that FSDP2 accepts them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from support.cases import cases
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from toolkit.errors import UnitError
from toolkit.sharding.plan.unit_plan import UnitPlan
from toolkit.sharding.plan.units import plan_units


def of_transformers(kind: str, name: str, fields: dict[str, Any]) -> nn.Module:
    return getattr(hf, f"AutoModelFor{kind}").from_config(hf.AutoConfig.for_model(name, **fields))


def lora(base: str = "llama", **values: Any) -> nn.Module:
    values = {"task_type": "CAUSAL_LM", "r": 2, **values}
    return peft.get_peft_model(of_transformers(*TABLE[base][:3]), peft.LoraConfig(**values))


def prompt_tuned() -> nn.Module:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(of_transformers(*TABLE["llama"][:3]), config)


@dataclass(frozen=True)
class Family:
    """How to build a tiny model, and the plan expected of it. Paths are written with spaces between them."""

    build: Callable[[], nn.Module]
    blocks: str
    embeddings: str = ""
    tail: str = ""


TABLE = cases(__file__)["FAMILIES"]
ROWS, EMBED = "model.layers.0..2", "model.embed_tokens"
PEFT = "base_model.model."
PEFT_ROWS = PEFT + ROWS
PEFT_TIED_TAIL = f"{PEFT}model.embed_tokens {PEFT}model.norm {PEFT}lm_head"
PEFT_UNTIED_TAIL = f"{PEFT}lm_head {PEFT}model.norm"

FAMILIES = {
    **{name: Family(functools.partial(of_transformers, *row[:3]), *row[3:]) for name, row in TABLE.items()},
    "lora": Family(lora, PEFT_ROWS, PEFT + EMBED, PEFT_UNTIED_TAIL),
    "lora_tied": Family(functools.partial(lora, "llama_tied"), PEFT_ROWS, "", PEFT_TIED_TAIL),
    "lora_saved_modules": Family(
        functools.partial(lora, modules_to_save=["lm_head", "embed_tokens"]), PEFT_ROWS, PEFT + EMBED, PEFT_UNTIED_TAIL
    ),
    "lora_saved_modules_tied": Family(
        functools.partial(lora, "llama_tied", modules_to_save=["embed_tokens"], ensure_weight_tying=True),
        PEFT_ROWS,
        "",
        PEFT_TIED_TAIL,
    ),
    "lora_new_tokens_tied": Family(
        functools.partial(lora, "llama_tied", trainable_token_indices=[1, 2]), PEFT_ROWS, "", PEFT_TIED_TAIL
    ),
    "lora_classifier": Family(
        functools.partial(lora, "bert_classifier", task_type="SEQ_CLS"),
        PEFT + "bert.encoder.layer.0..2",
        PEFT + "bert.embeddings.word_embeddings",
    ),
    "prompt_tuned": Family(
        prompt_tuned, "base_model." + ROWS, "base_model." + EMBED, "base_model.lm_head base_model.model.norm"
    ),
}


@functools.cache
def built(name: str) -> nn.Module:
    with torch.device("meta"):
        return FAMILIES[name].build()


@functools.cache
def planned(name: str) -> UnitPlan:
    return plan_units(built(name))


def modules_of(plan: UnitPlan, kind: str) -> tuple[str, ...]:
    """The module paths of all units of a kind, in order."""
    return tuple(path for unit in plan.units if unit.kind == kind for path in unit.modules)


def written_out(blocks: str) -> list[tuple[str, ...]]:
    """`a.0..1 b+c` -> [(a.0,), (a.1,), (b, c)]."""
    units: list[tuple[str, ...]] = []
    for pattern in blocks.split():
        prefix, _, last = pattern.partition("..")
        if last:
            stem, _, first = prefix.rpartition(".")
            units += [(f"{stem}.{number}",) for number in range(int(first), int(last) + 1)]
        else:
            units.append(tuple(pattern.split("+")))
    return units


def managed_parameters(model: nn.Module, plan: UnitPlan) -> list[dict[int, nn.Parameter]]:
    """Per unit, what `fully_shard` would manage: all below its modules, down to modules of other units."""
    taken = {id(model.get_submodule(path)) for unit in plan.units for path in unit.modules}

    def below(module: nn.Module) -> Iterator[nn.Parameter]:
        yield from module.parameters(recurse=False)
        for child in module.children():
            if id(child) not in taken:
                yield from below(child)

    return [{id(p): p for path in unit.modules for p in below(model.get_submodule(path))} for unit in plan.units]


def check_rules(model: nn.Module, plan: UnitPlan) -> None:
    """What holds for the plan of any model."""
    managed = managed_parameters(model, plan)
    everything = {id(p): p for p in model.parameters()}

    assert [unit.kind for unit in plan.units].index("root") == len(plan.units) - 1
    assert plan.units[-1].modules == ("",)
    assert len([unit for unit in plan.units if unit.kind in ("embeddings", "tail")]) <= 2
    # every parameter in exactly one unit, so that owners of a tied one are in one unit too
    assert sorted(p for unit in managed for p in unit) == sorted(everything)
    for unit, parameters in zip(plan.units, managed, strict=True):
        assert unit.num_parameters == sum(p.numel() for p in parameters.values()), unit.name
        assert unit.num_bytes == sum(p.numel() * p.element_size() for p in parameters.values()), unit.name
        assert unit.reshard_after_forward == (unit.kind in ("block", "embeddings"))
    assert plan.num_parameters == sum(p.numel() for p in everything.values())
    assert plan.num_bytes == sum(p.numel() * p.element_size() for p in everything.values())
    # no module handed to FSDP2 lies inside another, and none is in two units
    paths = [path for unit in plan.units[:-1] for path in unit.modules]
    inside = {path: {id(m) for m in model.get_submodule(path).modules()} for path in paths}
    assert len(paths) == len(set(paths))
    assert not [(a, b) for a in paths for b in paths if a != b and id(model.get_submodule(a)) in inside[b]]
    of_units = [set().union(*(inside[path] for path in unit.modules)) for unit in plan.units[:-1]]
    assert len(set().union(*of_units)) == sum(len(modules) for modules in of_units)


@pytest.mark.parametrize("name", FAMILIES)
def test_units_of_a_family(name: str) -> None:
    plan, family = planned(name), FAMILIES[name]
    assert [unit.modules for unit in plan.blocks] == written_out(family.blocks)
    assert modules_of(plan, "embeddings") == tuple(family.embeddings.split())
    assert modules_of(plan, "tail") == tuple(family.tail.split())
    check_rules(built(name), plan)


def test_plan_is_the_same_every_time() -> None:
    with torch.device("meta"):
        assert plan_units(FAMILIES["bart"].build()) == planned("bart")


def test_bytes_follow_the_types_of_the_parameters() -> None:
    with torch.device("meta"):
        plan = plan_units(FAMILIES["llama"].build().to(torch.bfloat16))
    assert plan.num_bytes == 2 * plan.num_parameters


def test_table() -> None:
    plan = planned("t5")
    lines = plan.table().splitlines()
    assert lines[0].split() == ["unit", "class", "count", "parameters", "bytes"]
    assert [line.split()[0] for line in lines[1:]] == [
        "encoder.block.0..1",
        "decoder.block.0..2",
        "tail",
        "root",
        "total",
    ]
    assert lines[1].split()[1:3] == ["T5Block", "2"]
    assert lines[-1].split()[:3] == ["total", "7", f"{plan.num_parameters:,}"]
    assert len({len(line) for line in lines}) == 1


def test_table_names_blocks_that_share() -> None:
    model = stack(5)
    model.layers[2].up = model.layers[0].up
    rows = [line.split("  ")[0] for line in plan_units(model).table().splitlines()]
    assert rows[2:-3] == ["layers.0 (+1 sharing)", "layers.1", "layers.3..4"]


# Models of one's own: no mark on any class


class Block(nn.Module):
    """(B, D) -> (B, D), of 4 D^2 + 3 D parameters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """A block whose list of experts holds most of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((expert(x) for expert in self.experts), torch.zeros_like(x))


class Stack(nn.Module):
    """Embeddings, blocks, norm, head; (B, T) -> (B, T, V). `get_*_embeddings` as transformers has them."""

    def __init__(self, blocks: list[nn.Module], vocabulary: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def stack(num_blocks: int = 3) -> Stack:
    return Stack([Block() for _ in range(num_blocks)])


def block_shares_with_head() -> nn.Module:
    """The head, tied to the embeddings, also is a projection of the second block."""
    model = stack()
    model.head.weight = model.embed.weight
    model.layers[1].down = nn.Linear(16, 8)
    model.layers[1].extra = nn.Linear(8, 11, bias=False)
    model.layers[1].extra.weight = model.head.weight
    return model


def blocks_share_a_module() -> nn.Module:
    model = stack()
    model.layers[2].up = model.layers[0].up
    return model


def blocks_share_a_weight() -> nn.Module:
    model = stack()
    model.layers[2].up.weight = model.layers[0].up.weight
    return model


def block_reached_from_outside() -> nn.Module:
    model = stack()
    model.alias = model.layers[0].up
    return model


def norm_shares_outside_the_tail() -> nn.Module:
    model = stack()
    model.other = nn.LayerNorm(8)
    model.other.weight = model.norm.weight
    return model


def model_owns_the_head_weight() -> nn.Module:
    model = stack()
    model.vocabulary_weight = model.head.weight
    return model


class Front(nn.Module):
    """Embeddings and a bias that the head uses: it contains the one and shares with the other."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.bias = head.bias

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids) + self.bias.mean()


def front_shares_with_head() -> nn.Module:
    model = stack()
    model.head = nn.Linear(8, 11)
    model.embed = Front(model.head)
    model.get_input_embeddings = lambda: model.embed.words
    return model


class Predictions(nn.Module):
    """A head with a transform, which owns the bias of its decoder, as BERT's does."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.decoder = nn.Linear(8, 8), nn.Linear(8, 11)
        self.bias = self.decoder.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.dense(x))


class StackWithPredictions(Stack):
    """What joins the tail with the head's owner, the transform, is tied to a module elsewhere."""

    def __init__(self) -> None:
        super().__init__([Block(), Block(), Block()])
        self.head, self.pooler = Predictions(), nn.Linear(8, 8)
        self.pooler.weight = self.head.dense.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.pooler(self.embed(ids)).mean()

    def get_output_embeddings(self) -> nn.Module:
        return self.head.decoder


SHARING = {
    block_shares_with_head: ("layers.0 layers.1+embed+head layers.2", "", ""),
    blocks_share_a_module: ("layers.0+layers.2 layers.1", "embed", "head norm"),
    blocks_share_a_weight: ("layers.0+layers.2 layers.1", "embed", "head norm"),
    block_reached_from_outside: ("layers.1..2", "embed", "head norm"),
    norm_shares_outside_the_tail: ("layers.0..2", "embed", "head"),
    model_owns_the_head_weight: ("layers.0..2", "embed", ""),
    front_shares_with_head: ("layers.0..2", "", "embed norm head"),
    StackWithPredictions: ("layers.0..2", "embed", "head pooler norm"),
}


@pytest.mark.parametrize("build", SHARING, ids=lambda build: build.__name__)
def test_parameters_shared_across_the_model(build: Callable[[], nn.Module]) -> None:
    model = build()
    plan = plan_units(model)
    blocks, embeddings, tail = SHARING[build]
    check_rules(model, plan)
    assert [unit.modules for unit in plan.blocks] == written_out(blocks)
    assert modules_of(plan, "embeddings") == tuple(embeddings.split())
    assert modules_of(plan, "tail") == tuple(tail.split())


def test_no_block_can_be_a_unit() -> None:
    model = stack()
    for layer in model.layers:
        layer.up.weight = model.layers[0].up.weight
    model.weight = model.layers[0].up.weight
    with pytest.raises(UnitError, match=r"every block \(layers\.0, 3 in all\) shares .*sharding\.unit_classes"):
        plan_units(model)


def test_custom_model_without_marks() -> None:
    model = stack()
    plan = plan_units(model)
    check_rules(model, plan)
    assert [unit.name for unit in plan.units] == ["embeddings", "layers.0", "layers.1", "layers.2", "tail", "root"]
    assert modules_of(plan, "tail") == ("head", "norm")


def test_custom_model_without_accessors() -> None:
    model = nn.Sequential(nn.Embedding(11, 8), *[Block() for _ in range(3)], nn.LayerNorm(8), nn.Linear(8, 11))
    plan = plan_units(model)
    check_rules(model, plan)
    assert [unit.name for unit in plan.units] == ["1", "2", "3", "root"]


def test_vocabulary_does_not_hide_the_blocks_of_a_small_model() -> None:
    plan = plan_units(Stack([Block(), Block()], vocabulary=50_000))
    assert len(plan.blocks) == 2
    assert sum(unit.num_parameters for unit in plan.blocks) < 0.001 * plan.num_parameters


def test_a_second_list_is_blocks_if_it_fills_a_fifth_of_the_model() -> None:
    """The blocks are of one size: 2 of 8 are a quarter and become units; 2 of 12 are a sixth and stay in the root."""
    for others, names in ((6, ["extra.0", "extra.1"]), (10, [])):
        model = stack(others)
        model.extra = nn.ModuleList([Block(), Block()])
        found = [unit.name for unit in plan_units(model).blocks]
        assert found == [f"layers.{number}" for number in range(others)] + names


def test_a_list_of_large_elements_is_blocks_if_it_fills_a_fiftieth_of_the_model() -> None:
    """2 of 42 are 4.8 % and become units; 2 of 122 are 1.6 % and stay. Of less than a million each, 4.8 % stay too."""
    for width, others, is_found in ((500, 40, True), (500, 120, False), (499, 40, False)):
        with torch.device("meta"):
            model = Stack([GradientCheckpointingLayer(width) for _ in range(others)])
            model.extra = nn.ModuleList([Block(width), Block(width)])
        found = [unit.name for unit in plan_units(model).blocks]
        assert found == [f"layers.{number}" for number in range(others)] + ["extra.0", "extra.1"] * is_found


def test_a_lone_block_in_a_list_is_one_and_in_a_wrapper_is_none() -> None:
    model = Stack([Block()])
    model.wrapped = nn.Sequential(Block())
    assert [unit.name for unit in plan_units(model).blocks] == ["layers.0"]


class GradientCheckpointingLayer(Block):
    """Known to transformers' own by its name."""


@pytest.mark.parametrize("mark", ["base class", "_no_split_modules"])
def test_one_small_block_that_is_marked(mark: str) -> None:
    model = Stack([GradientCheckpointingLayer() if mark == "base class" else Block()])
    model.middle = nn.Linear(8, 1000)
    if mark == "_no_split_modules":
        model._no_split_modules = {"Block", "Linear"}
    assert [unit.name for unit in plan_units(model).blocks] == ["layers.0"]


def test_marked_blocks_are_found_inside_towers() -> None:
    model = nn.Module()
    model.towers = nn.ModuleList([Stack([GradientCheckpointingLayer()]) for _ in range(2)])
    assert [unit.name for unit in plan_units(model).blocks] == ["towers.0.layers.0", "towers.1.layers.0"]


def test_final_norm_is_the_one_after_the_blocks() -> None:
    model = nn.Module()
    model.embed, model.norm_in = nn.Embedding(11, 8), nn.LayerNorm(8)
    model.layers, model.norm_out = stack().layers, nn.LayerNorm(8)
    model.head = nn.Linear(8, 11)
    model.get_output_embeddings = lambda: model.head
    assert modules_of(plan_units(model), "tail") == ("head", "norm_out")


def test_small_lists_are_no_blocks() -> None:
    model = stack(6)
    model.heads = nn.ModuleList([nn.Sequential(nn.Linear(8, 2), nn.ReLU()) for _ in range(2)])
    assert [unit.name for unit in plan_units(model).blocks] == [f"layers.{number}" for number in range(6)]


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_experts_inside_a_block_are_no_blocks(num_blocks: int) -> None:
    model = Stack([Mixture() for _ in range(num_blocks)])
    plan = plan_units(model)
    check_rules(model, plan)
    assert [unit.class_name for unit in plan.blocks] == ["Mixture"] * num_blocks


def test_one_block_applied_many_times() -> None:
    block = Block()
    model = Stack([block] * 4)
    plan = plan_units(model)
    check_rules(model, plan)
    assert [unit.name for unit in plan.blocks] == ["layers.0"]


def not_implemented() -> nn.Module:
    raise NotImplementedError


@pytest.mark.parametrize("answer", ["error", "none", "stranger", "model"])
def test_accessors_may_have_nothing_to_say(answer: str) -> None:
    model = stack()
    answers = {"none": lambda: None, "stranger": lambda: nn.Linear(8, 8), "model": lambda: model}
    model.get_input_embeddings = model.get_output_embeddings = answers.get(answer, not_implemented)
    plan = plan_units(model)
    check_rules(model, plan)
    assert [unit.kind for unit in plan.units] == ["block"] * 3 + ["root"]


# sharding.unit_classes, and errors


@pytest.mark.parametrize(
    ("classes", "blocks"),
    [
        (["LlamaMLP"], [f"model.layers.{number}.mlp" for number in range(3)]),
        (["LlamaMLP", "LlamaDecoderLayer"], [f"model.layers.{number}" for number in range(3)]),
        (["LlamaModel"], ["model"]),
    ],
)
def test_classes_by_name(classes: list[str], blocks: list[str]) -> None:
    model = built("llama")
    plan = plan_units(model, classes)
    check_rules(model, plan)
    assert [unit.name for unit in plan.blocks] == blocks


def test_tied_head_joins_a_block_that_holds_the_embeddings() -> None:
    model = built("llama_tied")
    plan = plan_units(model, ["LlamaModel"])
    check_rules(model, plan)
    assert [unit.modules for unit in plan.units] == [("model", "lm_head"), ("",)]


def test_class_that_matches_nothing() -> None:
    with pytest.raises(UnitError) as error:
        plan_units(built("llama"), ["LlamaDecodrLayer", "LlamaMLP", "Nonsense"])
    text = str(error.value)
    assert "'LlamaDecodrLayer' matches no module" in text
    assert "did you mean 'LlamaDecoderLayer'?" in text
    assert "'Nonsense'" in text
    assert "LlamaDecoderLayer x 3" in text
    assert "correct sharding.unit_classes, or remove it" in text


@pytest.mark.parametrize("classes", [["LlamaForCausalLM"], ["ModuleList"], ["SiLUActivation"], []])
def test_classes_that_cannot_be_blocks(classes: list[str]) -> None:
    """The root itself, a list without a forward, modules without parameters, nothing."""
    with pytest.raises(UnitError, match=r"sharding\.unit_classes"):
        plan_units(built("llama"), classes)


@pytest.mark.parametrize("container", [nn.ModuleList, lambda layers: nn.Sequential(*layers)])
def test_model_without_blocks(container: Callable[[list[nn.Module]], nn.Module]) -> None:
    model = nn.Module()
    model.layers = container([nn.Linear(8, 8) for _ in range(3)])
    with pytest.raises(UnitError) as error:
        plan_units(model)
    text = str(error.value)
    assert "no transformer block found in Module (216 parameters)" in text
    assert "layers: Linear x 3" in text
    assert "sharding.unit_classes" in text


# FSDP2 takes the plan


@pytest.fixture(scope="module")
def mesh() -> Iterator[dist.DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def shard(model: nn.Module, plan: UnitPlan, mesh: dist.DeviceMesh) -> None:
    for unit in plan.units:
        modules = [model.get_submodule(path) for path in unit.modules]
        fully_shard(
            modules if len(modules) > 1 else modules[0], mesh=mesh, reshard_after_forward=unit.reshard_after_forward
        )


def forward_backward(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    model.zero_grad()
    output = model(**inputs)
    logits = getattr(output, "logits", output)
    logits.square().mean().backward()
    return logits.detach()


def check_sharded(model: nn.Module, mesh: dist.DeviceMesh, inputs: dict[str, torch.Tensor]) -> None:
    """Logits and gradients of the sharded model are those of the plain one, on the second step too."""
    model.eval()
    plain, plan = copy.deepcopy(model), plan_units(model)
    shard(model, plan, mesh)
    expected = forward_backward(plain, inputs)
    for _ in range(2):
        assert torch.equal(forward_backward(model, inputs), expected)
    gradients = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        expected_gradient = gradients[name].grad
        assert (parameter.grad is None) == (expected_gradient is None), name
        if expected_gradient is not None:
            torch.testing.assert_close(parameter.grad.full_tensor(), expected_gradient, msg=name)


@pytest.mark.parametrize(
    "name", ["llama", "llama_tied", "gpt2", "t5", "bart", "bert", "albert", "lora_saved_modules_tied"]
)
def test_sharded_model_equals_the_plain_one(name: str, mesh: dist.DeviceMesh) -> None:
    torch.manual_seed(0)
    model = FAMILIES[name].build()
    for parameter in model.parameters():
        parameter.requires_grad_()
    ids = torch.randint(3, 64, (2, 8))
    inputs = {"input_ids": ids, "decoder_input_ids": ids} if name in ("t5", "bart") else {"input_ids": ids}
    check_sharded(model, mesh, inputs)


@pytest.mark.parametrize("build", SHARING, ids=lambda build: build.__name__)
def test_sharded_model_with_shared_parameters_equals_the_plain_one(
    build: Callable[[], nn.Module], mesh: dist.DeviceMesh
) -> None:
    torch.manual_seed(0)
    model = build()
    check_sharded(model, mesh, {"ids": torch.randint(0, 11, (2, 5))})
