"""An export has its base's files beside the weights as they are, and only what training changed is set in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.cases import cases
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama, tiny_config
from support.tiny_multimodal import FAMILIES
from transformers import AutoConfig, AutoTokenizer, LlamaConfig

from toolkit import Recipe, finetune
from toolkit.checkpoint.beside_weights.model_files import (
    configuration,
    save_tokenizer,
    with_older_names,
    write_adapter_files,
    write_model_files,
)
from toolkit.data.tokens.tokenizer import identity
from toolkit.data.tokens.tokenizer import load as load_tokenizer
from toolkit.model.beside_weights.base_files import BaseFiles
from toolkit.model.load import load, load_without_weights
from toolkit.model.structure.tying import config_of_export
from toolkit.recipe.schema import DataSection, ModelSection
from toolkit.serving.servers import how_to_serve

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
TABLES = cases(__file__)
CONFIG: dict[str, Any] = TABLES["CONFIG"]
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps")
SIZES += ("num_key_value_heads", "max_position_embeddings", "head_dim", "tie_word_embeddings")
NEW = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in the words of transformers 4, as most of the hub is."""
    folder = save_llama(tmp_path_factory.mktemp("base") / "base", make_texts(60), tied=True)
    now = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**CONFIG, **{size: now[size] for size in SIZES}}, indent=1) + "\n")
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    old = {"eos_token": tokens["eos_token"], "pad_token": tokens["pad_token"], "model_max_length": 64}
    old |= {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": [], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(old, indent=4))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": tokens["eos_token"]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "temperature": 0.6}))
    (folder / "LICENSE").write_text("free")
    return folder


def require_same_tokenizer(tokenizer: Any, folder: Path, trust_remote_code: bool = False) -> None:
    assert identity(AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)) == identity(tokenizer)


def export(base: Path, to: Path, data: dict[str, Any] | None = None, **section: Any) -> Any:
    """Writes what an export of the base has beside its weights, without training; returns model and tokenizer."""
    labels, objective = section.pop("labels", None), section.pop("objective", "causal_lm")
    model_section = ModelSection.model_validate({"name_or_path": str(base), **section})
    tokenizer = load_tokenizer(model_section, DataSection(train="none.jsonl", max_length=32, **(data or {})))
    loaded = load(model_section, tokenizer, 0, labels, objective=objective)
    write_model_files(loaded.model, tokenizer, to, torch.float32, loaded.fit.files)
    require_same_tokenizer(tokenizer, to)
    return loaded, tokenizer


def fields(folder: Path, name: str = "config.json") -> Any:
    return json.loads((folder / name).read_text())


