"""Model folders that are broken in one place each: a dry run refuses them with one clear error, or takes them for a
reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from support.refusals import finetune
from support.tiny import recipe_values, save_llama

TEXTS = ["a king and a queen walked by the river", "the moon was high"]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

Spoil = Callable[[Path], object]


def configured(**fields: Any) -> Spoil:
    """config.json with other fields; `...` takes one out."""
    return lambda folder: rewritten(folder / "config.json", fields)


def tokenized(**fields: Any) -> Spoil:
    """The same of tokenizer.json."""
    return lambda folder: rewritten(folder / "tokenizer.json", fields)


def set_of_tokenizer(**fields: Any) -> Spoil:
    """tokenizer_config.json with other fields."""
    return lambda folder: rewritten(folder / "tokenizer_config.json", fields)


def rewritten(path: Path, fields: dict[str, Any]) -> None:
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def written(name: str, content: str | bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def changed(edit: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    """The weights, after `edit`."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        edit(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return spoil


def indexed(index: str) -> Spoil:
    """Weights in two files with this index of them, or what should be one."""

    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "part.safetensors")
        (folder / INDEX).write_text(index)

    return spoil


def as_folder(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return spoil


def without(name: str) -> Spoil:
    return lambda folder: (folder / name).unlink()


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({}, folder / "pytorch_model.bin")


def cut(name: str) -> Spoil:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:100])


def quantised(method: str) -> Spoil:
    return configured(quantization_config={"quant_method": method, "bits": 4, "group_size": 128})


def split_by(pattern: str) -> Spoil:
    """The tokenizer splits text by a pattern first."""

    def spoil(folder: Path) -> None:
        path = folder / "tokenizer.json"
        values = json.loads(path.read_text())
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, values["pre_tokenizer"]]}
        path.write_text(json.dumps(values))

    return spoil


NORM, HEAD, EMBEDDINGS = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"

