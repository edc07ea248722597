"""Plans of every kind of model and setting: peaks and bytes sent are those of a trace of the real FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.planned import Planned
from support.planning_models import build, config_of, workload

from toolkit.model.adapters.adapters import add_adapter, base_of, quantise
from toolkit.model.structure.fake_tensors import grouped_products
from toolkit.planning.memory.probe import Prober
from toolkit.planning.memory.state_bytes import MemoryLayout, held_unit, rounded
from toolkit.planning.traffic import traffic
from toolkit.planning.workload.unit_shapes import unit_shapes
from toolkit.planning.workload.workload import Workload, workload_of
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import AdapterSection
from toolkit.sharding import plan_units
from toolkit.sharding.blocks.checkpointing import Checkpointing
from toolkit.sharding.fsdp2.fsdp import autograd_sums_gradients
from toolkit.sharding.plan.strategy import STRATEGIES, MeshShape

CHOSEN, LAYERS = 2, 3
"""Experts of a token in mixtral, and its blocks here."""

EIGHT, FOUR, EVERY = MeshShape(1, 8), MeshShape(1, 4), Checkpointing(1)


def mixtral(tokens: int, vocabulary: int = 2048, experts: int = 1, targets: Any = None, **fields: Any) -> Workload:
    """Of 4 experts, in groups of `experts` ranks; with adapters on `targets`."""
    work = workload("mixtral", tokens=tokens, layers=LAYERS, vocabulary=vocabulary)
    if targets is not None:
        section = AdapterSection(kind="lora", r=8, target_modules=targets)
        work = replace(work, model=add_adapter(work.model, section, None))
    return replace(work, experts=experts, **fields)


def ernie() -> Workload:
    """A mixture that keeps its routers in float32."""
    return workload("ernie4_5_moe", tokens=24, layers=3, vocabulary=256, whole_logits=True)


def quantised(precision: str = "bf16", **adapter: Any) -> Workload:
    work = workload("llama", precision=precision, tokens=24, layers=4, width=256, vocabulary=256, whole_logits=True)
    section = AdapterSection.model_validate({"kind": "lora", "r": 8, **adapter})
    model = base_of(work.model)
    quantise(model, section)
    return replace(work, model=add_adapter(model, section, None))


T5 = {"model_type": "t5", "d_kv": 32, "d_ff": 256, "num_heads": 4, "decoder_start_token_id": 1}
BART = {"model_type": "bart", "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 256}
BART |= {"decoder_ffn_dim": 256, "max_position_embeddings": 256}


def seq2seq(config: dict[str, Any], lengths: tuple[int, int], precision: str) -> Workload:
    """Cross attention, and blocks that stand aside."""
    values = {
        "model": {"config": {"d_model": 128, "vocab_size": 512, **config}, "train_tokenizer_vocab_size": 512},
        "data": {"train": "none.jsonl", "max_length": lengths[0], "max_target_length": lengths[1]},
        "objective": {"kind": "seq2seq"},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"output_dir": "none", "max_steps": 1},
    }
    return workload_of(Recipe.from_mapping(values), precision)


def case(
    name: str,
    work: Callable[[], Workload],
    strategy: str = "zero3",
    mesh: MeshShape = FOUR,
    checkpointing: Checkpointing | None = None,
    *,
    rel: float = 0.02,
    **more: Any,
) -> Any:
    tier = [] if name in FIRST else [pytest.mark.slow if name in SLOW else pytest.mark.grid]
    return pytest.param(work, (strategy, mesh, checkpointing), more, rel, id=name, marks=tier)


FIRST = ("stacks zero2", "stacks by block", "experts of 2 ranks", "attention adapted", "int8 zero2")
"""Cases of the first tier."""

SLOW = ("stacks hybrid", "experts zero1", "experts by block", "one block adapted", "float32 islands zero3")
SLOW += ("nf4 double, 2 ranks", "t5", "bart")
"""Those of the second; the others are of the grid."""
ONE_BLOCK = r".*layers\.1\.self_attn\.(q|o)_proj"  # backward comes to the last two blocks alone

CASES = [
    case("stacks zero3", lambda: mixtral(16), "zero3", EIGHT, EVERY, accumulation=2),
    case("stacks zero2", lambda: mixtral(16), "zero2", EIGHT, accumulation=2),
    case("stacks zero1", lambda: mixtral(16), "zero1", EIGHT, EVERY, accumulation=2),
    case("stacks hybrid", lambda: mixtral(16), "hybrid", MeshShape(2, 8), EVERY),
    case("stacks by block", lambda: mixtral(16), "zero3", EIGHT, EVERY, accumulation=3, by_block=True),
    case("experts of 2 ranks", lambda: mixtral(16, experts=2), "zero3", FOUR, EVERY, accumulation=2),
    case("experts of 4 ranks", lambda: mixtral(160, experts=4)),
    case("experts zero1", lambda: mixtral(160, experts=2), "zero1"),
    # With a small head and few tokens the peak is the division of gradients that one rank alone holds.
    case("experts, small head", lambda: mixtral(16, 64, 4), accumulation=2),
    case("experts by block", lambda: mixtral(160, experts=2), "zero3", FOUR, EVERY, accumulation=4, by_block=True),
    case("experts hybrid", lambda: mixtral(16, experts=2), "hybrid", MeshShape(2, 4), EVERY, accumulation=2),
    case("experts adapted", lambda: mixtral(16, 2048, 2, "all-linear"), "zero3", FOUR, EVERY, accumulation=2),
    case("attention adapted", lambda: mixtral(160, 2048, 2, ["q_proj", "v_proj"]), "zero3", FOUR, EVERY),
    case("one block adapted", lambda: mixtral(16, 2048, 2, ONE_BLOCK), accumulation=2),
    case("float32", lambda: mixtral(16, mixed_precision="no"), accumulation=2),
    case("float32 islands zero3", ernie),
    case("float32 islands zero2", ernie, "zero2", MeshShape(1, 2), accumulation=2),
    case("float32 islands zero1", ernie, "zero1", MeshShape(1, 1), accumulation=2),
    case("nf4", lambda: quantised(quantize="nf4"), "zero3", EIGHT),
    *(
        case(
            f"nf4 double, {ranks} ranks",
            lambda: quantised(quantize="nf4", double_quantization=True),
            "zero3",
            MeshShape(1, ranks),
            EVERY,
        )
        for ranks in (1, 2)
    ),
    case("nf4 hybrid", lambda: quantised("no", quantize="nf4"), "hybrid", MeshShape(2, 2)),
    case("int8 zero2", lambda: quantised(quantize="int8"), "zero2"),
    case("t5", lambda: seq2seq({**T5, "num_layers": 5, "num_decoder_layers": 6}, (64, 24), "bf16"), micro_batch=2),
    case("bart", lambda: seq2seq({**BART, "encoder_layers": 5, "decoder_layers": 6}, (64, 24), "bf16"), micro_batch=2),
    case(
        "t5, long",
        lambda: seq2seq({**T5, "num_layers": 4, "num_decoder_layers": 2}, (24, 96), "no"),
        "zero1",
        FOUR,
        EVERY,
        micro_batch=2,
    ),
    case(
        "bart, long",
        lambda: seq2seq({**BART, "encoder_layers": 2, "decoder_layers": 5}, (24, 96), "no"),
        "zero2",
        micro_batch=2,
    ),
]


@pytest.mark.parametrize(("make", "setup", "more", "rel"), CASES)
def test_the_plan_is_the_trace(make: Any, setup: Any, more: dict[str, Any], rel: float) -> None:
    work = make()
    plan = Planned(work, *setup, **more)
    found = plan.traced(make())
    with grouped_products():
        # torch 2.15 adds each gradient to a window's sums in place; the plan waits for all of a unit's, as 2.13 does.
        if autograd_sums_gradients():
            rel = 0.1 if plan.by_block else 0.03
        assert plan.peak == pytest.approx(found.peak, rel=rel)
    if work.mixed_precision == "bf16":
        windows = 1 if plan.by_block else plan.accumulation
        sent = traffic(plan.units, STRATEGIES[plan.strategy], plan.mesh, accumulation=windows)
        assert {kind: sent.whole[kind] for kind in found.traffic} == found.traffic


def test_tokens_sent_to_experts_by_formula() -> None:
    """To the experts and back in each forward, the second one of checkpoints too, and the gradients the same way."""
    for experts, checkpointing, ways in ((2, EVERY, 6), (4, None, 4)):
        probe = Planned(mixtral(16, experts=experts), "zero3", FOUR, checkpointing).probe
        whole = ways * LAYERS * 16 * CHOSEN * 128 * 2
        assert probe.exchanged == whole * (experts - 1) // experts
    stacks = [p for unit in Planned(mixtral(16), "zero3", EIGHT).units for p in unit.parameters if len(p.shape) == 3]
    assert {p.shard_numel(8) * 8 / p.numel for p in stacks} == {1.0}, "along their rows"


@pytest.mark.parametrize(
    ("tokens", "offload", "rel"),
    [(8, False, 0.01), *(pytest.param(160, *each, marks=pytest.mark.slow) for each in ((False, 0.01), (True, 0.05)))],
)
def test_the_plan_of_a_window_is_its_trace(tokens: int, offload: bool, rel: float) -> None:
    work = workload("llama", tokens=tokens, layers=4, vocabulary=256)
    plan = Planned(work, "zero3", EIGHT, Checkpointing(1, offload), accumulation=4, by_block=True)
    traced = plan.traced()
    assert plan.peak == pytest.approx(traced.peak, rel=0.1 if autograd_sums_gradients() else rel)
    # Each of the four blocks leaves its input there, whether the probe ran it or another like it.
    assert 4 * plan.probe.host_peak == traced.host_peak
    sent = traffic(plan.units, STRATEGIES["zero3"], EIGHT, accumulation=1, compute_bytes=2).whole
    assert {kind: num_bytes for kind, num_bytes in sent.items() if num_bytes} == traced.traffic


def test_a_window_of_two_micro_batches_holds_no_sums_of_a_third() -> None:
    """The first finds none, and the second's are there only in its own backward: seen where the head is large."""
    work = workload("llama", tokens=160, layers=4, vocabulary=4096)
    plan = Planned(work, "zero3", EIGHT, EVERY, accumulation=2, by_block=True)
    assert plan.peak == pytest.approx(plan.traced().peak, rel=0.1 if autograd_sums_gradients() else 0.01)