def test_files_are_those_of_the_base_byte_by_byte(base: Path, tmp_path: Path) -> None:
    loaded, tokenizer = export(base, tmp_path / "out")
    names = {path.name for path in base.iterdir()} - {"model.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in names - {"config.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes(), name
    text = (base / "config.json").read_text()
    assert (tmp_path / "out" / "config.json").read_text() == text.replace("bfloat16", "float32")
    own_settings = loaded.fit.files.digests()["generation_config.json"]
    write_adapter_files(loaded.model, tokenizer, tmp_path, loaded.fit.files, own_settings)
    assert not (tmp_path / "generation_config.json").exists(), "the base's own serve"
    loaded.model.generation_config.eos_token_id = [0, 7]
    write_adapter_files(loaded.model, tokenizer, tmp_path, loaded.fit.files, own_settings)
    assert fields(tmp_path, "generation_config.json") == {"eos_token_id": [0, 7], "temperature": 0.6}
    assert (tmp_path / "tokenizer_config.json").read_bytes() == (base / "tokenizer_config.json").read_bytes()


def test_added_tokens_and_a_template_are_set_where_the_base_has_such(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(base, out, {"chat_template": "chatml"}, add_tokens=["<|a|>", {"content": "<|b|>", "special": True}])
    rows = fields(base)["vocab_size"]
    assert fields(out) == {**fields(base), "vocab_size": rows + 2, "torch_dtype": "float32"}
    before, after = fields(base, "tokenizer.json"), fields(out, "tokenizer.json")
    new = [
        {"id": rows + place, "content": text, **NEW, "special": text == "<|b|>"}
        for place, text in enumerate(["<|a|>", "<|b|>"])
    ]
    assert after == {**before, "added_tokens": [*before["added_tokens"], *new]}
    found, own = fields(out, "tokenizer_config.json"), fields(base, "tokenizer_config.json")
    assert found.pop("chat_template").startswith("{%- macro write_calls")
    assert found.pop("added_tokens_decoder") == {str(each.pop("id")): each for each in after["added_tokens"]}
    assert own.pop("chat_template") == TEMPLATE
    assert found == {**own, "additional_special_tokens": ["<|b|>"]}
    assert fields(out, "special_tokens_map.json")["additional_special_tokens"] == ["<|b|>"]


def test_tokens_are_added_to_those_that_tokenizer_json_alone_lists(base: Path, tmp_path: Path) -> None:
    """As transformers 5 writes a tokenizer; it adds no token that is missing where tokenizer_config.json lists some."""
    own, out = tmp_path / "own", tmp_path / "out"
    shutil.copytree(base, own)
    config = {**fields(own), "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (own / "config.json").write_text(json.dumps(config))
    tokens = fields(own, "tokenizer.json")
    tokens["added_tokens"].append({"id": 2, "content": "<|user|>", **NEW})
    tokens["model"]["vocab"] = {
        "<|user|>" if number == 2 else text: number for text, number in tokens["model"]["vocab"].items()
    }
    (own / "tokenizer.json").write_text(json.dumps(tokens))
    tokenizer = load_tokenizer(
        ModelSection(name_or_path=str(own), add_tokens=["<|a|>"]), DataSection(train="-", max_length=32)
    )
    out.mkdir()
    shutil.copy(own / "config.json", out)
    save_tokenizer(tokenizer, out, BaseFiles.read(own))
    require_same_tokenizer(tokenizer, out)
    assert {"<|user|>", "<|a|>"} < {
        one["content"] for one in fields(out, "tokenizer_config.json")["added_tokens_decoder"].values()
    }


def test_a_template_is_replaced_in_every_place(base: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(base, own)
    (own / "chat_template.jinja").write_text(TEMPLATE)
    (own / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (own / "additional_chat_templates").mkdir()
    (own / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATE)
    export(own, tmp_path / "out", {"chat_template": "alpaca"})
    out, names = tmp_path / "out", ("chat_template.json", "tokenizer_config.json")
    found = [fields(out, name)["chat_template"] for name in names]
    assert {*found, (out / "chat_template.jinja").read_text()} == {found[0]} != {TEMPLATE}
    assert not (out / "additional_chat_templates").exists(), "the run had one template, whatever the tools"


OWN_CODE = {
    "configuration_own.py": "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig): model_type = 'own'\n",
    "modeling_own.py": "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n"
    "class OwnForCausalLM(LlamaForCausalLM): config_class = OwnConfig\n",
    "tokenization_own.py": "from transformers import PreTrainedTokenizerFast\n"
    "class OwnTokenizerFast(PreTrainedTokenizerFast): pass\n",
}


def test_code_of_a_model_and_of_its_tokenizer_is_where_they_are(base: Path, tmp_path: Path) -> None:
    own, out, adapter = (tmp_path / name for name in ("own", "out", "adapter"))
    shutil.copytree(base, own)
    for name, code in OWN_CODE.items():
        (own / name).write_text(code)
    of_model = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    named = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": of_model}
    (own / "config.json").write_text(json.dumps({**fields(own), **named}))
    of_tokenizer = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizerFast"]}
    settings = {**fields(own, "tokenizer_config.json"), "tokenizer_class": "OwnTokenizerFast", "auto_map": of_tokenizer}
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    section, data = ModelSection(name_or_path=str(own), trust_remote_code=True), DataSection(train="-", max_length=32)
    tokenizer = load_tokenizer(section, data)
    loaded = load(section, tokenizer, 0)
    write_model_files(loaded.model, tokenizer, out, torch.float32, loaded.fit.files)
    adapter.mkdir()
    write_adapter_files(loaded.model, tokenizer, adapter, loaded.fit.files, None)
    assert type(AutoConfig.from_pretrained(out, trust_remote_code=True)).__name__ == "OwnConfig"
    for folder in (out, adapter):
        require_same_tokenizer(tokenizer, folder, trust_remote_code=True)
    assert how_to_serve(out)[0] == f"serve it: vllm serve {out} --trust-remote-code"


def test_a_classifier_has_its_class_and_labels(base: Path, tmp_path: Path) -> None:
    new = ["score.weight"]
    labels = {"labels": ["no", "yes", "both"], "objective": "sequence_classification", "allow_new_weights": new}
    export(base, tmp_path / "out", **labels)
    assert fields(tmp_path / "out") == {
        **fields(base),
        "architectures": ["LlamaForSequenceClassification"],
        "torch_dtype": "float32",
        "id2label": {"0": "no", "1": "yes", "2": "both"},
        "label2id": {"no": 0, "yes": 1, "both": 2},
        "problem_type": "single_label_classification",
        "pad_token_id": 1,
    }
    assert not (tmp_path / "out" / "generation_config.json").exists()


def test_a_head_of_its_own_is_untied_and_merged_weights_are_not_quantised(base: Path) -> None:
    own = {**fields(base), "quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}}
    files = BaseFiles({"config.json": json.dumps(own).encode()})
    model = load(ModelSection(name_or_path=str(base)), AutoTokenizer.from_pretrained(base), 0).model
    untied = config_of_export(model)
    untied.tie_word_embeddings = False
    found = configuration(files, untied, model, torch.bfloat16)
    assert found == {**fields(base), "tie_word_embeddings": False}


NESTED = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "torch_dtype": "bfloat16", "model_type": "gemma3_text"}


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_a_model_that_sees_keeps_its_nesting(base: Path, tmp_path: Path, flat: bool) -> None:
    """Qwen's VL files on the hub have the language model's fields at the top, where transformers 5 nests them."""
    kind = "qwen2_5_vl" if flat else "gemma3"
    text = {**FAMILIES[kind]["text_config"]}
    own: dict[str, Any] = {**FAMILIES[kind], "model_type": kind, "torch_dtype": "bfloat16"}
    own["architectures"] = ["Qwen2_5_VLForConditionalGeneration" if flat else "Gemma3ForConditionalGeneration"]
    if flat:
        own = {**own, **text}
        del own["text_config"]
    else:
        own["text_config"] = {**text, **NESTED}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps(own))
    save_file({"unread": torch.ones(1)}, tmp_path / "model.safetensors")
    section = ModelSection(name_or_path=str(tmp_path), add_tokens=["<|a|>"])
    tokenizer = load_tokenizer(section, DataSection(train="none.jsonl", max_length=32))
    model = load_without_weights(section, tokenizer)
    found = configuration(BaseFiles.read(tmp_path), model.config, model, torch.float32)
    rows = len(tokenizer)
    if flat:
        assert found == {**own, "vocab_size": rows, "torch_dtype": "float32"}
    else:
        nested = {**own["text_config"], "vocab_size": rows, "torch_dtype": "float32"}
        assert found == {**own, "text_config": nested, "torch_dtype": "float32"}


def test_a_described_model_has_older_names_beside_the_new_ones() -> None:
    llama3 = {**CONFIG["rope_scaling"], "rope_theta": 5e5}  # type: ignore[dict-item]
    cases: list[tuple[Any, dict[str, Any]]] = [
        (LlamaConfig(rope_parameters=llama3), {"rope_theta": 5e5, "rope_scaling": CONFIG["rope_scaling"]}),
        (tiny_config("qwen3"), {"rope_theta": 1e4, "rope_scaling": None}),
        (tiny_config("phi"), {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        (tiny_config("gemma3_text"), {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
        (tiny_config("modernbert"), {"global_rope_theta": 160000.0, "local_rope_theta": 1e4}),
        (tiny_config("gpt_neox"), {"rotary_emb_base": 1e4, "rotary_pct": 0.25}),
        (tiny_config("gpt2"), {}),
    ]
    wrong = []
    for config, older in cases:
        config.dtype = torch.bfloat16
        found = with_older_names(json.loads(config.to_json_string()), config)
        expected = {**older, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
        if {name: found.get(name, "absent") for name in expected} != expected:
            wrong.append((config.model_type, found))
        again = type(config).from_dict(found)
        if getattr(again, "rope_parameters", None) != getattr(config, "rope_parameters", None):
            wrong.append((config.model_type, again))
    assert not wrong
    vision = AutoConfig.for_model("gemma3")
    nested = with_older_names(json.loads(vision.to_json_string()), vision)["text_config"]
    assert (nested["rope_theta"], nested["rope_local_base_freq"]) == (1e6, 1e4)


def test_a_base_that_changes_or_goes_is_named_and_the_export_has_what_was_trained(base: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(base, own)
    section = ModelSection(name_or_path=str(own))
    tokenizer = load_tokenizer(section, DataSection(train="none.jsonl", max_length=32))
    loaded = load(section, tokenizer, 0)
    assert not list(loaded.fit.files.changes())
    (own / "config.json").write_text("{}")
    (own / "tokenizer.json").unlink()
    assert sorted(loaded.fit.files.changes()) == [
        f"config.json of {str(own)!r} has changed since training began",
        f"tokenizer.json of {str(own)!r} is gone or cannot be read",
    ]
    write_model_files(loaded.model, tokenizer, tmp_path / "out", torch.bfloat16, loaded.fit.files)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()


def test_an_adapter_names_the_class_that_the_run_had(base: Path, tmp_path: Path) -> None:
    """transformers 5 reads a Qwen's files by Qwen's rules, whatever class they name, if config.json is beside them."""
    shutil.copytree(base, tmp_path / "own")
    config = {**fields(base), "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "own")
    files = BaseFiles.read(tmp_path / "own")
    write_adapter_files(
        load(ModelSection(name_or_path=str(tmp_path / "own")), tokenizer, 0).model, tokenizer, tmp_path, files, None
    )
    require_same_tokenizer(tokenizer, tmp_path)
    own = {**fields(base, "tokenizer_config.json"), "tokenizer_class": type(tokenizer).__name__}
    assert fields(tmp_path, "tokenizer_config.json") == own


@pytest.mark.slow
def test_a_run_changes_no_other_file_and_says_how_to_serve_it(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "rows.jsonl", ({"text": text} for text in make_texts(20)))
    lora = {"kind": "lora", "r": 20}
    tokenizer = f"--tokenizer {tmp_path / 'adapter' / 'export'}"
    served = f"vllm serve {base} {tokenizer} --enable-lora --max-lora-rank 32 --lora-modules tuned="
    cases: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
        "whole": ({}, {"dtype": "float32"}, "vllm serve "),
        "merged": (lora, {"merge": True}, "vllm serve "),
        "adapter": (lora, {}, served),
    }
    for name, (adapter, how, command) in cases.items():
        recipe = recipe_values(base, tmp_path / "rows.jsonl", tmp_path / name, tmp_path / "cache", max_steps=1)
        finetune(Recipe.from_mapping({**recipe, "adapter": adapter, "export": how}))
        said = capsys.readouterr().err
        if name == "whole":
            text = (base / "config.json").read_text()
            assert (tmp_path / name / "export" / "config.json").read_text() == text.replace("bfloat16", "float32")
        assert f"to serve it: {command}{tmp_path / name / 'export'} (`toolkit help serving`" in said
        kept = {path.name for path in base.iterdir()} - {"model.safetensors"}
        kept -= {"config.json"} if name == "whole" else set()
        kept -= {"config.json", "generation_config.json", "LICENSE"} if name == "adapter" else set()
        for file in kept:
            assert (tmp_path / name / "export" / file).read_bytes() == (base / file).read_bytes(), (name, file)


@pytest.mark.parametrize("kind", ["mamba2", "bamba", "falcon_h1", "nemotron_h", "granitemoehybrid"])
def test_an_infinite_number_stays_as_transformers_writes_it(kind: str, tmp_path: Path) -> None:
    tiny_config(kind).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    config = AutoConfig.from_pretrained(tmp_path)
    config.vocab_size += 8
    found = configuration(BaseFiles.read(tmp_path), config, torch.nn.Linear(1, 1), torch.float32)  # type: ignore[arg-type]
    assert found["time_step_limit"] == written["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    (tmp_path / "config.json").write_text(json.dumps(found))
    again = AutoConfig.from_pretrained(tmp_path)
    assert (*again.time_step_limit, again.vocab_size) == (0.0, float("inf"), config.vocab_size)