REFUSED: dict[str, tuple[Spoil, str]] = {
    "heads that do not divide": (configured(num_attention_heads=5), "number of attention heads (5)"),
    "no heads": (configured(num_attention_heads=0), "num_attention_heads is 0 in config.json"),
    "heads below 0": (configured(num_attention_heads=-4), "num_attention_heads is -4 in config.json"),
    "key heads that do not divide": (
        configured(num_key_value_heads=3),
        "4 heads of attention that share 3 heads of keys and values, which do not divide them",
    ),
    "an attention from the hub": (
        configured(_attn_implementation="kernels-community/flash-attn"),
        "asks for code from the hub (_attn_implementation: 'kernels-community/flash-attn')",
    ),
    "an attention from the hub inside": (
        configured(text_config={"attn_implementation": "kernels-community/flash-attn@v1:forward"}),
        "asks for code from the hub (attn_implementation: ",
    ),
    "weights in 8 bits": (
        changed(lambda t: t.update({HEAD: t[HEAD].to(torch.float8_e4m3fn)})),
        f"in 8 bits, as in quantised models, without the scales that they need: {HEAD};",
    ),
    "an epsilon that drowns every value": (configured(rms_norm_eps=1000.0), "rms_norm_eps is 1000.0, and needs to be"),
    "a dropout of nearly all": (configured(attention_dropout=0.9), "attention_dropout is 0.9, and needs to be from 0"),
    "hidden size 0": (configured(hidden_size=0), "hidden_size is 0"),
    "hidden size below 0": (configured(hidden_size=-8), "hidden_size is -8"),
    "hidden size as text": (configured(hidden_size="48"), "hidden_size"),
    "another hidden size": (configured(hidden_size=96), "48] for ["),
    "layers as text": (configured(num_hidden_layers="two"), "num_hidden_layers"),
    "no layers": (configured(num_hidden_layers=0), "num_hidden_layers is 0"),
    "layers below 0": (configured(num_hidden_layers=-1), "num_hidden_layers is -1"),
    "a million layers": (configured(num_hidden_layers=10**6), "1,000,000 in config.json of"),
    "layers null": (configured(num_hidden_layers=None), "num_hidden_layers"),
    "more layers than the files": (configured(num_hidden_layers=3), "model.layers.2."),
    "fewer layers than the files": (configured(num_hidden_layers=1), "model.layers.1."),
    "vocabulary below the tokenizer's": (configured(vocab_size=100), "100 rows"),
    "vocabulary as text": (configured(vocab_size="many"), "vocab_size"),
    "no vocabulary": (configured(vocab_size=0), "vocab_size is 0"),
    "unknown activation": (configured(hidden_act="gelu_nope"), "gelu_nope"),
    "padding outside the vocabulary": (configured(pad_token_id=100_000), "model.name_or_path"),
    "unknown rope": (configured(rope_parameters={"rope_type": "nope"}), "nope"),
    "rope without its factor": (configured(rope_scaling={"type": "linear"}), "factor"),
    "positions as text": (configured(max_position_embeddings="x"), "max_position_embeddings"),
    "unknown type of weights": (configured(dtype="float7"), "float7"),
    "no model type": (configured(model_type=...), "model_type"),
    "unknown model type": (configured(model_type="lama"), "lama"),
    "model type as a number": (configured(model_type=3), "model type"),
    "encoder and decoder": (configured(model_type="t5"), "t5"),
    "another architecture": (configured(model_type="gpt2"), "model.name_or_path"),
    "a model of pictures": (configured(model_type="vit"), "vit"),
    "code of its own": (
        configured(model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}),
        "custom code",
    ),
    "gptq": (quantised("gptq"), "gptq"),
    "awq": (quantised("awq"), "awq"),
    "bitsandbytes": (quantised("bitsandbytes"), "bitsandbytes"),
    "unknown quantisation": (quantised("other"), "other"),
    "quantisation as a list": (configured(quantization_config=[1]), "config.json"),
    "config is a list": (written("config.json", "[1]"), "config.json"),
    "config is null": (written("config.json", "null"), "config.json"),
    "config is cut": (cut("config.json"), "config.json"),
    "config is empty": (written("config.json", ""), "config.json"),
    "config is no text": (written("config.json", b"\xff\xfe\x00"), "config.json"),
    "config is a folder": (as_folder("config.json"), "config.json"),
    "no config": (without("config.json"), "config.json"),
    "all weights zero": (changed(lambda t: [tensor.zero_() for tensor in t.values()]), "is zero"),
    "a norm with a NaN": (
        changed(lambda t: t[NORM][3].fill_(float("nan"))),
        f"1 of the weights of {{folder}} hold numbers that are not finite: {NORM};",
    ),
    "a matrix with an infinity": (
        changed(lambda t: t["model.layers.1.mlp.up_proj.weight"][0, 0].fill_(float("inf"))),
        "not finite: model.layers.1.mlp.up_proj.weight;",
    ),
    "two that are not finite": (
        changed(lambda t: [t[name].fill_(float("-inf")) for name in (EMBEDDINGS, HEAD)]),
        f"not finite: {HEAD}, {EMBEDDINGS};",
    ),
    "weights that link to themselves": (
        lambda folder: (folder / WEIGHTS).unlink() or (folder / WEIGHTS).symlink_to(WEIGHTS),
        "the weights of",
    ),
    "complex weights": (changed(lambda t: t.update({HEAD: t[HEAD].to(torch.complex64)})), HEAD),
    "a norm of no dimension": (changed(lambda t: t.update({NORM: torch.tensor(1.0)})), NORM),
    "config begins with a mark of bytes": (
        lambda folder: (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + (folder / "config.json").read_bytes()),
        "config.json",
    ),
    "vocabulary as a fraction": (configured(vocab_size=300.5), "vocab_size"),
    "layers as a fraction": (configured(num_hidden_layers=2.5), "num_hidden_layers"),
    "an infinite size": (configured(hidden_size=float("inf")), "hidden_size"),
    "head dimension 0": (configured(head_dim=0), "config.json"),
    "odd head dimension": (configured(head_dim=7), "head_dim"),
    "no key heads": (configured(num_key_value_heads=0), "num_key_value_heads is 0 in config.json"),
    "middle size 0": (configured(intermediate_size=0), "do not match its configuration"),
    "epsilon as text": (configured(rms_norm_eps="small"), "rms_norm_eps"),
    "epsilon that is no number": (configured(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
    "epsilon below 0": (configured(rms_norm_eps=-1.0), "rms_norm_eps is -1.0"),
    "rope theta 0": (configured(rope_parameters={"rope_type": "default", "rope_theta": 0}), "rope_theta is 0"),
    "rope theta below 0": (
        configured(rope_parameters={"rope_type": "default", "rope_theta": -5.0}),
        "rope_theta is -",
    ),
    "dropout above 1": (configured(attention_dropout=2.0), "attention_dropout is 2.0, and needs to be from 0 to 0.5"),
    "dropout that is no number": (configured(attention_dropout=float("nan")), "attention_dropout is nan"),
    "initial range that is no number": (configured(initializer_range=float("nan")), "initializer_range"),
    "tied as text": (configured(tie_word_embeddings="no"), "tie_word_embeddings"),
    "no activation": (configured(hidden_act=None), "hidden_act"),
    "end of text as text": (configured(eos_token_id="</s>"), "eos_token_id"),
    "a config inside the config": (configured(text_config={"hidden_size": 5}), "config.json"),
    "weights as whole numbers": (
        changed(lambda t: t.update({n: w.char() for n, w in t.items()})),
        "stored as integers",
    ),
    "a norm of another size": (changed(lambda t: t.update({NORM: torch.ones(7)})), f"{NORM} [7] for [48]"),
    "embeddings of another size": (changed(lambda t: t.update({EMBEDDINGS: torch.ones(7, 48)})), EMBEDDINGS),
    "no embeddings": (changed(lambda t: t.pop(EMBEDDINGS)), EMBEDDINGS),
    "a weight too many": (changed(lambda t: t.update(extra=torch.ones(2))), "extra"),
    "tied weights that differ": (configured(tie_word_embeddings=True), HEAD),
    "weights are a pointer": (written(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"), "Git-LFS"),
    "weights are empty": (written(WEIGHTS, ""), "weights"),
    "weights are cut": (cut(WEIGHTS), "weights"),
    "weights are a folder": (as_folder(WEIGHTS), "weights"),
    "no weights": (without(WEIGHTS), "weights"),
    "a pickle without weights": (pickled, "are pickled (pytorch_model.bin), and a pickle can run code"),
    "index is cut": (indexed("{"), "weights"),
    "index is a list": (indexed("[]"), "it has no weight_map that names any tensor"),
    "index without a map": (indexed("{}"), "it has no weight_map that names any tensor"),
    "index with an empty map": (indexed('{"weight_map": {}}'), "it has no weight_map that names any tensor"),
    "index with a list of names": (indexed('{"weight_map": ["lm_head.weight"]}'), "it has no weight_map"),
    "index with a null map": (indexed('{"weight_map": null}'), "it has no weight_map"),
    "index of numbers": (indexed('{"weight_map": {"a": 3}}'), "it names 3, which is no file beside it"),
    "index of a missing file": (
        indexed('{"weight_map": {"lm_head.weight": "gone.safetensors"}}'),
        "it names 'gone.safetensors', which is not there",
    ),
    "index that leads out": (
        indexed('{"weight_map": {"lm_head.weight": "../good/model.safetensors"}}'),
        "it names '../good/model.safetensors', which is no file beside it",
    ),
    "index that leads to the root": (
        indexed('{"weight_map": {"lm_head.weight": "/etc/hostname"}}'),
        "it names '/etc/hostname', which is no file beside it",
    ),
    "index of the folder above": (indexed('{"weight_map": {"lm_head.weight": ".."}}'), "it names '..'"),
    "index with a NUL": (indexed('{"weight_map": {"lm_head.weight": "a\\u0000b"}}'), "which is no file beside it"),
    "index of another file": (indexed('{"weight_map": {"lm_head.weight": "config.json"}}'), "cannot be read"),
    "a tokenizer that never ends": (
        split_by(r"(((((a|b| |[a-z])+)+)+)+)+X"),
        "the tokenizer of {folder} cannot read a row: Onig: Regex search error: retry-limit-in-match over",
    ),
    "tokenizer is cut": (cut("tokenizer.json"), "tokenizer.json"),
    "tokenizer is empty": (written("tokenizer.json", ""), "tokenizer.json"),
    "tokenizer is a list": (written("tokenizer.json", "[]"), "tokenizer.json"),
    "tokenizer is null": (written("tokenizer.json", "null"), "tokenizer.json"),
    "tokenizer is an empty object": (written("tokenizer.json", "{}"), "tokenizer.json"),
    "tokenizer is no text": (written("tokenizer.json", b"\xff\xfe\x00"), "tokenizer.json"),
    "tokenizer is a folder": (as_folder("tokenizer.json"), "tokenizer"),
    "tokenizer without a model": (tokenized(model=None), "tokenizer.json"),
    "tokenizer of an unknown kind": (tokenized(model={"type": "Other"}), "tokenizer.json"),
    "added tokens as text": (tokenized(added_tokens="x"), "tokenizer.json"),
    "tokenizer with a number too large": (
        tokenized(added_tokens=[], model={"type": "WordLevel", "vocab": {"a": 0, "king": 900}, "unk_token": "a"}),
        "rows; use the tokenizer",
    ),
    "architectures as a number": (configured(architectures=3), "the architectures of {folder} are 3, and need to be"),
    "architectures of numbers": (configured(architectures=[3]), "need to be a list of names"),
    "architectures as text": (configured(architectures="LlamaForCausalLM"), "need to be a list of names"),
    "a text config that is a number": (configured(text_config=3), "the text_config of {folder} is 3"),
    "a text config that is a list": (configured(text_config=[]), "the text_config of {folder} is []"),
    "no heads inside": (configured(text_config={"num_attention_heads": 0}), "num_attention_heads is 0 in config.json"),
    "rope with a factor below 0": (
        configured(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": -1.0}),
        "rope_factor is -1.0, and needs to be above 0",
    ),
    "rope with a factor of 0": (
        configured(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}),
        "rope_factor is 0.0",
    ),
    "rope with a factor as text": (
        configured(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": "x"}),
        "model.name_or_path",
    ),
    "rope as text": (configured(rope_parameters="default"), "model.name_or_path"),
    "rope of a kind that is a number": (configured(rope_parameters={"rope_type": 3}), "model.name_or_path"),
    "llama3's rope without its rest": (
        configured(rope_parameters={"rope_type": "llama3", "factor": 8.0}),
        "model.name_or_path",
    ),
    "layers as true": (
        configured(num_hidden_layers=True),
        "config.json of {folder} cannot be used: Validation error for field 'num_hidden_layers'",
    ),
    "layers as a list": (configured(num_hidden_layers=[]), "Field 'num_hidden_layers' expected int, got list"),
    "hidden size null": (configured(hidden_size=None), "Field 'hidden_size' expected int, got NoneType"),
    "heads as text": (configured(num_attention_heads="4"), "Field 'num_attention_heads' expected int, got str"),
    "heads as a fraction": (configured(num_attention_heads=2.5), "Field 'num_attention_heads' expected int"),
    "key heads as text": (configured(num_key_value_heads="2"), "num_key_value_heads"),
    "key heads below 0": (configured(num_key_value_heads=-2), "num_key_value_heads is -2 in config.json"),
    "middle size as a list": (configured(intermediate_size=[]), "Field 'intermediate_size' expected int"),
    "middle size below 0": (configured(intermediate_size=-1), "negative dimension -1"),
    "vocabulary below 0": (configured(vocab_size=-5), "vocab_size is -5"),
    "vocabulary as true": (configured(vocab_size=True), "Field 'vocab_size' expected int, got bool"),
    "positions null": (configured(max_position_embeddings=None), "Field 'max_position_embeddings' expected int"),
    "epsilon null": (configured(rms_norm_eps=None), "Field 'rms_norm_eps' expected float, got NoneType"),
    "activation as a number": (configured(hidden_act=3), "Field 'hidden_act' expected str, got int"),
    "attention bias as text": (configured(attention_bias="x"), "Field 'attention_bias' expected bool, got str"),
    "dropout as text": (configured(attention_dropout="x"), "attention_dropout"),
    "head dimension as text": (configured(head_dim="8"), "Field 'head_dim' with value '8'"),
    "head dimension below 0": (configured(head_dim=-8), "negative dimension"),
    "type of weights as a list": (configured(dtype=[]), "model.name_or_path"),
    "cache as text": (configured(use_cache="x"), "Field 'use_cache' expected bool, got str"),
    "types of layers as a number": (configured(layer_types=3), "model.name_or_path"),
    "types of layers that are too few": (configured(layer_types=[]), "num_hidden_layers"),
    "labels as a number": (configured(id2label=3), "model.name_or_path"),
    "numbers of labels as text": (configured(id2label={"a": 3}), "model.name_or_path"),
    "end of text as a list of texts": (configured(eos_token_id=["a"]), "eos_token_id"),
    "begin of text as a list": (configured(bos_token_id=[]), "bos_token_id"),
    "padding as a fraction": (configured(pad_token_id=2.5), "pad_token_id"),
    "a map of code that is a number": (configured(auto_map=3), "model.name_or_path"),
    "a quantisation that is text": (configured(quantization_config="nf4"), "config.json"),
    "a quantisation without a method": (configured(quantization_config={}), "quantization_config"),
    "positions of the tokenizer as text": (
        set_of_tokenizer(model_max_length="long"),
        "model_max_length is 'long', and needs to be a number",
    ),
    "positions of the tokenizer as a list": (set_of_tokenizer(model_max_length=[]), "model_max_length is []"),
    "a chat template that is a number": (set_of_tokenizer(chat_template=3), "chat_template is 3, and needs to be text"),
    "end of text that is no text": (set_of_tokenizer(eos_token=3), "Special token eos_token"),
    "end of text that is a list": (set_of_tokenizer(eos_token=[]), "Special token eos_token"),
    "end of text beyond the vocabulary": (set_of_tokenizer(eos_token="<nope>"), "rows; use the tokenizer"),
    "padding beyond the vocabulary": (set_of_tokenizer(pad_token="<nope>"), "rows; use the tokenizer"),
    "begin of text that is a number": (set_of_tokenizer(bos_token=3), "Special token bos_token"),
    "added tokens that are a number": (set_of_tokenizer(added_tokens_decoder=3), "tokenizer_config.json"),
    "added tokens of odd numbers": (set_of_tokenizer(added_tokens_decoder={"a": 3}), "added_tokens_decoder"),
    "special tokens that are text": (set_of_tokenizer(additional_special_tokens="x"), "extra_special_tokens"),
    "special tokens that are numbers": (set_of_tokenizer(additional_special_tokens=[3]), "tokenizer_config.json"),
    "a side of padding that there is not": (set_of_tokenizer(padding_side="up"), "Padding side"),
    "a side of truncation that there is not": (set_of_tokenizer(truncation_side="up"), "Truncation side"),
    "code for the tokenizer that is a number": (set_of_tokenizer(auto_map=3), "tokenizer_config.json"),
    "tokenizer of another version": (tokenized(version="9.0"), "Unknown tokenizer version '9.0'"),
    "truncation below 0": (tokenized(truncation={"max_length": -1}), "tokenizer.json"),
    "padding as text": (tokenized(padding="x"), "tokenizer.json"),
    "added tokens of numbers": (tokenized(added_tokens=[3]), "tokenizer.json"),
    "added tokens with an odd number": (tokenized(added_tokens=[{"id": "x"}]), "tokenizer.json"),
    "an unknown normalizer": (tokenized(normalizer={"type": "X"}), "Normalizer"),
    "an unknown split": (tokenized(pre_tokenizer={"type": "X"}), "PreTokenizer"),
    "an unknown end": (tokenized(post_processor={"type": "X"}), "PostProcessor"),
    "an unknown decoder": (tokenized(decoder={"type": "X"}), "Decoder"),
    "pairs without a vocabulary": (tokenized(model={"type": "BPE"}), "Missing vocab"),
    "pairs with a number below 0": (
        tokenized(model={"type": "BPE", "vocab": {"a": -1}, "merges": []}),
        "expected u32",
    ),
    "pairs that are not in the vocabulary": (
        tokenized(model={"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}),
        "out of vocabulary",
    ),
    "settings of the tokenizer are cut": (cut("tokenizer_config.json"), "tokenizer_config.json"),
    "settings of the tokenizer are a list": (written("tokenizer_config.json", "[]"), "tokenizer_config.json"),
    "class of the tokenizer is a number": (
        written("tokenizer_config.json", '{"tokenizer_class": 3}'),
        "tokenizer_config.json",
    ),
}
"""Name -> what is done to a good folder, and what the error names."""

FILES_WITHOUT_WEIGHTS = {
    "weights are a pointer",
    "weights are empty",
    "weights are cut",
    "index of another file",
}
"""Those that may be pointers of Git-LFS."""

DESCRIBED: dict[str, str] = {
    "num_attention_heads=0": "model.config: num_attention_heads is 0 in the recipe; needs at least 1",
    "num_attention_heads=-4": "num_attention_heads is -4 in the recipe",
    "num_key_value_heads=0": "num_key_value_heads is 0 in the recipe",
    "num_attention_heads=5": "no model can be built from 'llama': ",
    "num_key_value_heads=3": "'llama' has 4 heads of attention that share 3 heads of keys and values, which do not",
    "hidden_size=0": "no model can be built from 'llama': hidden_size is 0; needs at least 1",
    "hidden_size=text": "Field 'hidden_size' expected int, got str",
    "num_hidden_layers=0": "num_hidden_layers is 0; needs at least 1",
    "num_hidden_layers=10001": "num_hidden_layers is 10,001 in the recipe; at most 10,000 layers are built",
    "vocab_size=0": "model.config.vocab_size: 0 is less than the tokenizer's",
    "attention_dropout=0.9": "'llama' cannot be trained: attention_dropout is 0.9",
    "rms_norm_eps=1000.0": "rms_norm_eps is 1000.0, and needs to be from 0 to 0.1",
    "attn_implementation=kernels-community/flash-attn": "the recipe asks for code from the hub (attn_implementation: ",
    "hidden_sizes=48": "hidden_sizes: unknown to the model type llama (did you mean 'hidden_size'?); allowed: ",
    "model_type=lama": "lama",
}
"""Fields of `model.config` for a Llama of 4 heads, and what the error says."""

TAKEN: dict[str, tuple[Spoil, str]] = {
    "one matrix zero": (
        changed(lambda t: t["model.layers.0.mlp.up_proj.weight"].zero_()),
        "some models begin with layers that add nothing",
    ),
    "a norm of zeros": (changed(lambda t: t[NORM].zero_()), "Gemma's norms add 1 to theirs"),
    "config says a key twice": (
        lambda folder: (folder / "config.json").write_text(
            (folder / "config.json").read_text().replace("{", '{"hidden_size": 48, ', 1)
        ),
        "JSON's last one holds, in every reader",
    ),
    "several ends of text": (configured(eos_token_id=[1, 2]), "Llama 3 has them"),
    "architectures of another": (configured(architectures=["GPT2LMHeadModel"]), "model_type says what is built"),
    "weights in 64 bits": (changed(lambda t: t.update({HEAD: t[HEAD].double()})), "they are rounded to model.dtype"),
    "no limit of positions": (configured(max_position_embeddings=-1), "so says XLNet, whose positions have no limit"),
    "unknown class of the tokenizer": (
        written("tokenizer_config.json", '{"tokenizer_class": "Other", "eos_token": "<|endoftext|>"}'),
        "tokenizer.json holds all that it needs",
    ),
    "a chat template that is broken": (written("chat_template.jinja", "{% for %}"), "plain text does not use it"),
    "no settings of generation": (written("generation_config.json", "{"), "training generates nothing"),
    "an unknown key of the config": (configured(colour="red"), "configurations carry notes of their makers"),
}
"""Name -> what is done to a good folder, and why it is trained all the same."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good model, rows, and a recipe that trains it."""
    place = tmp_path_factory.mktemp("models")
    save_llama(place / "good", TEXTS, tied=False)
    (place / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 10))
    values = recipe_values(place / "good", place / "rows.jsonl", place / "out", place / "cache")
    (place / "recipe.yaml").write_text(yaml.safe_dump(values))
    return place


@pytest.fixture
def folder(place: Path) -> Path:
    """A copy of the good model."""
    folder = place / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place / "good", folder)
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, place: Path, folder: Path) -> None:
    spoil, named = REFUSED[name]
    named = named.replace("{folder}", repr(str(folder)))
    spoil(folder)
    outcome = finetune(str(place / "recipe.yaml"), f"model.name_or_path={folder}", "--dry-run")
    assert outcome.problems(named) == [], outcome.told
    # A mend for another fault sends people off: files that are there and whole need no `git lfs pull`.
    assert ("Git-LFS" in outcome.told) == (name in FILES_WITHOUT_WEIGHTS), outcome.told


@pytest.mark.parametrize("setting", DESCRIBED)
def test_refused_descriptions(setting: str, place: Path) -> None:
    sizes = ["model_type=llama", "hidden_size=48", "num_attention_heads=4", "num_key_value_heads=2"]
    fields = dict(each.split("=") for each in [*sizes, "intermediate_size=96", "num_hidden_layers=2", setting])
    described = f"model.config={{{', '.join(f'{key}: {value}' for key, value in fields.items())}}}"
    tokenizer = f"model.tokenizer={place / 'good'}"
    outcome = finetune(str(place / "recipe.yaml"), "model.name_or_path=null", described, tokenizer, "--dry-run")
    assert outcome.problems(DESCRIBED[setting]) == [], outcome.told


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str, place: Path, folder: Path) -> None:
    TAKEN[name][0](folder)
    outcome = finetune(str(place / "recipe.yaml"), f"model.name_or_path={folder}", "--dry-run")
    assert outcome.code == 0, outcome.told


def test_what_is_drawn_at_random_or_left_unused_is_told(place: Path, folder: Path) -> None:
    changed(lambda t: t.update(extra=t.pop(HEAD)))(folder)
    recipe, allowed = str(place / "recipe.yaml"), "model.allow_new_weights=[lm_head.*, extra]"
    outcome = finetune(recipe, f"model.name_or_path={folder}", allowed, "--dry-run")
    assert "weights: 1 drawn at random: lm_head.weight; 1 left unused: extra\n" in outcome.told
    assert "weights:" not in finetune(recipe, "--dry-run").told


@pytest.mark.parametrize("through_one_rank", [False, True])
def test_a_matrix_of_zeros_is_told_and_a_norm_that_is_not_finite_refused_wherever_they_are_read(
    through_one_rank: bool, place: Path, folder: Path
) -> None:
    """Rank 0 reads for all where the files lack something that is meant to be new."""
    down = "model.layers.0.mlp.down_proj.weight"
    changed(lambda t: [t[down].zero_(), *([t.pop(HEAD)] if through_one_rank else [])])(folder)
    arguments = [str(place / "recipe.yaml"), f"model.name_or_path={folder}", "--dry-run"]
    arguments += ["model.allow_new_weights=[lm_head.*]"] * through_one_rank
    assert f"1 nothing but zeros: {down}\n" in finetune(*arguments).told
    adapted = finetune(*arguments, "adapter.kind=lora", "export.merge=true")
    assert f"1 nothing but zeros: {down}\n" in adapted.told, "and not the adapters"
    changed(lambda t: t[NORM].fill_(float("nan")))(folder)
    assert finetune(*arguments).problems(f"not finite: {NORM};") == []
