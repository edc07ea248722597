"""Quantised layers: bitsandbytes' own bytes, whatever rows a rank reads, its forward and its backward."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from bitsandbytes.functional import quantize_4bit
from safetensors.torch import load_file, save_file
from support.cases import cases
from support.four_bits import matrix_of
from support.tiny import llama, save_llama
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from toolkit.errors import BadInputError, RecipeError
from toolkit.generation.text.load import load_model
from toolkit.model.adapters.adapters import add_adapter, quantise, trainable_share
from toolkit.model.load import load
from toolkit.model.quantised.quantised import (
    Quantisation,
    QuantisedLinear,
    QuantisedWeights,
    quantise_layers,
    quantised_fact,
)
from toolkit.model.quantised.stored_quantised import take_quantisation
from toolkit.model.weights.weights import all_rows
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import AdapterSection, ModelSection
from toolkit.sharding.fsdp2.shards import Rows

TABLES = cases(__file__)

NF4 = AdapterSection(kind="lora", quantize="nf4")


class Recorded:
    """Weights of a module in memory, and the most elements that were read at once."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state, self.most = state, 0

    def read(self, name: str, like: torch.Tensor, rows: Rows) -> torch.Tensor:
        self.most = max(self.most, self.state[name][rows].numel())
        return self.state[name][rows]


def quantised(double: bool, outputs: int = 96, inputs: int = 48) -> tuple[nn.Module, Recorded, nn.Linear]:
    """A model of one quantised layer without values, where they come from, and the layer as it was."""
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs)
    model = nn.ModuleDict({"layer": linear})
    source = Recorded({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    quantise_layers(model, Quantisation("nf4", double), ["layer"])
    return model, source, linear


@pytest.mark.parametrize("double", [False, True])
def test_the_bytes_are_those_of_bitsandbytes_whatever_rows_are_read(double: bool) -> None:
    model, source, linear = quantised(double)
    expected, state = quantize_4bit(linear.weight.detach(), quant_type="nf4", compress_statistics=double)
    weights = QuantisedWeights(source, model, torch.float32)
    layer: Any = model["layer"]
    parts = [(slice(0, 25),), (slice(25, 50),), (slice(50, 72),), (slice(72, 72),)]
    if double:  # one process: the rows of others are not there to be gathered
        parts = [(slice(0, 72),)]
    read = [(weights.read("layer.weight", layer.weight, part), _scales(weights, layer, part)) for part in parts]
    assert torch.equal(torch.cat([packed for packed, _ in read]).flatten(), expected.flatten())
    absmax = torch.cat([scales for _, scales in read]).contiguous()
    assert torch.equal(absmax.flatten() if double else absmax.view(torch.float32).flatten(), state.absmax)
    if not double:
        assert source.most <= 48 * (math.ceil(25 * 64 / 48) + 1), "rows of its own blocks alone"
    assert torch.equal(layer.read_matrix(weights, "layer"), matrix_of(expected, state))


def _scales(weights: QuantisedWeights, layer: QuantisedLinear, rows: Rows) -> torch.Tensor:
    found = weights.read("layer.weight_absmax", layer.weight_absmax, rows)
    if layer.quantisation.double:
        weights.read("layer.weight_nested", layer.weight_nested, all_rows(layer.weight_nested))
    return found


@pytest.mark.parametrize("double", [False, True])
def test_blocks_that_lie_in_two_rows_keep_their_scale(double: bool) -> None:
    for outputs, inputs in [(48, 48), (64, 32), (24, 96), (10, 64), (8, 200)]:
        model, source, linear = quantised(double, outputs, inputs)
        layer: Any = model["layer"]
        matrix = layer.read_matrix(QuantisedWeights(source, model, torch.float32), "layer")
        assert torch.equal(
            matrix, matrix_of(*quantize_4bit(linear.weight, quant_type="nf4", compress_statistics=double))
        )
        # Half of the widest step of NF4 is 0.152 of the largest weight of a block; doubly quantised scales are rounded.
        assert (matrix - linear.weight).abs().max() < 0.16 * linear.weight.abs().max()


def test_forward_and_backward_are_those_of_the_dequantised_matrix() -> None:
    model, source, _ = quantised(True)
    layer: Any = model["layer"]
    weights = QuantisedWeights(source, model, torch.float32)
    rows = {name: all_rows(part) for name, part in layer.named_parameters()}
    for name in rows:
        found = weights.read(f"layer.{name}", getattr(layer, name), rows[name])
        layer.register_parameter(name, nn.Parameter(found, requires_grad=False))
    inputs = torch.randn(2, 5, 48, requires_grad=True)
    again = inputs.detach().clone().requires_grad_()
    layer(inputs).square().sum().backward()
    torch.nn.functional.linear(again, layer.dequantize(), layer.bias).square().sum().backward()
    assert torch.equal(inputs.grad, again.grad)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(inputs).dtype == torch.bfloat16


def test_experts_routers_and_the_head_stay_and_the_run_says_so() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"shared_expert_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    with init_empty_weights():
        model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2))
    whole = sum(parameter.numel() for parameter in model.parameters())
    quantise(model, NF4)
    adapted = add_adapter(model, NF4, None)
    told = quantised_fact(adapted)
    assert told is not None
    for name in ("experts.gate_up_proj", "experts.down_proj", "mlp.gate", "lm_head", "embed_tokens"):
        assert name in told
    assert "q_proj" not in told
    kept = [p for n, p in model.named_parameters() if p.ndim > 1 and not p.requires_grad and p.dtype.is_floating_point]
    held = sum(p.numel() * p.element_size() for p in kept)
    whole_bytes = held + sum(p.numel() for p in model.parameters() if p.dtype == torch.uint8)
    assert f"{held / whole_bytes:.1%} of the base's bytes stay as they are" in told
    trained, counted = trainable_share(adapted)
    assert counted - trained == whole, "a weight is counted once, however few bits it has"


