"""Weights that are not those of the configuration are an error, and so are files without any."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from bitsandbytes.functional import quantize_4bit
from safetensors.torch import load_file, save_file
from support.every_multimodal import small_config
from support.four_bits import matrix_of
from support.texts import write_rows
from support.tiny import llama, recipe_values, save_llama, tiny_config
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from toolkit import Recipe, finetune
from toolkit.errors import BadInputError
from toolkit.model.adapters.adapters import add_adapter, quantise
from toolkit.model.adapters.targets import layers_left_whole, left_out_of_all_linear
from toolkit.model.load import LoadedModel, _build, _name_labels, load
from toolkit.model.quantised.quantised import _Product, quantise_loaded, quantised_layers
from toolkit.model.quantised.read_weights import read_weights, without_gradients
from toolkit.paths import fingerprint_of
from toolkit.recipe.schema import AdapterSection, ModelSection
from toolkit.run.checks.quantised_check import check_quantised

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "model", ["a king and a queen"], tied=False)


def loaded(folder: Path, labels: list[str] | None = None, **section: Any) -> LoadedModel:
    kind = "causal_lm" if labels is None else "sequence_classification"
    source = ModelSection(name_or_path=str(folder), **section)
    model = load(source, AutoTokenizer.from_pretrained(folder), 0, labels, objective=kind)
    model.load_weights(None)
    return model


def change(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def without_head(tensors: Tensors) -> None:
    del tensors["lm_head.weight"]


def renamed(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[f"net.{name}"] = tensors.pop(name)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda f: change(f, without_head), r"1 are missing .* random: lm_head.weight"),
        (
            lambda f: change(f, lambda t: t.update(extra=torch.ones(2))),
            "1 are in its files, and have no place .*: extra",
        ),
        (lambda f: change(f, renamed), r"(?s)21 are missing .*21 are in its files.*net\.lm_head"),
        (lambda f: configure(f, num_hidden_layers=3), r"9 are missing .*model\.layers\.2\."),
        (lambda f: configure(f, num_hidden_layers=1), r"9 are in its files.*model\.layers\.1\."),
    ],
)
def test_weights_of_another_model_are_listed(folder: Path, spoil: Callable[[Path], None], told: str) -> None:
    spoil(folder)
    with pytest.raises(BadInputError, match=told) as error:
        loaded(folder)
    assert "model.allow_new_weights" in str(error.value)


def in_two_files(folder: Path, names: tuple[str, str], factor: float) -> None:
    """Writes the weights once more, times a factor, behind an index."""
    tensors, files = load_file(folder / "model.safetensors"), {}
    for place, name in enumerate(names):
        part = {key: factor * tensors[key] for key in sorted(tensors)[place::2]}
        save_file(part, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.mark.parametrize("has_single", [True, False])
def test_files_are_chosen_as_transformers_does(has_single: bool, folder: Path) -> None:
    """One file comes before an index beside it, which may be an earlier save's; an index may name any files."""
    alone = fingerprint_of(folder)
    in_two_files(folder, ("weights-a.safetensors", "b.safetensors"), 3.0)
    if not has_single:
        (folder / "model.safetensors").unlink()
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder).state_dict(), loaded(folder).model.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())
    assert (fingerprint_of(folder) == alone) == has_single
    assert fingerprint_of(folder) is not None
    if has_single:
        (folder / "b.safetensors").unlink()
        loaded(folder)


def test_new_weights_that_are_meant_are_drawn(folder: Path) -> None:
    change(folder, without_head)
    model = loaded(folder, allow_new_weights=["lm_head.*"])
    assert 0 < model.model.lm_head.weight.std() < 1
    configure(folder, num_hidden_layers=1)
    loaded(folder, allow_new_weights=["lm_head.*", "model.layers.1.*"])


def test_a_classifiers_head_is_new_and_its_language_model_must_be_whole(folder: Path) -> None:
    assert loaded(folder, labels=["good", "bad"]).fit.describe() == (
        "1 drawn at random: score.weight; 1 left unused: lm_head.weight"
    )
    change(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(BadInputError, match=r"1 are missing .*model\.norm\.weight"):
        loaded(folder, labels=["good", "bad"])


@pytest.mark.parametrize(
    "content",
    [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", b"", b"\xff" * 300, None, "cut"],
    ids=["lfs", "empty", "random", "no file", "cut short"],
)
def test_files_that_hold_no_weights_are_told(folder: Path, content: bytes | str | None) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(whole[: len(whole) // 2] if isinstance(content, str) else content)
    fix = "Download the model again, or name a folder" if content is None else "is a Git-LFS pointer"
    with pytest.raises(BadInputError, match=f"cannot be read: .*{fix}"):
        loaded(folder)


@pytest.mark.parametrize(("kind", "own", "expected"), [("llama", 0, 2), ("llama", None, 2), ("roberta", 1, 1)])
def test_decoders_look_behind_the_padding_of_the_batches(kind: str, own: int | None, expected: int) -> None:
    """Of an encoder a mask tells, and where RoBERTa's positions begin must not move."""
    config = AutoConfig.for_model(kind, pad_token_id=own)
    _name_labels(config, ["bad", "good"], SimpleNamespace(pad_token_id=2, eos_token_id=3))  # type: ignore[arg-type]
    assert config.pad_token_id == expected


def test_a_trained_head_in_another_order_is_told() -> None:
    def others(own: list[str], names: list[str], kind: str = "LlamaForSequenceClassification") -> list[str]:
        config = AutoConfig.for_model("llama", id2label=dict(enumerate(own)), architectures=[kind])
        found = _name_labels(config, names, SimpleNamespace(pad_token_id=2, eos_token_id=3))  # type: ignore[arg-type]
        assert config.id2label == dict(enumerate(names))
        return found

    with pytest.raises(BadInputError, match=r"order GOOD, no, .* no, good; set objective\.labels=\[good, 'no'\]$"):
        others(["GOOD", "no"], ["no", "good"])
    assert others(["good", "bad"], ["x", "y"]) == ["good", "bad"]
    for names in (["good", "bad"], ["Good", "BAD"], ["0", "1"], ["bad", "neutral", "good"], ["score"]):
        assert others(["good", "bad"], names) == []
    assert others(["LABEL_0", "LABEL_1"], ["x", "y"]) == []
    assert others(["LABEL_0", "LABEL_1"], ["x", "y"], "LlamaForTokenClassification") == ["LABEL_0", "LABEL_1"]


def test_a_head_for_other_classes_is_drawn_anew_if_that_is_meant(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder, id2label={0: "bad", 1: "good"})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    with pytest.raises(BadInputError, match=r"1 are of a head for other classes \(bad, good\), .*: score\.weight"):
        loaded(folder, ["x", "y"])
    for labels, is_new in ((["bad", "good"], False), (["x", "y"], True)):
        found = loaded(folder, labels, allow_new_weights=["score.*"])
        different = [name for name, value in found.model.state_dict().items() if not value.equal(stored[name])]
        assert different == found.fit.drawn == ["score.weight"] * is_new


@pytest.mark.parametrize(("kind", "asked"), [("gemma2", "sdpa"), ("bloom", "flash_attention_2")])
def test_an_attention_that_a_type_does_not_have_is_blamed_on_its_field(kind: str, asked: str) -> None:
    with pytest.raises(
        BadInputError, match=rf"^model\.attention: {asked} cannot be used: .*; set model\.attention=auto$"
    ):
        _build(AutoModelForCausalLM, tiny_config(kind), {"attn_implementation": asked}, "model.name_or_path")


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
