"""`toolkit merge`: the new folder holds W + s B A of the files, computed here by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from support.four_bits import NF4
from support.texts import make_texts
from support.tiny import recipe_values, save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from typer.testing import CliRunner

from toolkit import Recipe, finetune
from toolkit.cli.app import app
from toolkit.paths import BASE_FILE, configuration_digest, fingerprint_of

SCALING = 8 / 4
"""alpha / rank"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("base") / "model", make_texts(20), tied=False)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    torch.manual_seed(3)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "run/export")
    return tmp_path / "run/export"


def merged(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["merge", *map(str, arguments)])
    return str(result.exception) if result.exception is not None else result.stdout


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def product(adapter: Path, name: str) -> torch.Tensor:
    stored = load_file(adapter / "adapter_model.safetensors")
    prefix = f"base_model.model.{name.removesuffix('.weight')}"
    return SCALING * stored[f"{prefix}.lora_B.weight"] @ stored[f"{prefix}.lora_A.weight"]


def adapted(names: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in names if "q_proj" in name or "down_proj" in name}


def in_four_bits(weight: torch.Tensor) -> torch.Tensor:
    """The nearest of the sixteen values, times the largest of its 64 numbers."""
    blocks = weight.reshape(-1, 64)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    nearest = (blocks[:, :, None] / largest[:, :, None] - NF4).abs().argmin(dim=2)
    return (NF4[nearest] * largest).view(weight.shape)


def test_an_adapter_is_merged_into_its_base(base: Path, adapter: Path, tmp_path: Path) -> None:
    (adapter / "preprocessor_config.json").write_text('{"max_pixels": 784}')  # of data.max_pixels
    told = merged(adapter.parent, "--to", tmp_path / "whole")
    assert "logits differ by " in told, told
    assert (tmp_path / "whole/preprocessor_config.json").read_text() == '{"max_pixels": 784}'
    before, after = weights(base), weights(tmp_path / "whole")
    assert after.keys() == before.keys()
    for name, weight in before.items():
        expected = weight + product(adapter, name) if name in adapted(before) else weight
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-6)
    assert (tmp_path / "whole/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert merged(adapter, "--to", tmp_path / "half", "--dtype", "bf16", "--json").startswith("{")
    assert {tensor.dtype for tensor in weights(tmp_path / "half").values()} == {torch.bfloat16}


def test_a_quantised_base_is_merged_as_it_was_trained(base: Path, adapter: Path, tmp_path: Path) -> None:
    how = {"load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"], "bnb_4bit_quant_type": "nf4"}
    told = {"fingerprint": fingerprint_of(base), "quantization": how}
    (adapter / BASE_FILE).write_text(json.dumps(told))
    assert "logits differ by " in merged(adapter, "--to", tmp_path / "whole")
    before, after = weights(base), weights(tmp_path / "whole")
    assert "quantization_config" not in json.loads((tmp_path / "whole/config.json").read_text())
    for name in adapted(before):
        expected = in_four_bits(before[name]) + product(adapter, name)
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-6)
        assert (after[name] - before[name] - product(adapter, name)).abs().max() > 1e-3
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])


def test_a_base_that_is_stored_in_four_bits_is_merged_as_it_was_trained(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(base, quantization_config=how).save_pretrained(tmp_path / "nf4")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "nf4")
    told = merged(adapter, "--base", tmp_path / "nf4", "--to", tmp_path / "whole")
    assert "logits differ by " in told, told
    assert "quantization_config" not in json.loads((tmp_path / "whole/config.json").read_text())
    before, after = weights(base), weights(tmp_path / "whole")
    for name in adapted(before):
        expected = in_four_bits(before[name]) + product(adapter, name)
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-6)