@pytest.mark.parametrize(("offload", "held", "cast"), [(False, 4, True), (True, 4, False), (False, 2, False)])
def test_shards_in_the_type_of_compute_are_gathered_from_where_they_are(offload: bool, held: int, cast: bool) -> None:
    model = build(config_of("llama", 1, 64))
    block = unit_shapes(model, plan_units(model), "bf16")[0]
    parameters = tuple(replace(parameter, held=held) for parameter in block.parameters)
    layout = MemoryLayout(4, 2, 4, optimizer=8, offload=offload)
    found = held_unit(replace(block, parameters=parameters), layout, False)
    shard = sum(parameter.shard_numel(4) for parameter in parameters)
    assert found.gather_input == (rounded(2 * shard) if cast else 0)


def test_a_quantised_weight_takes_half_a_byte_and_its_share_of_a_scale() -> None:
    linear = {"nf4": 1 / 2 + 4 / 64, "double": 1 / 2 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}
    for kind, each in linear.items():
        work = quantised(quantize="nf4" if kind == "double" else kind, double_quantization=kind == "double")
        blocks = [unit for unit in unit_shapes(work.model, Prober(work).plan, "bf16") if unit.kind == "block"]
        found = sum(p.numel for unit in blocks for p in unit.parameters if not p.is_cast)
        # Of each block: q, o (256 x 256), k, v (64 x 256), gate, up, down (736 x 256).
        weights = 4 * (2 * 256 * 256 + 2 * 64 * 256 + 3 * 736 * 256)
        assert found == pytest.approx(each * weights, rel=0.02)