def held_at_once(act: Callable[[], None], mapped: int) -> int:
    """The most bytes of torch's allocator that are held at once while it acts, beyond what is held before.

    Args:
        mapped: size of a file (bytes): torch counts a mapping of it as if it were allocated.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        act()
    waiting, changes = list(profile.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    sizes = [size for _, size in sorted(changes, key=lambda change: change[0]) if abs(size) != mapped]
    assert len(sizes) < len(changes), "the file is mapped, or the sizes mean something else"
    return max(itertools.accumulate(sizes))


def test_a_load_holds_the_quantised_model_and_less_than_a_block_of_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a real model a piece is a small part of a block; here it would be all.
    monkeypatch.setattr("toolkit.model.quantised.quantised.PIECE", 2**13)
    save_llama(tmp_path, ["a word or two"] * 8, tied=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": len(tokenizer)}
    whole = llama(**sizes, initializer_range=0.05).bfloat16()
    whole.save_pretrained(tmp_path)
    for adapter in ({"double_quantization": True}, {"use_dora": True}):
        section = AdapterSection.model_validate({"kind": "lora", "quantize": "nf4", **adapter})
        loaded = load(ModelSection(name_or_path=str(tmp_path), dtype="bfloat16"), tokenizer, 0, adapter=section)
        model, load_weights = loaded.model, loaded.load_weights
        most = held_at_once(load_weights, (tmp_path / "model.safetensors").stat().st_size)
        held = sum(parameter.nbytes for parameter in model.parameters())
        block = sum(parameter.nbytes for parameter in whole.model.layers[0].parameters())
        assert held < most < held + block, adapter


UP = "model.layers.0.mlp.up_proj.weight"
SPOILED: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    f"{UP} has 2,297 bytes, not 2,304": lambda tensors: tensors.update({UP: tensors[UP][:-7].clone()}),
    f"{UP} has 18,432 bytes, not 2,304": lambda tensors: tensors.update({UP: torch.zeros(96, 48)}),
    f"{UP}.absmax has 71 bytes, not 72": lambda tensors: tensors.update({f"{UP}.absmax": torch.zeros(71).byte()}),
    "model.norm.weight has 9 values, not 48": lambda tensors: tensors.update({"model.norm.weight": torch.ones(9)}),
}


def test_a_model_saved_in_nf4_whose_files_are_spoiled_is_refused_and_a_good_one_generates(tmp_path: Path) -> None:
    save_llama(tmp_path, ["a word or two"] * 8, tied=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=how)
    saved.save_pretrained(tmp_path)
    section = ModelSection(name_or_path=str(tmp_path))
    load(section, tokenizer, 0, adapter=AdapterSection(kind="lora"))
    found = load_model(str(tmp_path)).model  # 48 outputs are no multiple of 32
    assert found(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    good = load_file(tmp_path / "model.safetensors")
    for told, spoil in SPOILED.items():
        tensors = dict(good)
        spoil(tensors)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(BadInputError, match=re.escape(told)):
            load(section, tokenizer, 0, adapter=AdapterSection(kind="lora"))


def refused(section: AdapterSection, **fields: Any) -> str:
    with pytest.raises(BadInputError) as error:
        quantise(llama(**fields), section)
    return str(error.value)


def test_what_cannot_be_quantised_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {"hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 3, "num_key_value_heads": 3}
    text = refused(NF4, **odd)
    assert "multiple of 64 weights" in text
    assert "model.layers.0.self_attn.q_proj [36, 36]" in text
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert "[qlora]'" in refused(NF4)


def test_which_quantised_models_can_be_read() -> None:
    lora = AdapterSection(kind="lora")
    nf4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

    def take(section: AdapterSection | None, **how: Any) -> dict[str, Any] | None:
        return take_quantisation(LlamaConfig(quantization_config={**nf4, **how}), section, "mine")

    assert take(lora) == nf4
    for section, how, told in (
        (lora, {"quant_method": "gptq", "load_in_4bit": False}, "gptq"),
        (lora, {"load_in_4bit": False, "load_in_8bit": True}, "bitsandbytes in 8 bits"),
        (lora, {"bnb_4bit_quant_type": "fp4"}, "bitsandbytes fp4"),
        (None, {}, "set adapter.kind=lora"),
        (NF4, {}, "adapter.quantize has no effect"),
    ):
        with pytest.raises(BadInputError, match=told):
            take(section, **how)


@pytest.mark.parametrize(("override", "told"), TABLES["IDLE"])
def test_settings_without_effect_are_errors(override: str, told: str) -> None:
    settings = ["adapter.quantize=nf4", "adapter.double_quantization=true", override]
    if override == "adapter.kind=none":
        settings = ["adapter={kind: none, quantize: nf4}", "export.merge=false"]
    with pytest.raises(RecipeError) as error:
        Recipe.load("lora", settings)
    assert told in str(error.value)