def test_a_base_of_the_hub_may_be_named(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub/models--org--base"
    shutil.copytree(base, repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (adapter / BASE_FILE).write_text(json.dumps({"fingerprint": fingerprint_of(base), "quantization": None}))
    told = merged(adapter, "--base", "org/base", "--to", tmp_path / "whole")
    assert "logits differ by " in told, told
    assert weights(tmp_path / "whole").keys() == weights(base).keys()
    config = json.loads((adapter / "adapter_config.json").read_text())
    named = {"base_model_name_or_path": "org/base", "revision": "v2"}
    (adapter / "adapter_config.json").write_text(json.dumps(config | named))
    assert "`hf download org/base --revision v2`" in merged(adapter, "--to", tmp_path / "again")


@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
def test_of_a_tied_model_the_layer_alone_changes_that_has_an_adapter(layer: str, tmp_path: Path) -> None:
    place = save_llama(tmp_path / "base", make_texts(20), tied=True)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", layer], init_lora_weights=False)
    tuned = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(place), config).eval()
    tuned.save_pretrained(tmp_path / "adapter")
    told = merged(tmp_path / "adapter", "--to", tmp_path / "whole")
    assert "logits differ by " in told, told
    ids = torch.arange(24)[None]
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(ids).logits
    expected = tuned(ids).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_merged_model_ends_where_the_adapter_does(base: Path, tmp_path: Path) -> None:
    """A base model's settings name its own end; the adapter was taught the end of a turn."""
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    end = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = 1
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    assert "logits differ by " in merged(tmp_path / "adapter", "--to", tmp_path / "whole")
    found = json.loads((tmp_path / "whole/generation_config.json").read_text())["eos_token_id"]
    assert found[0] == 1
    assert end in found


@pytest.mark.parametrize("tied", [True, False])
def test_tokens_that_an_adapter_brings_are_in_the_merged_folder(tied: bool, tmp_path: Path) -> None:
    """As other programs save chat adapters: with a tokenizer of their own, and rows for its new tokens."""
    place = save_llama(tmp_path / "base", make_texts(20), tied=tied)
    tokenizer, model = AutoTokenizer.from_pretrained(place), AutoModelForCausalLM.from_pretrained(place)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", "{% for m in messages %}{{ m.content }}{% endfor %}"
    model.resize_token_embeddings(len(tokenizer))
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens", "lm_head"],
        init_lora_weights=False,
    )
    tuned = peft.get_peft_model(model, config)
    for name, parameter in tuned.named_parameters():
        if "modules_to_save" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    for each in (tuned, tokenizer):
        each.save_pretrained(tmp_path / "adapter")
    assert "logits differ by " in (told := merged(tmp_path / "adapter", "--to", tmp_path / "whole")), told
    again, text = AutoTokenizer.from_pretrained(tmp_path / "whole"), "<|im_start|>one two<|im_end|>"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (again.eos_token, again.chat_template) == (tokenizer.eos_token, tokenizer.chat_template)
    settings = json.loads((tmp_path / "whole/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast", "which transformers 4 knows, too"
    assert {"<|im_start|>", "<|im_end|>"} == {*settings["additional_special_tokens"]}
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(ids).logits
    torch.testing.assert_close(found, tuned.eval()(ids).logits, rtol=0, atol=1e-5)
    for path in place.glob("tokenizer*"):  # a base may have none
        path.unlink()
    assert "logits differ by " in merged(tmp_path / "adapter", "--to", tmp_path / "again")
    assert AutoTokenizer.from_pretrained(tmp_path / "again")(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_a_base_whose_configuration_was_edited_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(base, tmp_path / "base"))
    told = {"fingerprint": fingerprint_of(own), "configuration": configuration_digest(own), "quantization": None}
    (adapter / BASE_FILE).write_text(json.dumps(told))
    assert "logits differ by " in merged(adapter, "--base", own, "--to", tmp_path / "whole")
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-2}))
    refused = merged(adapter, "--base", own, "--to", tmp_path / "again")
    assert "its config.json says something else, so that" in refused
    assert not (tmp_path / "again").exists()


def test_what_cannot_be_merged_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    assert "is a whole model; name the folder of an adapter" in merged(base, "--to", tmp_path / "whole")
    assert "'nosuch' is not a folder here; name the folder" in merged("nosuch", "--to", tmp_path / "whole")
    assert f"--to: '{base}' exists" in merged(adapter, "--to", base)
    assert "/nosuch/adapter' does not exist" in merged("/nosuch/adapter", "--to", tmp_path / "whole")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "gone/gone"}))
    assert "the adapter's base 'gone/gone' is not on this machine" in merged(adapter, "--to", tmp_path / "whole")
    assert "logits differ" in merged(adapter, "--base", base, "--to", tmp_path / "whole")
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), prompts).save_pretrained(tmp_path / "prompts")
    refused = merged(tmp_path / "prompts", "--to", tmp_path / "again")
    assert "peft cannot merge this adapter (PROMPT_TUNING) into its base" in refused
    told = {"fingerprint": "of another base", "quantization": None}
    (adapter / BASE_FILE).write_text(json.dumps(told))
    refused = merged(adapter, "--base", base, "--to", tmp_path / "again")
    assert "the adapter was trained on another base than" in refused
    assert "its weights differ" in refused
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("layers", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_a_run_merges_adapters_of_tied_matrices_as_the_command_does(
    layers: list[str], tmp_path: Path, text_file: Path
) -> None:
    base = save_llama(tmp_path / "base", make_texts(20), tied=True)
    for name, merge in (("run", True), ("apart", False)):
        values = recipe_values(base, text_file, tmp_path / name, tmp_path / "cache", max_steps=2, micro_batch_size=2)
        values["adapter"] = {"kind": "lora", "r": 2, "target_modules": ["q_proj", *layers]}
        values["export"] = {"merge": merge}
        finetune(Recipe.from_mapping(values))
    merged(tmp_path / "apart/export", "--to", tmp_path / "whole")
    run, whole = tmp_path / "run/export", tmp_path / "whole"
    found, expected = (load_file(folder / "model.safetensors") for folder in (run, whole))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    assert not found["lm_head.weight"].equal(found["model.embed_tokens.weight"])
    assert json.loads((run / "config.json").read_text())["tie_word_embeddings"] is False
