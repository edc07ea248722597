"""Layers whose weights a model's code reads stay numbers in a quantised base; what computes otherwise is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from bitsandbytes.functional import quantize_4bit
from support.every_multimodal import small_config
from support.four_bits import matrix_of
from support.texts import write_rows
from support.tiny import llama, recipe_values, save_llama, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from toolkit import Recipe, finetune
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import add_adapter, quantise
from toolkit.model.adapters.targets import layers_left_whole, left_out_of_all_linear
from toolkit.model.quantised.quantised import _Product, quantise_loaded, quantised_layers
from toolkit.model.quantised.read_weights import read_weights, without_gradients
from toolkit.recipe.schema import AdapterSection
from toolkit.run.checks.whole_check import check_quantised

NF4 = AdapterSection(kind="lora", quantize="nf4")
READ = {
    "deepseek_v32": {"weights_proj"},
    "glm_moe_dsa": {"weights_proj"},
    "hy_v4": {"weights_proj", "lm_head"},
    "jamba": {"dt_proj"},
    "mamba": {"dt_proj", "x_proj", "out_proj", "lm_head"},
    "rwkv": {"output", "value"},
    "bloom": set[str](),
    "llama": set[str](),
}


@pytest.mark.parametrize("kind", READ)
def test_a_quantised_model_computes_with_its_dequantised_weights(kind: str) -> None:
    torch.manual_seed(0)
    config = tiny_config(kind)
    if kind == "jamba":
        config.mamba_dt_rank = 16  # whole blocks of 64 weights
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert {path.rpartition(".")[2] for path in read_weights(plain)} == READ[kind]
    for module in plain.modules():
        if isinstance(module, nn.Linear):  # values at which bytes in their place would show
            nn.init.normal_(module.weight, std=0.2)
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(config)
    quantise(empty, NF4)
    quantised = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    quantised.load_state_dict(plain.state_dict())
    quantise_loaded(quantised, {"load_in_4bit": True, "llm_int8_skip_modules": layers_left_whole(empty)})
    chosen = [path for path, _ in quantised_layers(quantised)]
    assert chosen == [path for path, _ in quantised_layers(empty)]
    assert chosen
    for path in chosen:
        layer: Any = plain.get_submodule(path)
        layer.weight.data = matrix_of(*quantize_4bit(layer.weight.data, quant_type="nf4"))
    ids = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(quantised(ids, use_cache=False).logits, plain(ids, use_cache=False).logits)


def test_a_type_alone_is_no_reading_of_numbers() -> None:
    indexer = AutoModelForCausalLM.from_config(tiny_config("deepseek_v32"))
    assert read_weights(indexer)
    assert not read_weights(indexer, numbers=True)


@pytest.mark.parametrize("kind", ["deepseek_v32", "hy_v4", "qwen4_exp"])
def test_all_linear_leaves_out_indexers_which_get_no_gradient(kind: str) -> None:
    if kind == "qwen4_exp":
        model = AutoModelForMultimodalLM.from_config(small_config(kind))
    else:
        model = AutoModelForCausalLM.from_config(tiny_config(kind))
    model(torch.arange(3, 19)[None], use_cache=False).logits.square().sum().backward()
    idle = {
        path
        for path, module in model.named_modules()
        if type(module) is torch.nn.Linear and module.weight.grad is None and "visual" not in path
    }
    assert idle
    assert all(".indexer." in path for path in idle)
    assert without_gradients(model) == idle
    assert idle <= set(left_out_of_all_linear(model, ("language",)) or ())


def reads_type(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    cast = x.to(mlp.gate_proj.weight.dtype).to(x.dtype)
    return mlp.down_proj(mlp.act_fn(mlp.gate_proj(cast)) * mlp.up_proj(x))  # type: ignore[no-any-return]


def reads_numbers(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    return mlp.down_proj(mlp.act_fn(x @ mlp.gate_proj.weight.T) * mlp.up_proj(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("forward", [reads_type, reads_numbers])
def test_a_run_refuses_code_whose_source_does_not_show_it(
    forward: Callable[..., torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a rose is a rose", "many happy returns of the day to you"]
    save_llama(tmp_path / "model", texts, tied=False)
    write_rows(tmp_path / "rows.jsonl", ({"text": text} for text in texts))
    values = recipe_values(tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "run", tmp_path / "cache")
    values["adapter"] = {"kind": "lora", "quantize": "nf4", "r": 2}
    values["training"] |= {"max_steps": 1}
    values["export"] = {"verify": False}
    # The class's source stays what it was.
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(BadInputError, match=r"adapter\.quantize: LlamaForCausalLM does not compute.*gate_proj"):
        finetune(Recipe.from_mapping(values))


def test_a_product_that_is_not_that_of_the_dequantised_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = llama()
    quantise_loaded(model, {"load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]})
    rows = SimpleNamespace(few=lambda _tokens: {"input_ids": torch.arange(3, 14)[None]}, has_images=False)
    objective = SimpleNamespace(on_host=lambda batch: batch, logits=lambda model, batch: model(**batch).logits)
    accelerator = SimpleNamespace(
        unwrap_model=lambda wrapped: wrapped, mixed_precision="no", device=torch.device("cpu")
    )
    check: Any = check_quantised
    for dtype in (torch.float32, torch.bfloat16):
        check(accelerator, "float32", model.to(dtype), objective, rows)
    product = _Product.forward
    wrong = staticmethod(lambda ctx, inputs, *rest: product(ctx, 1.001 * inputs, *rest))
    monkeypatch.setattr(_Product, "forward", wrong)
    with pytest.raises(BadInputError, match=r"LlamaForCausalLM does not compute .*logits differ by .*e-0"):
        check(accelerator, "float32", model.float(), objective, rows)


@pytest.mark.parametrize(
    ("kind", "out"), [("mamba", {"dt_proj", "out_proj", "x_proj"}), ("jamba", {"dt_proj"}), ("deepseek_v32", set())]
)
def test_all_linear_leaves_out_layers_where_an_adapter_has_no_effect(kind: str, out: set[str]) -> None:
    config = tiny_config(kind)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    linear = {path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    adapted = add_adapter(model, AdapterSection(kind="lora", target_modules="all-linear"), base=None)
    names = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    with_adapters = {word for word in linear if any(f".{word}." in name for name in names)}
    assert out <= linear
    assert not out & with_adapters
    assert {"in_proj", "gate_proj", "q_b_proj"} & linear <= with_adapters


def test_a_layer_that_only_its_own_forward_reads_is_quantised() -> None:
    assert not read_weights(llama())
